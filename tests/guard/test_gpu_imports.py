"""`make gpu` runs where little is installed: what it imports may need no more."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.parts import chosen, parts_of

pytest.importorskip("triton", reason="Triton is installed on Linux only")

_REPOSITORY = Path(__file__).parents[2]
_INSTALLED_THERE = ("torch", "triton", "numpy", "grpcio", "msgpack", "tokenizers", "safetensors", "pytest")
_MODULES = (
    "benchmarks.kernels.__main__",
    *(f"benchmarks.gpu.{path.stem}" for path in sorted((_REPOSITORY / "shared/benchmarks/gpu").glob("[!_]*.py"))),
    "benchmarks.gpu.__main__",
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
assert {"numba", "nats", "hypothesis", "opentelemetry"} <= refused
"""
_IMPORT = """
for module in sys.argv[2:]:
    importlib.import_module(module)
"""
_COLLECT = """
import pytest
sys.exit(pytest.main(sys.argv[2:]))
"""
_RUN = """
import runpy
sys.argv[1:] = sys.argv[2:]
runpy.run_module("{module}", run_name="__main__")
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
    (part,) = chosen(parts_of(_REPOSITORY), "tests")
    arguments = [command.arguments for command in part.commands]
    assert {each[:2] for each in arguments} == {("-m", "pytest")}
    files = [each[-1] for each in arguments]
    assert {Path(path).stem for path in files} == set(_CASES)
    # all files in one process here, for they are collected in seconds
    search_path = [_REPOSITORY / "shared", other_tests]
    child = _run(_REFUSE + _COLLECT, ["--collect-only", *arguments[0][2:-1], *files], search_path)
    assert child.returncode == 0, child.stdout[-2000:] + child.stderr[-2000:]
    collected = {line.partition("::")[0] for line in child.stdout.splitlines() if "::" in line}
    assert collected == set(files)


def test_every_part_is_a_module_that_is_there() -> None:
    modules = {each.arguments[1] for part in parts_of(_REPOSITORY) for each in part.commands}
    assert modules - {"pytest"} <= set(_MODULES)
    assert len(modules) > 6


def test_without_what_a_stack_needs_its_part_is_skipped_and_says_what_is_missing(tmp_path: Path) -> None:
    arguments = ["--out", str(tmp_path)]
    code = _REFUSE + _RUN.format(module="benchmarks.gpu.whole_stack")
    child = _run(code, arguments, [_REPOSITORY / "shared"])
    assert child.returncode == 0, child.stderr[-2000:]
    (record,) = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert record["verdict"] == "skipped"
    assert "nats" in record["problem"]
    assert "opentelemetry" in record["problem"]


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
        timeout=300,
    )
