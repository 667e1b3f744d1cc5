"""The document as one page of HTML for people. It needs no script, and loads nothing."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

CONTENT_SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"
_STYLE = (
    ":root{color-scheme:light dark}"
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "code{font-size:.9em}summary{cursor:pointer;padding:.3rem 0}table{border-collapse:collapse;margin:.5rem 0 1rem}"
    "td,th{text-align:left;padding:.15rem .8rem .15rem 0;vertical-align:top;border-bottom:1px solid #8884}"
)


def openapi_page(document: Mapping[str, Any]) -> str:
    """Each path with the fields of its body and of its answer."""
    info = document["info"]
    title = f"{escape(info['title'])} {escape(info['version'])}"
    parts = "".join(_operations(document))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{_STYLE}</style></head><body>'
        f'<h1>{title}</h1><p>{escape(info["summary"])}. For programs: <a href="openapi.json">openapi.json</a>.</p>'
        f"{parts}</body></html>"
    )


def _operations(document: Mapping[str, Any]) -> Iterator[str]:
    schemas = document["components"]["schemas"]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            title = f"<code>{method.upper()} {escape(path)}</code> {escape(operation['summary'])}"
            yield f"<details><summary>{title}</summary>"
            body = operation.get("requestBody")
            if body is not None:
                yield _fields("Body", _schema_of(body, schemas))
            answered = operation["responses"]["200"]
            if "application/json" in answered.get("content", ()):
                yield _fields("Answer", _schema_of(answered, schemas))
            yield "</details>"


def _schema_of(holder: Mapping[str, Any], schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    name = holder["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
    found: Mapping[str, Any] = schemas[name]
    return found


def _fields(title: str, schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(_kind(entry))}</td>"
        f"<td>{'required' if title == 'Body' and name in required else ''}</td></tr>"
        for name, entry in schema["properties"].items()
    )
    return f"<h2>{title}</h2><table>{rows}</table>"


def _kind(schema: Mapping[str, Any]) -> str:
    """In words: its type, and its range."""
    if "$ref" in schema:
        return str(schema["$ref"].rsplit("/", 1)[1])
    if "anyOf" in schema:
        return " or ".join(kind for kind in map(_kind, schema["anyOf"]) if kind != "null")
    if "enum" in schema:
        return ", ".join(str(value) for value in schema["enum"] if value is not None)
    kinds = schema.get("type", "any")
    words = kinds if isinstance(kinds, str) else " or ".join(kind for kind in kinds if kind != "null")
    if words == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    if "minimum" in schema:
        words += f", from {schema['minimum']}"
    if "maximum" in schema:
        words += f" to {schema['maximum']}"
    return words
