"""A server a module, both kinds of the bus for each test."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from uuid import uuid4

import pytest
from tests.contract.worlds import BusWorld, MemoryWorld, NatsServer, NatsWorld

from weir.bus.protocol import Bus

Connect = Callable[[], Awaitable[Bus]]


@pytest.fixture(scope="module")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(params=["memory", "nats"])
def world(request: pytest.FixtureRequest) -> BusWorld:
    if request.param == "memory":
        return MemoryWorld()
    return NatsWorld(request.getfixturevalue("nats_server"))


@pytest.fixture
async def connect(world: BusWorld) -> AsyncIterator[Connect]:
    buses: list[Bus] = []

    async def connect_one() -> Bus:
        buses.append(await world.connect())
        return buses[-1]

    yield connect_one
    for bus in buses:
        await bus.close()


@pytest.fixture
def name() -> str:
    """A name that no other test uses: the server outlives a test."""
    return f"t{uuid4().hex[:12]}"
