"""`make gpu` runs where little is installed: what it imports may need no more."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is installed on Linux only")

_REPOSITORY = Path(__file__).parents[2]
_INSTALLED_THERE = ("torch", "triton", "numpy", "grpcio", "msgpack", "tokenizers", "safetensors", "pytest")
_MODULES = (
    "benchmarks.gpu.suite",
    "benchmarks.gpu.pair.__main__",
    "benchmarks.kernels.__main__",
    "benchmarks.gpu.step",
    "benchmarks.gpu.kernels",
)
_CASES = sorted(path.stem for path in (_REPOSITORY / "tests/kernels/triton_cases").glob("case_*.py"))

# Everything that only the project's own dependencies bring is refused.
_CHILD = """
import importlib, importlib.metadata, re, sys

def names(distribution):
    found = set()
    todo = [distribution]
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        try:
            required = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        todo += [re.split(r"[ ;<>=!~\\[(]", text)[0].lower() for text in required if "extra ==" not in text]
    return found

installed_there = set().union(*(names(each) for each in sys.argv[1].split(",")))
refused = {
    module
    for module, distributions in importlib.metadata.packages_distributions().items()
    if not any(each.lower() in installed_there for each in distributions)
} - {"weir", "benchmarks", "tests"}

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in refused:
            raise ModuleNotFoundError(f"{name} is not installed on a machine with little more than torch", name=name)

sys.meta_path.insert(0, Refuse())
for module in sys.argv[2:]:
    importlib.import_module(module)
print("numba" in refused and "nats" in refused)
"""


def test_the_gpu_path_imports_nothing_that_such_a_machine_lacks() -> None:
    modules = [*_MODULES, *(f"tests.kernels.triton_cases.{case}" for case in _CASES)]
    assert _CASES
    child = subprocess.run(
        [sys.executable, "-c", _CHILD, ",".join(_INSTALLED_THERE), *modules],
        cwd=_REPOSITORY,
        env={"PYTHONPATH": f"{_REPOSITORY}/shared:{_REPOSITORY}", "TRITON_INTERPRET": "1", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (child.returncode, child.stdout.strip()) == (0, "True"), child.stderr[-2000:]
