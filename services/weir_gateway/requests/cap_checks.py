"""Holds a request to the caps of its tenant and its lane, under the names that its client wrote."""

from weir.core.errors import FieldViolation, InvalidRequest
from weir_gateway.caps import CapsInForce
from weir_gateway.requests.client_request import ClientRequest, TokenIds


def check_caps(client_request: ClientRequest, caps: CapsInForce, max_context_tokens: int) -> None:
    """Raises InvalidRequest with every field over its cap, as far as that is known before the prompt is tokenized."""
    options, names, found = client_request.options, client_request.names, []
    num_choices, top_k = options.n or 1, options.top_k
    if caps.n is not None and num_choices > caps.n.value:
        found.append(FieldViolation(names["n"], f"is {num_choices}; {caps.n.described}"))
    if caps.top_k is not None and top_k is not None and not 1 <= top_k <= caps.top_k.value:
        all_tokens = ", which is all tokens" if top_k == 0 else ""
        found.append(FieldViolation(names["top_k"], f"is {top_k}{all_tokens}; {caps.top_k.described}"))
    if caps.output_tokens is not None:
        for name in ("max_tokens", "min_tokens"):
            value = getattr(options, name)
            if value is not None and value > caps.output_tokens.value:
                found.append(FieldViolation(names[name], f"is {value}; {caps.output_tokens.described}"))
    if not any(violation.field == names["max_tokens"] for violation in found):
        is_ids = isinstance(client_request.prompt, TokenIds)
        num_prompt = len(client_request.prompt.ids) if isinstance(client_request.prompt, TokenIds) else 1
        prompt_field = names["token_ids"] if is_ids else ""
        found += find_too_long(client_request, caps, prompt_field, num_prompt, max_context_tokens, is_least=not is_ids)
    if found:
        raise InvalidRequest(found)


def find_too_long(
    client_request: ClientRequest,
    caps: CapsInForce,
    prompt_field: str,
    num_prompt_tokens: int,
    max_context_tokens: int,
    *,
    is_least: bool = False,
) -> list[FieldViolation]:
    """Prompt and output together. `is_least`: the prompt is not counted yet, and has at least so many tokens."""
    cap, max_tokens = caps.sequence_tokens, client_request.options.max_tokens
    if cap is None:
        return []
    if num_prompt_tokens >= cap.value and prompt_field:
        problem = f"is {num_prompt_tokens} tokens; {cap.described} of prompt and output, one of them of output"
        return [FieldViolation(prompt_field, problem)]
    if max_tokens is not None and min(num_prompt_tokens + max_tokens, max_context_tokens) > cap.value:
        prompt = "a prompt of any length" if is_least else f"a prompt of {num_prompt_tokens} tokens"
        problem = f"is {max_tokens}, with {prompt}; {cap.described} tokens of prompt and output together"
        return [FieldViolation(client_request.names["max_tokens"], problem)]
    return []
