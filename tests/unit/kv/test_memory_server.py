"""Page memory goes through a socket to whoever has the arena's id, and comes back to a service that was restarted."""

import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from weir.kv.memory.device import HostMemory
from weir.kv.memory.server import MemoryNotReady, MemoryServer, fetch_memory, offer_memory

NUM_BYTES = 8192
ARENA = "a" * 32


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="weir-") as directory:  # pytest's own paths are too long for a socket
        yield Path(directory) / "pages.sock"


@pytest.fixture
def servers() -> Iterator[list[MemoryServer]]:
    made: list[MemoryServer] = []
    yield made
    for server in made:
        server.close()


def start_server(path: Path, servers: list[MemoryServer], memory: HostMemory | None) -> MemoryServer:
    server = MemoryServer(path, ARENA, NUM_BYTES, HostMemory.open, memory)
    servers.append(server)
    server.start()
    return server


def fetched(path: Path, arena_id: str = ARENA) -> HostMemory:
    memory = fetch_memory(path, arena_id, HostMemory.open)
    assert isinstance(memory, HostMemory)
    return memory


def test_two_workers_get_the_same_memory(path: Path, servers: list[MemoryServer]) -> None:
    start_server(path, servers, HostMemory.create(NUM_BYTES))
    first, second = fetched(path), fetched(path)
    first.buffer[100] = 7
    assert (second.buffer[100], second.num_bytes) == (7, NUM_BYTES)
    first.close()
    second.close()


def test_the_socket_is_for_its_owner_alone_and_goes_with_its_server(path: Path, servers: list[MemoryServer]) -> None:
    server = start_server(path, servers, HostMemory.create(NUM_BYTES))
    assert path.stat().st_mode & 0o777 == 0o600
    server.close()
    assert not path.exists()


def test_a_restarted_service_gets_the_memory_back_from_a_worker(path: Path, servers: list[MemoryServer]) -> None:
    start_server(path, servers, HostMemory.create(NUM_BYTES)).close()
    # a service that is killed leaves its socket behind
    kept = HostMemory.create(NUM_BYTES)
    kept.buffer[:5] = b"pages"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    server = start_server(path, servers, None)
    with pytest.raises(MemoryNotReady, match="has no page memory to give"):
        fetched(path)
    offer_memory(path, ARENA, kept)
    kept.close()
    newcomer = fetched(path)
    assert server.has_memory
    assert bytes(newcomer.buffer[:5]) == b"pages"
    newcomer.close()


def test_an_offer_to_a_service_that_has_memory_changes_nothing(path: Path, servers: list[MemoryServer]) -> None:
    start_server(path, servers, HostMemory.create(NUM_BYTES))
    before, other = fetched(path), HostMemory.create(NUM_BYTES)
    before.buffer[0] = 1
    offer_memory(path, ARENA, other)
    after = fetched(path)
    assert after.buffer[0] == 1
    for memory in (before, other, after):
        memory.close()


@pytest.mark.parametrize("arena_id", ["b" * 32, ""])
def test_memory_of_another_arena_is_not_given(path: Path, servers: list[MemoryServer], arena_id: str) -> None:
    start_server(path, servers, HostMemory.create(NUM_BYTES))
    with pytest.raises(MemoryNotReady):
        fetched(path, arena_id)


def test_memory_of_another_arena_or_too_little_is_not_taken(path: Path, servers: list[MemoryServer]) -> None:
    server = start_server(path, servers, None)
    with HostMemoryPair() as (small, right):
        offer_memory(path, ARENA, small)
        offer_memory(path, "b" * 32, right)
        with pytest.raises(MemoryNotReady):
            fetched(path)
    assert not server.has_memory


def test_where_nobody_listens_there_is_none_yet(path: Path) -> None:
    with pytest.raises(MemoryNotReady, match="No such file"):
        fetched(path)


def test_who_talks_nonsense_does_not_keep_others_from_their_memory(path: Path, servers: list[MemoryServer]) -> None:
    start_server(path, servers, HostMemory.create(NUM_BYTES))
    for nonsense in (b"", b"x", b"x" * 37):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.connect(str(path))
            stranger.sendall(nonsense)
    fetched(path).close()


class HostMemoryPair:
    """One of a quarter of the size, and one of the right size."""

    def __enter__(self) -> tuple[HostMemory, HostMemory]:
        self._made = HostMemory.create(NUM_BYTES // 4), HostMemory.create(NUM_BYTES)
        return self._made

    def __exit__(self, *error: object) -> None:
        for memory in self._made:
            memory.close()
