"""`make gpu` runs where little is installed: what it imports may need no more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.__main__ import parts_of

pytest.importorskip("triton", reason="Triton is installed on Linux only")

_REPOSITORY = Path(__file__).parents[2]
_INSTALLED_THERE = ("torch", "triton", "numpy", "grpcio", "msgpack", "tokenizers", "safetensors", "pytest")
_MODULES = (
    "benchmarks.gpu.__main__",
    "benchmarks.gpu.cuda_pair",
    "benchmarks.kernels.__main__",
    "benchmarks.gpu.step",
    "benchmarks.gpu.kernels",
)
_CASES = sorted(path.stem for path in (_REPOSITORY / "tests/kernels/triton_cases").glob("case_*.py"))

# Everything that only the project's own dependencies bring is refused.
_REFUSE = """
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
assert {"numba", "nats", "hypothesis"} <= refused
"""
_IMPORT = """
for module in sys.argv[2:]:
    importlib.import_module(module)
"""
_COLLECT = """
import pytest
sys.exit(pytest.main(sys.argv[2:]))
"""


@pytest.fixture
def other_tests(tmp_path: Path) -> Path:
    """A folder with somebody else's package of that name, as one may be installed there."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/__init__.py").write_text("raise ImportError('the tests of something else')\n")
    return tmp_path


def test_the_gpu_path_imports_nothing_that_such_a_machine_lacks(other_tests: Path) -> None:
    modules = [*_MODULES, *(f"tests.kernels.triton_cases.{case}" for case in _CASES)]
    assert _CASES
    child = _run(_REFUSE + _IMPORT, modules, [_REPOSITORY / "shared", _REPOSITORY, other_tests])
    assert child.returncode == 0, child.stderr[-2000:]


def test_make_gpu_collects_its_tests_on_such_a_machine(other_tests: Path) -> None:
    (part,) = (part for part in parts_of(other_tests) if part.name == "tests")
    assert part.arguments[:2] == ("-m", "pytest")
    child = _run(_REFUSE + _COLLECT, ["--collect-only", *part.arguments[2:]], [_REPOSITORY / "shared", other_tests])
    assert child.returncode == 0, child.stdout[-2000:] + child.stderr[-2000:]
    collected = {line.rpartition("::")[2] for line in child.stdout.splitlines() if "::" in line}
    assert collected == {f"test_on_the_gpu[{case}]" for case in _CASES}


def _run(code: str, arguments: list[str], search_path: list[Path]) -> "subprocess.CompletedProcess[str]":
    """In the repository's root, which is also where the child looks for modules first, as after `python -m`."""
    return subprocess.run(
        [sys.executable, "-c", code, ",".join(_INSTALLED_THERE), *arguments],
        cwd=_REPOSITORY,
        env={
            "PYTHONPATH": os.pathsep.join(map(str, search_path)),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # those of this environment are not installed there
            "TRITON_INTERPRET": "1",
            "PATH": "/usr/bin:/bin",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
