"""JSON schemas that others have published: those that installed packages bring, and those of wheels and folders.

A file is one schema, and so is each of its definitions with what that refers to. Files of the JSON Schema Test Suite
(json-schema-org/JSON-Schema-Test-Suite) bring documents too, with a verdict on each.
"""

import importlib.metadata
import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

_PACKAGES = ("jsonschema-specifications", "setuptools", "jsonschema", "nbformat", "openapi-spec-validator")
_MARKS = ("properties", "$ref", "anyOf", "oneOf", "allOf", "enum", "items", "type")


class SuiteVerdict(NamedTuple):
    """Of a suite on a document."""

    document: Any
    is_valid: bool


class PublicSchema(NamedTuple):
    """`name` says where it is from."""

    name: str
    schema: dict[str, Any]
    verdicts: tuple[SuiteVerdict, ...] = ()


def installed_schemas() -> Iterator[PublicSchema]:
    """Of some packages that bring any, if they are installed."""
    for package in _PACKAGES:
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in sorted(file for file in files if file.suffix == ".json"):
            yield from _of_text(f"{package}/{file.name}", Path(str(file.locate())).read_text())


def schemas_of(path: Path) -> Iterator[PublicSchema]:
    """Of a wheel, or of all JSON files below a folder."""
    if path.is_dir():
        for file in sorted(path.rglob("*.json")):
            yield from _of_text(str(file.relative_to(path)), file.read_text())
        return
    with zipfile.ZipFile(path) as wheel:
        for name in sorted(name for name in wheel.namelist() if name.endswith(".json")):
            yield from _of_text(name, wheel.read(name).decode())


def _of_text(name: str, text: str) -> Iterator[PublicSchema]:
    try:
        content = json.loads(text)
    except ValueError:
        return
    if isinstance(content, list):
        yield from _of_suite(name, content)
    elif isinstance(content, dict) and any(mark in content for mark in _MARKS):
        yield PublicSchema(name, content)
        for section in ("definitions", "$defs"):
            definitions = content.get(section)
            for key in definitions if isinstance(definitions, dict) else ():
                yield PublicSchema(f"{name}#{key}", _with_its_references(content, section, key))


def _of_suite(name: str, groups: Iterable[Any]) -> Iterator[PublicSchema]:
    for group in groups:
        if isinstance(group, dict) and isinstance(group.get("schema"), dict) and "tests" in group:
            verdicts = tuple(SuiteVerdict(test["data"], test["valid"]) for test in group["tests"])
            dialect = {"$schema": _dialect(name)} if _dialect(name) else {}
            yield PublicSchema(f"{name}: {group['description']}", {**dialect, **group["schema"]}, verdicts)


def _dialect(name: str) -> str:
    drafts = {f"draft{number}/": f"http://json-schema.org/draft-0{number}/schema#" for number in (3, 4, 6, 7)}
    return next((dialect for folder, dialect in drafts.items() if folder in f"{name}/"), "")


def _with_its_references(whole: Mapping[str, Any], section: str, key: str) -> dict[str, Any]:
    """A schema of one definition, with the definitions that it needs."""
    prefix, needed, waiting = f"#/{section}/", dict[str, Any](), [key]
    while waiting:
        name = waiting.pop()
        if name in needed or name not in whole[section]:
            continue
        needed[name] = whole[section][name]
        waiting += [found.removeprefix(prefix) for found in _references(needed[name]) if found.startswith(prefix)]
    dialect = {"$schema": whole["$schema"]} if isinstance(whole.get("$schema"), str) else {}
    return {**dialect, "$ref": f"{prefix}{key}", section: needed}


def _references(part: object) -> Iterator[str]:
    waiting = [part]
    while waiting:
        found = waiting.pop()
        if isinstance(found, dict):
            waiting += found.values()
            if isinstance(found.get("$ref"), str):
                yield found["$ref"]
        elif isinstance(found, list):
            waiting += found
