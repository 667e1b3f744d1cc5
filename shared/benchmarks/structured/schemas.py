"""JSON schemas written by chance from a seed, with documents that they allow.

They are composed of what the schemas of JSONSchemaBench (arXiv 2501.10868) are made of: nested objects with optional
keys and closed or open ends, arrays, tuples, enums, anyOf, oneOf, allOf, references and recursion, patterns, formats,
bounds, keys in any script. Each part comes with a way to draw documents, which knows nothing of the engine.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from benchmarks.structured.strings import pattern_of, string_of, words_of

Draw = Callable[[Random], Any]
_MAX_DEPTH = 3
_KEYS = ("id", "name", "größe", "名前", "ключ", "is on", "x-y", "a.b", "$id", "a/b", 'say "so"', "n", "items", "type")
_NUMBERS = (0.5, 0.25, 2, 3, 10)


@dataclass(frozen=True, slots=True)
class SchemaExample:
    """`draw` gives documents that `schema` allows, their keys in the schema's order."""

    schema: dict[str, Any]
    draw: Draw


@dataclass(slots=True)
class _Writer:
    """Of one schema; `definitions` are what its references name."""

    random: Random
    definitions: dict[str, SchemaExample]

    def node(self, depth: int) -> SchemaExample:
        flat = (_string, _string, _integer, _number, _boolean, _null, _enum, _const)
        deep = (
            *(_object, _object, _object, _array, _array, _tuple, _any_of, _one_of, _all_of, _reference, _map),
            *(_nullable, _narrowed, _either_key, _unnamed_key),
        )
        return self.random.choice(flat if depth >= _MAX_DEPTH else flat + deep + deep)(self, depth)


def schema_example(seed: int) -> SchemaExample:
    """An object, an array or a choice of them; the same for the same seed."""
    writer = _Writer(Random(seed), {})
    root = writer.random.choice((_object, _object, _object, _array, _any_of, _all_of, _tree))(writer, 0)
    schema = dict(root.schema)
    if writer.definitions:
        schema["$defs"] = {name: example.schema for name, example in writer.definitions.items()}
    if writer.random.random() < 0.3:
        schema |= {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Größe", "description": "x"}
    return SchemaExample(schema, root.draw)


def _string(writer: _Writer, depth: int) -> SchemaExample:
    del depth
    kind = string_of(writer.random)
    return SchemaExample({"type": "string", **kind.keywords}, kind.draw)


def _integer(writer: _Writer, depth: int) -> SchemaExample:
    del depth
    random = writer.random
    low = random.choice((-1000, -1, 0, 1, 7))
    high = low + random.choice((0, 1, 9, 150, 10**6))
    match random.randrange(4):
        case 0:
            return SchemaExample({"type": "integer"}, lambda drawing: drawing.randint(-(10**9), 10**9))
        case 1:
            step = random.choice((2, 3, 10))
            return SchemaExample(
                {"type": "integer", "minimum": 0, "multipleOf": step}, lambda drawing: step * drawing.randint(0, 999)
            )
        case 2:
            bounds = {"exclusiveMinimum": low - 1, "exclusiveMaximum": high + 1}
            return SchemaExample({"type": "integer", **bounds}, lambda drawing: drawing.randint(low, high))
        case _:
            return SchemaExample(
                {"type": "integer", "minimum": low, "maximum": high}, lambda drawing: drawing.randint(low, high)
            )


def _number(writer: _Writer, depth: int) -> SchemaExample:
    del depth
    random = writer.random
    low = random.choice((-2.5, 0, 0.125, 100))
    high = low + random.choice(_NUMBERS)
    if random.random() < 0.3:
        return SchemaExample({"type": "number"}, lambda drawing: round(drawing.uniform(-1e4, 1e4), 3))
    return SchemaExample(
        {"type": "number", "minimum": low, "maximum": high},
        lambda drawing: drawing.choice((low, high, (low + high) / 2)),
    )


def _boolean(writer: _Writer, depth: int) -> SchemaExample:
    del writer, depth
    return SchemaExample({"type": "boolean"}, lambda drawing: drawing.random() < 0.5)


def _null(writer: _Writer, depth: int) -> SchemaExample:
    del writer, depth
    return SchemaExample({"type": "null"}, lambda _: None)


def _enum(writer: _Writer, depth: int) -> SchemaExample:
    del depth
    values: list[Any] = [*words_of(writer.random, 5), 3, None, {"a": [1, "ü"]}]
    if writer.random.random() < 0.6:
        values = values[:-3]
    return SchemaExample({"enum": values}, lambda drawing: drawing.choice(values))


def _const(writer: _Writer, depth: int) -> SchemaExample:
    del depth
    value = writer.random.choice(("fest", 0, -1.5, True, None, [1, [2]], {"k": {"é": ""}}))
    return SchemaExample({"const": value}, lambda _: value)


def _object(writer: _Writer, depth: int) -> SchemaExample:
    """With optional keys; closed, open for a kind of values, or, as schemas are where nothing is said, for any."""
    random = writer.random
    parts = {name: writer.node(depth + 1) for name in random.sample(_KEYS, random.randint(1, 4))}
    required = [name for name in parts if random.random() < 0.6]
    schema: dict[str, Any] = {"type": "object", "properties": {name: part.schema for name, part in parts.items()}}
    if required or random.random() < 0.5:
        schema["required"] = required
    more: Draw | None = None
    match random.randrange(4):
        case 0:
            more = lambda drawing: drawing.choice((1, "x", None, [True], {"y": {}}))  # noqa: E731
        case 1:
            other = writer.node(_MAX_DEPTH)
            schema["additionalProperties"], more = other.schema, other.draw
        case _:
            schema["additionalProperties"] = False

    def draw(drawing: Random) -> dict[str, Any]:
        found = {name: part.draw(drawing) for name, part in parts.items() if name in required or drawing.random() < 0.5}
        if more is not None and drawing.random() < 0.5:
            found["andere"] = more(drawing)
        return found

    return SchemaExample(schema, draw)


def _map(writer: _Writer, depth: int) -> SchemaExample:
    """Keys of a pattern."""
    value = writer.node(depth + 1)
    pattern, draw_key = pattern_of(writer.random)
    schema = {
        "type": "object",
        "patternProperties": {f"^k{pattern}$": value.schema},
        "additionalProperties": False,
        "maxProperties": 3,
    }
    return SchemaExample(
        schema, lambda drawing: {f"k{draw_key(drawing)}": value.draw(drawing) for _ in range(drawing.randint(0, 3))}
    )


def _array(writer: _Writer, depth: int) -> SchemaExample:
    random, item = writer.random, writer.node(depth + 1)
    fewest, most = random.randint(0, 2), random.randint(2, 5)
    schema = {"type": "array", "items": item.schema, "minItems": fewest, "maxItems": most}
    if random.random() < 0.3:
        del schema["minItems"]
    return SchemaExample(schema, lambda drawing: [item.draw(drawing) for _ in range(drawing.randint(fewest, most))])


def _tuple(writer: _Writer, depth: int) -> SchemaExample:
    items = [writer.node(depth + 1) for _ in range(writer.random.randint(1, 3))]
    schema = {
        "type": "array",
        "prefixItems": [item.schema for item in items],
        "items": False,
        "minItems": len(items),
    }
    return SchemaExample(schema, lambda drawing: [item.draw(drawing) for item in items])


def _any_of(writer: _Writer, depth: int) -> SchemaExample:
    branches = [writer.node(depth + 1) for _ in range(writer.random.randint(2, 3))]
    return SchemaExample(
        {"anyOf": [branch.schema for branch in branches]}, lambda drawing: drawing.choice(branches).draw(drawing)
    )


def _one_of(writer: _Writer, depth: int) -> SchemaExample:
    """Of branches that exclude one another: by a tag, or by their types."""
    if writer.random.random() < 0.5:
        makers: list[Callable[[_Writer, int], SchemaExample]] = [_string, _integer, _boolean, _null, _array]
        branches = [make(writer, depth + 1) for make in writer.random.sample(makers, 2)]
    else:
        branches = [_tagged(writer, depth, tag) for tag in ("circle", "квадрат")]
    return SchemaExample(
        {"oneOf": [branch.schema for branch in branches]}, lambda drawing: drawing.choice(branches).draw(drawing)
    )


def _tagged(writer: _Writer, depth: int, tag: str) -> SchemaExample:
    value = writer.node(depth + 1)
    schema = {
        "type": "object",
        "properties": {"kind": {"const": tag}, "value": value.schema},
        "required": ["kind", "value"],
        "additionalProperties": False,
    }
    return SchemaExample(schema, lambda drawing: {"kind": tag, "value": value.draw(drawing)})


def _all_of(writer: _Writer, depth: int) -> SchemaExample:
    """Of objects with keys of their own, as schemas that extend others are written."""
    parts = {f"{prefix}{number}": writer.node(depth + 1) for number, prefix in enumerate(("erst ", "second_"))}
    branches = [
        {"type": "object", "properties": {name: part.schema}, "required": [name]} for name, part in parts.items()
    ]
    return SchemaExample(
        {"allOf": branches}, lambda drawing: {name: part.draw(drawing) for name, part in parts.items()}
    )


def _nullable(writer: _Writer, depth: int) -> SchemaExample:
    """As programs write optional values: a list of types, whose keywords count for one of them."""
    of_type = writer.random.choice((_string, _integer, _number, _object, _array))(writer, depth + 1)
    schema = of_type.schema | {"type": [of_type.schema["type"], "null"]}
    return SchemaExample(schema, lambda drawing: of_type.draw(drawing) if drawing.random() < 0.5 else None)


def _narrowed(writer: _Writer, depth: int) -> SchemaExample:
    """One key, bounded by each of several branches."""
    del depth
    low = writer.random.randint(-20, 20)
    branches: list[dict[str, Any]] = [
        {"type": "object", "properties": {"größe": {"type": "integer", "minimum": low}}},
        {"properties": {"größe": {"maximum": low + 12}}, "required": ["größe"]},
        {"maxProperties": 1},
    ]
    schema = {"allOf": branches[: writer.random.choice((2, 3))]}
    return SchemaExample(schema, lambda drawing: {"größe": drawing.randint(low, low + 12)})


def _either_key(writer: _Writer, depth: int) -> SchemaExample:
    """Of two keys at least one."""
    parts = {name: writer.node(depth + 1) for name in ("mail", "téléphone")}
    schema = {
        "type": "object",
        "properties": {name: part.schema for name, part in parts.items()},
        "anyOf": [{"required": [name]} for name in parts],
        "additionalProperties": False,
    }

    def draw(drawing: Random) -> dict[str, Any]:
        name = drawing.choice(list(parts))
        return {name: parts[name].draw(drawing)}

    return SchemaExample(schema, draw)


def _unnamed_key(writer: _Writer, depth: int) -> SchemaExample:
    """A required key that no property names: its value is what other keys' values are."""
    value = writer.node(depth + 1)
    schema = {"type": "object", "required": ["neu"], "additionalProperties": value.schema}
    return SchemaExample(schema, lambda drawing: {name: value.draw(drawing) for name in ("neu", "b", "c")})


def _reference(writer: _Writer, depth: int) -> SchemaExample:
    part = writer.node(depth + 1)
    name = f"part {len(writer.definitions)}"
    writer.definitions[name] = part
    return SchemaExample({"$ref": f"#/$defs/{name.replace(' ', '%20')}"}, part.draw)


def _tree(writer: _Writer, depth: int) -> SchemaExample:
    """That has itself for children."""
    value = writer.node(depth + 2)
    name = f"tree{len(writer.definitions)}"
    reference = {"$ref": f"#/$defs/{name}"}
    schema = {
        "type": "object",
        "properties": {"value": value.schema, "children": {"type": "array", "items": reference, "maxItems": 2}},
        "required": ["value"],
        "additionalProperties": False,
    }

    def draw(drawing: Random, depth: int = 0) -> dict[str, Any]:
        found = {"value": value.draw(drawing)}
        if depth < 3 and drawing.random() < 0.5:
            found["children"] = [draw(drawing, depth + 1) for _ in range(drawing.randint(0, 2))]
        return found

    writer.definitions[name] = SchemaExample(schema, draw)
    return SchemaExample(reference, draw)
