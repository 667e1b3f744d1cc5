"""The wheel, installed and used outside of the checkout: what it lacks, no test on the sources would notice."""

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from tests.e2e.wheels import ROOT, build_wheel

from weir.core.addresses import free_port
from weir.model.files.catalog import model_cache_dir

pytest.importorskip("hatchling", reason="builds the wheel; `make setup-dev` installs it")

PACKAGES = {"weir", "weir_decode", "weir_gateway", "weir_prefill", "weir_scheduler", "weir_transfer"}
SUFFIXES = {".css", ".html", ".jinja", ".js", ".py", ".pyi", ".svg", ".typed", ".yaml"}
_IMPORT_ALL = f"""
import importlib, pkgutil
from pathlib import Path
names = []
for root in {sorted(PACKAGES)!r}:
    package = importlib.import_module(root)
    names += [module.name for module in pkgutil.walk_packages(package.__path__, root + ".")]
for name in names:
    importlib.import_module(name)
    assert {str(ROOT)!r} not in str(importlib.util.find_spec(name).origin), name
print(len(names))
"""


@dataclass(frozen=True)
class Installed:
    """An environment that has the wheel, and its dependencies from the one that runs the tests."""

    environment: Path
    cwd: Path
    environ: Mapping[str, str]

    def run(self, *command: str, timeout_s: float = 300.0) -> "subprocess.CompletedProcess[str]":
        """`command`: a program of the environment, and its arguments."""
        program = self.environment / "bin" / command[0]
        return subprocess.run(
            [program, *command[1:]],
            cwd=self.cwd,
            env=self.environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(environment), "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True)
    # Paths in a .pth file are searched last, and .pth files over there are not read: an editable Weir stays unseen.
    own = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (own / "dependencies.pth").write_text("\n".join(sorted(paths)) + "\n")
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environ["WEIR_RUNTIME_DIR"] = str(tmp_path_factory.mktemp("run"))
    cache = tmp_path_factory.mktemp("cache")  # kernels are kept by the path of their source: these would stay for ever
    (cache / "models").symlink_to(model_cache_dir() / "models")
    environ["WEIR_CACHE"] = str(cache)
    return Installed(environment, tmp_path_factory.mktemp("empty"), environ)


def members(wheel: Path) -> Iterator[Path]:
    with zipfile.ZipFile(wheel) as archive:
        yield from (Path(name) for name in archive.namelist() if ".dist-info" not in name)


def test_the_wheel_has_the_packages_and_no_benchmarks_results_or_tools(wheel: Path) -> None:
    found = list(members(wheel))
    assert {path.parts[0] for path in found} == PACKAGES
    assert [path for path in found if path.suffix not in SUFFIXES] == []
    assert {Path("weir/py.typed"), Path("weir/sim/profiles/h100-llama3-8b.yaml")} <= set(found)
    assert wheel.stat().st_size < 1_800_000


def test_every_source_of_the_packages_is_in_the_wheel(wheel: Path) -> None:
    roots = [ROOT / "shared" / "weir", *(ROOT / "services" / name for name in PACKAGES - {"weir"})]
    sources = {
        path.relative_to(root.parent)
        for root in roots
        for path in root.rglob("*")
        if path.suffix in SUFFIXES - {".pyi"}
    }
    assert sources - set(members(wheel)) == set()


def test_every_installed_module_can_be_imported_and_none_comes_from_the_checkout(installed: Installed) -> None:
    done = installed.run("python", "-c", _IMPORT_ALL)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 300


def test_the_command_says_the_version_of_the_distribution(installed: Installed, wheel: Path) -> None:
    version = wheel.name.split("-")[1]
    shown = installed.run("weir", "--version")
    assert (shown.returncode, shown.stdout) == (0, f"weir {version}\n"), shown.stderr


def test_no_plain_dependency_brings_torch_or_a_compiler(installed: Installed) -> None:
    read = "from importlib import metadata; print(*(metadata.requires('weir-llm') or []), sep='\\n')"
    required = installed.run("python", "-c", read).stdout.splitlines()
    extras = {extra: {_name(line) for line in required if f"extra == '{extra}'" in line} for extra in ("worker", "dev")}
    assert {"torch", "triton", "numba", "nvidia-ml-py"} == extras["worker"]
    assert extras["worker"] < extras["dev"]
    todo, seen = [_name(line) for line in required if "extra ==" not in line], set[str]()
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += [_name(line) for line in _requirements_of(name) if "extra ==" not in line]
    assert seen & {"torch", "triton", "numba", "llvmlite", "matplotlib", "scikit-learn", "scipy"} == set()
    assert "grpcio" in seen


def _requirements_of(name: str) -> list[str]:
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:  # for another platform
        return []


def _name(requirement: str) -> str:
    for index, character in enumerate(requirement):
        if not (character.isalnum() or character in "-_."):
            return requirement[:index].lower()
    return requirement.lower()


@pytest.mark.stack
@pytest.mark.long
@pytest.mark.timeout(300)
def test_an_installed_stack_answers(installed: Installed) -> None:
    grpc_port, http_port = str(free_port()), str(free_port())
    name = f"i{grpc_port}"
    ports = ("--grpc-port", grpc_port, "--http-port", http_port)
    try:
        # fp32: the kernels of int8 would be compiled for this copy of their sources alone
        up = installed.run("weir", "up", "--detach", "--instance", name, *ports, "--precision", "fp32", timeout_s=200.0)
        assert up.returncode == 0, up.stderr
        asked = ("--address", f"127.0.0.1:{grpc_port}", "--temperature", "0", "--max-tokens", "24")
        answer = installed.run("weir", "generate", *asked, "The capital of France is")
        assert answer.returncode == 0, answer.stderr
        assert "Paris" in answer.stdout
    finally:
        down = installed.run("weir", "down", "--instance", name)
    assert down.returncode == 0, down.stderr
