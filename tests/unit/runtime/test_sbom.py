"""The list of what is installed: CycloneDX, complete, and the same each time."""

import json
import re
import subprocess
import sys
from importlib.metadata import PathDistribution, distributions
from pathlib import Path

from weir.runtime.extras import DISTRIBUTION
from weir.runtime.sbom import make_sbom


def distribution(folder: Path, name: str, text: str) -> PathDistribution:
    path = folder / f"{name}.dist-info"
    path.mkdir()
    (path / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\n{text}\n")
    return PathDistribution(path)


def test_it_names_packages_with_licenses_and_what_they_need(tmp_path: Path) -> None:
    own = distribution(
        tmp_path, DISTRIBUTION, "Version: 0.1\nRequires-Dist: Torch_Like>=1\nRequires-Dist: plots; extra=='p'"
    )
    torch = distribution(tmp_path, "Torch.Like", "Version: 2.13.0+cpu\nLicense-Expression: BSD-3-Clause")
    plots = distribution(tmp_path, "plots", "Version: 1\nClassifier: License :: OSI Approved :: MIT License")
    old = distribution(tmp_path, "old", f"Version: 1\nLicense: {'all of it ' * 30}\nRequires-Dist: ?? no requirement")
    made = make_sbom([own, torch, plots, old, torch])
    assert (made["bomFormat"], made["specVersion"]) == ("CycloneDX", "1.6")
    assert re.fullmatch(r"urn:uuid:[0-9a-f-]{36}", made["serialNumber"])
    assert (made["metadata"]["component"]["name"], made["metadata"]["component"]["type"]) == (
        DISTRIBUTION,
        "application",
    )
    by_name = {one["name"]: one for one in made["components"]}
    assert by_name.keys() == {"Torch.Like", "plots", "old"}
    assert by_name["Torch.Like"]["purl"] == "pkg:pypi/torch-like@2.13.0%2Bcpu"
    assert by_name["Torch.Like"]["licenses"] == [{"expression": "BSD-3-Clause"}]
    assert by_name["plots"]["licenses"] == [{"license": {"name": "MIT License"}}]
    assert "licenses" not in by_name["old"]
    needs = {one["ref"]: one["dependsOn"] for one in made["dependencies"]}
    assert needs[f"pkg:pypi/{DISTRIBUTION}@0.1"] == ["pkg:pypi/torch-like@2.13.0%2Bcpu"]
    assert needs.keys() == {one["bom-ref"] for one in (*made["components"], made["metadata"]["component"])}


def test_that_of_this_environment_is_complete_and_the_same_each_time() -> None:
    command = [sys.executable, "-m", "weir.runtime.sbom"]
    first, second = (subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2))
    assert first == second
    made = json.loads(first)
    names = {one["name"] for one in made["components"]} | {DISTRIBUTION}
    assert names == {one.metadata["Name"] for one in distributions() if one.metadata["Name"]}
    own = made["metadata"]["component"]["bom-ref"]
    needed = next(one["dependsOn"] for one in made["dependencies"] if one["ref"] == own)
    assert {"grpcio", "numpy"} <= {re.sub(r"pkg:pypi/(.*)@.*", r"\1", ref) for ref in needed}
