"""What is installed beside Weir, as CycloneDX 1.6: `python -m weir.runtime.sbom > sbom.json`, or `make sbom`.

Of the environment that runs it, from what its packages say of themselves. It says the same each time: there is no
moment in it, and its serial number is made of its content.
"""

import json
import re
import sys
import uuid
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from typing import Any

from weir.runtime.extras import DISTRIBUTION

_REQUIRED_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_OF_AN_EXTRA = re.compile(r";.*\bextra\b")
_MAX_LICENSE_CHARS = 64
_LICENSE_CLASSIFIER = "License :: "


def make_sbom(installed: Iterable[Distribution]) -> dict[str, Any]:
    """Of these packages; of two with one name the first counts, as for Python."""
    found: dict[str, Distribution] = {}
    for one in installed:
        name = one.metadata["Name"]
        if name:  # else what is left of one that was uninstalled
            found.setdefault(_normal(name), one)
    components = {name: _component(name, one) for name, one in sorted(found.items())}
    own = components.pop(_normal(DISTRIBUTION), {"name": DISTRIBUTION, "bom-ref": DISTRIBUTION})
    content = {
        "metadata": {"component": own | {"type": "application"}},
        "components": list(components.values()),
        "dependencies": [
            {"ref": _ref(name, one), "dependsOn": sorted(_ref(other, found[other]) for other in _needs(one, found))}
            for name, one in sorted(found.items())
        ],
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(content, sort_keys=True))
    head = {"bomFormat": "CycloneDX", "specVersion": "1.6", "serialNumber": f"urn:uuid:{serial}", "version": 1}
    return head | content


def _component(name: str, one: Distribution) -> dict[str, Any]:
    made: dict[str, Any] = {
        "type": "library",
        "bom-ref": _ref(name, one),
        "name": one.metadata["Name"],
        "version": one.version,
        "purl": _ref(name, one),
    }
    licenses = _licenses(one)
    return made | {"licenses": licenses} if licenses else made


def _ref(name: str, one: Distribution) -> str:
    return f"pkg:pypi/{name}@{one.version.replace('+', '%2B')}"


def _licenses(one: Distribution) -> list[dict[str, Any]]:
    metadata = one.metadata
    for expression in metadata.get_all("License-Expression") or []:
        return [{"expression": expression}]
    [said, *_] = [line.strip() for line in metadata.get_all("License") or [""]]
    if said and "\n" not in said and len(said) <= _MAX_LICENSE_CHARS:  # else it is the text of one
        return [{"license": {"name": said}}]
    classifiers = metadata.get_all("Classifier") or []
    names = [line.rpartition(" :: ")[2] for line in classifiers if line.startswith(_LICENSE_CLASSIFIER)]
    return [{"license": {"name": name}} for name in names]


def _needs(one: Distribution, found: dict[str, Distribution]) -> set[str]:
    """Of its requirements those that are here, without those of extras."""
    lines = (line for line in one.requires or () if not _OF_AN_EXTRA.search(line))
    names = {_normal(match[0]) for line in lines if (match := _REQUIRED_NAME.match(line))}
    return names & found.keys()


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    json.dump(make_sbom(distributions()), sys.stdout, indent=1)
    sys.stdout.write("\n")
