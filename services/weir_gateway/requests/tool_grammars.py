"""What a request with tools needs of its model: a form in which it writes calls, and the grammar of that."""

from dataclasses import replace
from typing import NoReturn

from weir.core.errors import FieldViolation, InvalidRequest
from weir.grammar.protocol import GrammarError
from weir_gateway.requests.client_request import ClientRequest
from weir_gateway.requests.models import ServedModel
from weir_gateway.tools.grammar import ToolSchemaError, tool_grammar


def with_tool_grammar(client_request: ClientRequest, model: ServedModel) -> ClientRequest:
    """The same with the grammar of its tools, where there is one; errors of that are of the field `tools`.

    Raises InvalidRequest for a model whose calls nobody could tell from text, and for a form of the answer that
    leaves no room for them.
    """
    use, names, content = client_request.tools, client_request.names, client_request.options.grammar
    if use is None:
        return client_request
    tool_format = model.answer_format.tools
    if tool_format is None:
        _refuse(
            names["tools"],
            f"model {model.name} is not known to call any: the form of its calls is found in its chat template. Its "
            "operator can give it a template with tools (--chat-template), or name the form (--tool-format)",
        )
    if content is not None and content.kind != "json_schema":
        _refuse(names["grammar"], "leaves no room for calls of tools; give a JSON schema, or no tools")
    try:
        grammar = tool_grammar(use, tool_format, model.token_of, content)
    except ToolSchemaError as error:
        _refuse(f"{names['tools']}[{error.place}].{names['tool_schema']}", str(error))
    except GrammarError as error:
        _refuse(names["grammar"], str(error))
    if grammar is None:
        return client_request
    options = replace(client_request.options, grammar=grammar)
    return replace(client_request, options=options, names={**names, "grammar": names["tools"]})


def _refuse(field: str, problem: str) -> NoReturn:
    raise InvalidRequest([FieldViolation(field, problem)])
