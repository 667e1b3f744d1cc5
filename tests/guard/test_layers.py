"""The layout shows the architecture: who may import whom."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARY = ROOT / "shared" / "weir"
BENCHMARKS = ROOT / "shared" / "benchmarks"
SERVICES = ROOT / "services"
SERVICE_NAMES = sorted(path.name for path in SERVICES.iterdir() if path.name.startswith("weir_"))


def imported_modules(source: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module


def offenders(sources: Iterator[Path], forbidden: tuple[str, ...]) -> list[str]:
    return [
        f"{source.relative_to(ROOT)} imports {module}"
        for source in sources
        for module in imported_modules(source)
        if any(module == name or module.startswith(f"{name}.") for name in forbidden)
    ]


def test_the_library_never_imports_a_service() -> None:
    assert len(SERVICE_NAMES) == 5
    assert offenders(LIBRARY.rglob("*.py"), tuple(SERVICE_NAMES)) == []


def test_what_is_installed_never_imports_what_is_not() -> None:
    assert (BENCHMARKS / "sim").is_dir()
    installed = [*LIBRARY.rglob("*.py"), *SERVICES.rglob("*.py")]
    assert offenders(iter(installed), ("benchmarks", "tests", "proto")) == []


def test_nothing_installed_looks_for_a_checkout_around_it() -> None:
    """A file's path says where it lies inside the package, never where a repository's root is."""
    lookers = [
        str(path.relative_to(ROOT))
        for root in (LIBRARY, BENCHMARKS, *(SERVICES / name for name in SERVICE_NAMES))
        for path in root.rglob("*.py")
        for depth in re.findall(r"\.parents\[(\d+)\]", path.read_text())
        if int(depth) >= len(path.relative_to(root).parts)
    ]
    assert lookers == []


@pytest.mark.parametrize("service", SERVICE_NAMES)
def test_services_never_import_each_other(service: str) -> None:
    others = tuple(name for name in SERVICE_NAMES if name != service)
    assert offenders((SERVICES / service).rglob("*.py"), others) == []


@pytest.mark.parametrize("room", ["core", "engine", "kv", "policy", "scheduling", "sim"])
def test_pure_rooms_know_no_io_frameworks(room: str) -> None:
    frameworks = ("asyncio", "grpc", "nats", "starlette", "uvicorn")
    assert offenders((LIBRARY / room).rglob("*.py"), frameworks) == []


@pytest.mark.parametrize("service", SERVICE_NAMES)
def test_pure_cores_of_services_know_no_io_frameworks(service: str) -> None:
    cores = (path for path in (SERVICES / service).rglob("core.py"))
    assert offenders(cores, ("asyncio", "grpc", "nats", "starlette", "uvicorn")) == []


@pytest.mark.parametrize(
    "room",
    [
        "core",
        "kv",
        "bus",
        "rpc",
        "runtime",
        "client",
        "cli",
        "engine",
        "worker",
        "mover",
        "policy",
        "scheduling",
        "sim",
    ],
)
def test_only_the_model_room_and_the_bench_import_torch(room: str) -> None:
    assert offenders((LIBRARY / room).rglob("*.py"), ("torch",)) == []


@pytest.mark.parametrize("service", ["weir_gateway", "weir_scheduler", "weir_transfer"])
def test_only_workers_import_torch(service: str) -> None:
    torch_modules = (
        "torch",
        "weir.model.load",
        "weir.model.torch.runner",
        "weir.model.torch.decoder",
        "weir.model.sampler",
    )
    assert offenders((SERVICES / service).rglob("*.py"), torch_modules) == []


def test_every_package_says_what_it_is_for() -> None:
    packages = [path for root in (LIBRARY, BENCHMARKS, SERVICES) for path in root.rglob("__init__.py")]
    silent = [
        str(path.relative_to(ROOT))
        for path in packages
        if "wire/v1" not in str(path) and len(ast.get_docstring(ast.parse(path.read_text())) or "") < 40
    ]
    assert silent == []


def test_what_serves_trains_nothing() -> None:
    training = ("weir.training", "sklearn", "scipy")
    serving = [path for name in SERVICE_NAMES for path in (SERVICES / name).rglob("*.py")]
    serving += [
        path for room in ("policy", "scheduling", "engine", "worker") for path in (LIBRARY / room).rglob("*.py")
    ]
    assert offenders(iter(serving), training) == []
