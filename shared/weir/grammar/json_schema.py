"""A JSON schema as its engine is given it: what the engine would let pass, and the schema does not, is ruled out.

llguidance counts a key that comes twice as two, takes February 29 of any year for a date, and any minute for one with a
leap second. A parser of the answer would stumble over each.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from weir.grammar.protocol import GrammarError

_Schema = dict[str, Any]

_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_OF_ONE_OR_LISTS = (
    *("items", "prefixItems", "additionalItems", "additionalProperties", "allOf", "anyOf", "oneOf"),
    *("not", "if", "then", "else", "contains", "propertyNames", "unevaluatedItems", "unevaluatedProperties"),
)
# White space is bounded: models never end it. There is no \\u: with it a key could be spelled in a way that no schema
# looks for, and have a value that is another key's.
_OPTIONS: dict[str, Any] = {
    "whitespace_flexible": True,
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}",
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
    "json_allowed_escapes": 'nrbtf\\"',
}
_MAX_PATTERN_CHARS = 64
_SPACE = r"(?:[ \n\r\t]|\\[nrt]|\\x(?:20|0[aAdD9]))"
_WHITE_SPACE = re.compile(rf"(?:(?:{_SPACE}|\[{_SPACE}+\])(?:[?*+]|\{{[0-9]{{1,3}}(?:,[0-9]{{0,3}})?\}})?)*")
_UNKNOWN_DIALECT = re.compile("json-schema.org/draft-0[0-3]/")
_CONTROL_SIGN = re.compile(r"(?<!\\)(?:\\\\)*\\u00[01]")
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_SOME_YEAR = "^(?:[1-9]|0[1-9]|00[1-9]|000[1-9])"
_DAY_OF_ITS_YEAR = f"^(?:[0-9]{{4}}-(?:0[13-9]|1|02-(?:[01]|2[0-8]))|{_LEAP_YEAR}-02-29)"
_PATTERNS = {
    "date": (_SOME_YEAR, _DAY_OF_ITS_YEAR),
    "date-time": (_SOME_YEAR, _DAY_OF_ITS_YEAR, "^.{17}[0-5]"),
    "time": ("^.{6}[0-5]",),
}
"""Beside what the engine holds a format to, so that a date is one that Python, pydantic and databases have."""


def engine_schema(source: str) -> str:
    """With the engine's options in it.

    Raises GrammarError for what is no schema, and for what the engine cannot be held to.
    """
    schema = _parsed(source)
    options = _OPTIONS | _white_space_of(schema.pop("x-guidance", {}))
    if _UNKNOWN_DIALECT.search(str(schema.get("$schema"))):  # llguidance takes it, and none of its keywords
        raise GrammarError(
            "is of draft 3 of JSON Schema or an older one; drafts 4, 6, 7, 2019-09 and 2020-12 are taken"
        )
    for part in list(_parts(schema)):
        _check_num_properties(part)
        patterns = _PATTERNS.get(str(part.get("format")), ())
        if patterns:
            part["allOf"] = [*part.get("allOf", ()), *({"pattern": pattern} for pattern in patterns)]
    return json.dumps({**schema, "x-guidance": options}, ensure_ascii=False, separators=(",", ":"))


def _white_space_of(wanted: object) -> dict[str, Any]:
    """Of what llguidance lets a schema say of itself."""
    if not isinstance(wanted, dict):
        raise GrammarError("x-guidance must be an object")
    unknown = next((name for name in wanted if name not in ("whitespace_flexible", "whitespace_pattern")), None)
    if unknown is not None:
        raise GrammarError(f"x-guidance.{unknown[:64]} is not taken; whitespace_flexible and whitespace_pattern are")
    is_flexible, pattern = wanted.get("whitespace_flexible", True), wanted.get("whitespace_pattern")
    if not isinstance(is_flexible, bool):
        raise GrammarError("x-guidance.whitespace_flexible must be true or false")
    if pattern is None:
        return {} if is_flexible else {"whitespace_flexible": False, "whitespace_pattern": None}
    if not isinstance(pattern, str) or len(pattern) > _MAX_PATTERN_CHARS or not _WHITE_SPACE.fullmatch(pattern):
        raise GrammarError(
            f"x-guidance.whitespace_pattern must be a regular expression of spaces, \\n, \\r and \\t alone, of at most "
            f"{_MAX_PATTERN_CHARS} characters, such as [ \\n]?"
        )
    return {"whitespace_flexible": True, "whitespace_pattern": pattern}


def _parsed(source: str) -> _Schema:
    try:
        schema = json.loads(source, object_pairs_hook=_with_each_key_once)
        written = json.dumps(schema, ensure_ascii=False)
        written.encode()
    except RecursionError:
        raise GrammarError("is nested too deeply") from None
    except UnicodeEncodeError:
        raise GrammarError("has a lone surrogate, written as \\u and its number; must be valid Unicode") from None
    except ValueError as error:
        raise GrammarError(f"is no JSON: {error}") from None
    if not isinstance(schema, dict):  # llguidance would take the schema of anything else for any text
        raise GrammarError("must be a JSON schema, which is an object")
    if _CONTROL_SIGN.search(written):  # the engine would leave it out of the text that has it
        raise GrammarError("has a control character; of those \\b, \\f, \\n, \\r and \\t can be written in an answer")
    return schema


def _with_each_key_once(pairs: list[tuple[str, Any]]) -> _Schema:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise GrammarError(f"has the key {twice[:64]!r} twice in one object")
    return found


def _parts(schema: _Schema) -> Iterator[_Schema]:
    """It and all schemas in it, each once, but for what is data and looks like one."""
    seen, waiting = set[int](), list[Any]([schema])
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict) and id(part) not in seen:
            seen.add(id(part))
            yield part
            for name in _OF_NAMES:
                waiting += part[name].values() if isinstance(part.get(name), dict) else ()
            waiting += (part[name] for name in _OF_ONE_OR_LISTS if name in part)
            waiting.append(_target(schema, part.get("$ref")))


def _target(schema: _Schema, reference: object) -> object:
    """Of a reference into the schema, which may lead to where no schema is looked for."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: Any = schema
    for step in reference[2:].split("/"):
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


def _check_num_properties(part: _Schema) -> None:
    """Each required key comes once, and one other at least; further ones may be the same key again."""
    fewest, required = part.get("minProperties", 0), part.get("required", [])
    is_closed = part.get("additionalProperties") is False and not part.get("patternProperties")
    if is_closed or not isinstance(fewest, int) or not isinstance(required, list):
        return
    if fewest > len(required) + 1:
        raise GrammarError(
            f"minProperties ({fewest}) cannot be held to where keys that are not named may come, for one may come "
            f"twice; at most {len(required) + 1} here: one more than required keys"
        )
