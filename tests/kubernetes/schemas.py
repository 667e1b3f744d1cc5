"""Whether each object is what a cluster takes: unknown fields and unknown kinds are refused."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft7Validator, Draft202012Validator
from tests.kubernetes.chart import Object, Objects
from tests.kubernetes.extract_schemas import VERSIONS

_FOLDER = Path(__file__).parent


def check_schemas(objects: Objects) -> list[str]:
    return [problem for version in VERSIONS for one in objects.all for problem in _problems(one, version)]


def _problems(one: Object, version: str) -> Iterator[str]:
    kind = f"{one.get('apiVersion')} {one.get('kind')}"
    for document, validator in ((_of_cluster(version), Draft7Validator), (_of_definitions(), Draft202012Validator)):
        if kind in document["kinds"]:
            schema = {**document["kinds"][kind], "$defs": document["$defs"]}
            for error in validator(schema).iter_errors(one):
                where = ".".join(map(str, error.absolute_path))
                yield f"{version}: {one['kind']} {one['metadata']['name']}: {where}: {error.message[:200]}"
            return
    yield f"{version}: {kind}: there is no such kind, or tests/kubernetes has no schema of it"


@cache
def _of_cluster(version: str) -> Any:
    return json.loads((_FOLDER / f"schemas-{version}.json").read_text())


@cache
def _of_definitions() -> Any:
    return yaml.safe_load((_FOLDER / "crds.yaml").read_text())
