"""The chart's objects, as Helm's own engine renders them from a file of values."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart

CHART = Path(__file__).parents[2] / "compose" / "kubernetes"
VALUES_FILES = tuple(sorted(path.stem for path in (CHART / "ci").glob("*.yaml")))
RELEASE, NAMESPACE = "weir", "serving"
Object = dict[str, Any]
_NOTES = "NOTES.txt"


def values_of(name: str) -> Any:
    return yaml.safe_load((CHART / "ci" / f"{name}.yaml").read_text())


@cache
def _chart() -> Chart:
    return Chart.load(str(CHART))


def render(values: Mapping[str, Any]) -> list[Object]:
    """All objects, those of `helm test` too, by kind and name. Raises HelmError for what the chart refuses."""
    rendered = _chart().render(dict(values), name=RELEASE, namespace=NAMESPACE)
    texts = (text for path, text in rendered.items() if not path.endswith(_NOTES))
    found = [one for text in texts for one in yaml.safe_load_all(text) if one]
    return sorted(found, key=lambda one: (one["kind"], one["metadata"]["name"]))


@cache
def _rendered(name: str) -> list[Object]:
    return render(values_of(name))


def rendered(name: str) -> "Objects":
    """Of a values file; a copy, to be changed at will."""
    return Objects(copy.deepcopy(_rendered(name)))


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod, or what pods are made of. `owner`: None for one by itself."""

    name: str
    labels: Mapping[str, str]
    spec: Object
    owner: Object | None

    @property
    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    @property
    def containers(self) -> list[Object]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    def volume(self, name: str) -> Object | None:
        claims = [] if self.owner is None else self.owner["spec"].get("volumeClaimTemplates", [])
        volumes = [*self.spec.get("volumes", []), *({"name": claim["metadata"]["name"]} for claim in claims)]
        return next((volume for volume in volumes if volume["name"] == name), None)


class Objects:
    """All of a release."""

    def __init__(self, objects: list[Object]) -> None:
        self.all = objects

    def of(self, kind: str) -> list[Object]:
        return [one for one in self.all if one["kind"] == kind]

    def one(self, kind: str, name: str) -> Object:
        return next(one for one in self.of(kind) if one["metadata"]["name"] == name)

    def remove(self, kind: str, name: str) -> None:
        self.all.remove(self.one(kind, name))

    def pods(self) -> Iterator[Pod]:
        for one in self.all:
            if one["kind"] in ("StatefulSet", "Deployment"):
                template = one["spec"]["template"]
                yield Pod(one["metadata"]["name"], template["metadata"]["labels"], template["spec"], one)
            elif one["kind"] == "Pod":
                yield Pod(one["metadata"]["name"], one["metadata"]["labels"], one["spec"], None)

    def pod(self, component: str) -> Pod | None:
        return next((pod for pod in self.pods() if pod.component == component), None)

    def selected(self, selector: Mapping[str, str]) -> list[Pod]:
        return [pod for pod in self.pods() if selector.items() <= pod.labels.items()]

    @property
    def configuration(self) -> Mapping[str, str]:
        """Files of the ConfigMap."""
        files: Mapping[str, str] = self.one("ConfigMap", f"{RELEASE}-config")["data"]
        return files
