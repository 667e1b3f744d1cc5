"""Grammars of requests: compiled within bounds, or refused; what was compiled goes on with any token that it allows.
And chat templates: Jinja of strangers, in its sandbox."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.structured.drawing import allowed_bits, toy_vocabulary
from tests.fuzz.choices import Choices, edited, mutated_json
from tests.fuzz.target import Check, Target, simple
from weir.core.errors import InvalidRequest
from weir.core.grammar import GRAMMAR_KINDS, Grammar
from weir.grammar.llguidance_engine import LlguidanceEngine
from weir.grammar.protocol import GrammarError
from weir.model.errors import ModelError
from weir.model.tokens.chat_template import ChatTemplate

_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "pattern": "^[a-z]+$", "minLength": 1, "maxLength": 5},
        "b": {"type": "array", "items": {"$ref": "#/$defs/d"}, "minItems": 1, "maxItems": 3},
        "c": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"enum": ["x", None, 1.5]}]},
        "e": {"type": "string", "format": "date-time"},
        "f": {"type": "number", "multipleOf": 0.5, "exclusiveMinimum": 1},
    },
    "required": ["a"],
    "additionalProperties": {"const": 1},
    "$defs": {"d": {"oneOf": [{"type": "null"}, {"allOf": [{"type": "boolean"}]}]}},
}
_SOURCES = {
    "json_schema": [json.dumps(_SCHEMA)],
    "regex": [r"(a|b)*[^c-e]{2,5}\d\w\s.\pL", r"(?i)a+?(b{3}|)", r"((a*)*)*b"],
    "choice": ['["a", "b", "é"]'],
    "grammar": [
        'start: "a" rest | /b+/\nrest: ("c" | D){1,3}\nD: /[0-9]/ & ~/5/\n%ignore / /',
        'root ::= "a" (ws b)* [^x]\nws ::= [ \\t]{0,3}\nb ::= "b" | root "c"',
        'start: %json {"type": "null"}',
    ],
}
_PIECES = (
    "(", ")", "[", "]", "{", "}", "*", "+", "?", "|", ".", "\\d", "\\p{L}", "{1,9999}", "{999}", "a", "é", "^", "$",
    "\"a\"", " ", "\n", "start: ", "x: ", "y: ", "x", "y", "/a*/", " & ", "~", "%json {}", "<[5]>", "[lazy]", "::=",
    "%ignore ", "[max_tokens=5]", "(?=a)", "\\1", "(?:", "[^", "a-z", "%regex {\"substring_chars\": \"ab\"}", "#",
    "//",
)  # fmt: skip
_MAX_STEPS = 12


@contextlib.contextmanager
def _engine() -> Iterator[Check]:
    vocabulary = toy_vocabulary()
    engine = LlguidanceEngine(vocabulary)

    def check(data: bytes) -> None:
        choices = Choices(data)
        compiled = engine.compile(_grammar(choices))
        matcher = compiled.matcher()
        for _ in range(_MAX_STEPS):
            allowed = np.flatnonzero(allowed_bits(matcher, vocabulary)).tolist()
            assert allowed, "nothing may come, not even an end"
            token_id = choices.pick(allowed)
            if token_id in vocabulary.end_token_ids:
                break
            matcher.accept([token_id])
            if matcher.error:  # a bound of the engine: it is told, and the request ends with it
                break

    yield check


def _grammar(choices: Choices) -> Grammar:
    kind = choices.pick(GRAMMAR_KINDS)
    match choices.below(4):
        case 0 if kind == "json_schema":
            source = mutated_json(choices, _SCHEMA).decode()
        case 1:
            source = "".join(choices.pick(_PIECES) for _ in range(choices.below(48)))
        case 2:
            source = choices.pick(_PIECES) * choices.below(3000)
        case _:
            source = edited(choices, choices.pick(_SOURCES[kind]).encode()).decode("utf-8", "surrogateescape")
    return Grammar(kind, source)


_TEMPLATE_PIECES = (
    "{{ ", " }}", "{% ", " %}", "for m in messages", "endfor", "if ", "endif", "m.role", "m['content']", "messages",
    "x", " | tojson", " | length", " | join(',')", " | map('upper') | list", "set x = ", "namespace(a=1)",
    "range(99999)", "macro f(a)", "endmacro", "f(1)", " + ", " * 10**9", " ~ ", "'a'", "1", "(", ")", "[", "]",
    "loop.index", "self", ".__class__", ".__globals__", "cycler", "lipsum(99)", "raise_exception('x')",
    "strftime_now('%Y')", " in ", " not ", "generation", "endgeneration", "tools", "bos_token", "[::-1]", "**",
    "//0", "include 'x'", "%", " | format", ".format(", "'{0.__class__}'", "'%999999999d' % 1",
    " | center(999999999)", " | indent(99999)", "'x'", " | replace('', 'aaaaaaaaaa')", " | wordwrap(1)",
    " | batch(1) | list", " | sum", " | sort", " | unique", " | groupby('role')", " | urlize", " | xmlattr",
    " | pprint", " | random",
)  # fmt: skip


def check_template(data: bytes) -> None:
    choices = Choices(data)
    if choices.byte() % 4:
        source = "".join(choices.pick(_TEMPLATE_PIECES) for _ in range(choices.below(40)))
    else:
        source = choices.rest().decode("utf-8", "replace")
    template = ChatTemplate("m", source, {"bos_token": "<s>"})
    messages = [{"role": "user", "content": "x" * 10}, {"role": "assistant", "content": "y"}]
    template.render(messages, variables={"x": 5})


TARGETS = (
    Target("grammars", _engine, (GrammarError,), max_bytes=256, max_s=3.0, ci_examples=100),
    Target("templates", simple(check_template), (ModelError, InvalidRequest), max_bytes=256, max_s=3.0),
)
