"""The layout shows the architecture: who may import whom."""

import re
from collections.abc import Iterator, Mapping

import pytest
from tests.guard.sources import ROOT, Import, imports_of, is_within, modules, outline

# The rooms of the library from the ground up. A room imports from lower floors only, never from its own.
FLOORS = (
    ("core", "wire"),
    ("bus", "kv", "telemetry"),
    ("grammar", "ops", "policy", "rpc"),
    ("client", "engine", "planner", "scheduling"),
    ("model", "sim"),
    ("runtime", "training"),
    ("testing", "worker"),
    ("bench",),
    ("cli",),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
SERVICES = ("weir_decode", "weir_gateway", "weir_prefill", "weir_scheduler", "weir_transfer")
IO_FRAMEWORKS = ("asyncio", "grpc", "nats", "starlette", "uvicorn")


def room_of(module: str) -> str | None:
    """`engine` of `weir.engine.batching.batcher`; None outside the library's rooms."""
    parts = module.split(".")
    return parts[1] if parts[0] == "weir" and len(parts) > 1 else None


def offenders(packages: tuple[str, ...], forbidden: tuple[str, ...]) -> list[str]:
    return [
        str(one)
        for module in modules()
        if is_within(module, packages)
        for one in imports_of(module)
        if is_within(one.module, forbidden)
    ]


def chain_to(start: str, forbidden: tuple[str, ...]) -> list[Import] | None:
    """How importing `start` loads one of `forbidden`, statement by statement; late imports load nothing."""
    seen, waiting = {start}, [(start, list[Import]())]
    while waiting:
        module, chain = waiting.pop()
        for one in imports_of(module):
            if one.is_late:
                continue
            if is_within(one.module, forbidden):
                return [*chain, one]
            if one.module in modules() and one.module not in seen:
                seen.add(one.module)
                waiting.append((one.module, [*chain, one]))
    return None


def chains(packages: tuple[str, ...], forbidden: tuple[str, ...]) -> list[str]:
    found = (chain_to(module, forbidden) for module in modules() if is_within(module, packages))
    return [" -> ".join(map(str, chain)) for chain in found if chain is not None]


def test_every_room_has_a_floor() -> None:
    rooms = {room for module in modules() if (room := room_of(module)) is not None}
    assert rooms == FLOOR_OF.keys()


def test_a_room_imports_from_lower_floors_only() -> None:
    upward = []
    for module in modules():
        room = room_of(module)
        for one in imports_of(module) if room is not None else ():
            other = room_of(one.module)
            if room is not None and other in FLOOR_OF and other != room and FLOOR_OF[other] >= FLOOR_OF[room]:
                upward.append(str(one))
    assert upward == []


def circles(arrows: Mapping[str, set[str]]) -> Iterator[list[str]]:
    """Each circle of a graph that a walk in depth closes."""
    done: set[str] = set()

    def walk(node: str, path: list[str]) -> Iterator[list[str]]:
        if node in path:
            yield [*path[path.index(node) :], node]
        elif node not in done:
            for other in sorted(arrows.get(node, ())):
                yield from walk(other, [*path, node])
            done.add(node)

    for start in sorted(arrows):
        yield from walk(start, [])


def test_nothing_in_a_folder_imports_in_a_circle() -> None:
    """At every level: the files and folders of one folder form no circle, whatever is inside of them."""
    levels: dict[tuple[str, ...], dict[str, set[str]]] = {}
    for module in modules():
        for one in imports_of(module):
            here, there = module.split("."), one.module.split(".")
            depth = next((i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), None)
            if one.module in modules() and depth is not None:
                levels.setdefault(tuple(here[:depth]), {}).setdefault(here[depth], set()).add(there[depth])
    found = [(".".join(folder), circle) for folder, arrows in levels.items() for circle in circles(arrows)]
    assert found == []


def test_the_library_never_imports_a_service() -> None:
    assert offenders(("weir",), SERVICES) == []


def test_what_is_installed_never_imports_what_is_not() -> None:
    assert "benchmarks" in modules()
    assert offenders(("weir", *SERVICES), ("benchmarks", "tests", "proto")) == []


def test_nothing_installed_looks_for_a_checkout_around_it() -> None:
    """A file's path says where it lies inside its package, never where a repository's root is."""
    lookers = [
        name
        for name, path in modules().items()
        for depth in re.findall(r"\.parents\[(\d+)\]", path.read_text())
        if int(depth) >= len(name.split(".")) - (path.name != "__init__.py")
    ]
    assert lookers == []


@pytest.mark.parametrize("service", SERVICES)
def test_services_never_import_each_other(service: str) -> None:
    assert service in modules()
    others = tuple(name for name in SERVICES if name != service)
    assert offenders((service,), others) == []


@pytest.mark.parametrize("room", ["engine", "grammar", "kv", "planner", "policy", "scheduling", "sim"])
def test_pure_rooms_load_no_io_framework_not_even_through_others(room: str) -> None:
    assert chains((f"weir.{room}",), IO_FRAMEWORKS) == []


def test_the_core_of_the_transfer_service_is_pure() -> None:
    assert chains(("weir_transfer.core",), IO_FRAMEWORKS) == []


@pytest.mark.parametrize(
    "room", ["core", "kv", "bus", "rpc", "runtime", "client", "cli", "engine", "worker", "policy", "scheduling", "sim"]
)
def test_torch_is_imported_by_the_model_the_kernels_and_benchmarks_alone(room: str) -> None:
    assert offenders((f"weir.{room}",), ("torch",)) == []


@pytest.mark.parametrize("service", ["weir_gateway", "weir_scheduler", "weir_transfer"])
def test_only_workers_load_torch_or_compilers(service: str) -> None:
    assert chains((service,), ("torch", "triton", "numba", "llvmlite")) == []


def test_what_serves_trains_nothing() -> None:
    serving = (*SERVICES, "weir.policy", "weir.scheduling", "weir.engine", "weir.worker")
    assert chains(serving, ("weir.training", "sklearn", "scipy")) == []


def test_every_package_says_what_it_is_for() -> None:
    packages = [path for path in modules().values() if path.name == "__init__.py"]
    silent = [str(path.relative_to(ROOT)) for path in packages if len(outline(path).docstring) < 40]
    assert silent == []
