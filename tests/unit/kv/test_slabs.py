"""Weights are loaded by the first worker of a device and mapped by the others, whoever dies on the way."""

import mmap
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from weir.kv.memory.device import DeviceMemory, HostMemory, MemoryKind, try_memory_kind
from weir.kv.memory.slabs import SharedSlab, SlabRefused, SlabsAway, SlabServer, fetch_slab

NUM_BYTES = 8192
TIMEOUT_S = 20.0


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="weir-") as directory:  # pytest's own paths are too long for a socket
        yield Path(directory) / "weights.sock"


@pytest.fixture
def kind() -> MemoryKind:
    found = try_memory_kind("interpreter")
    assert found is not None
    return found


@pytest.fixture
def server(path: Path, kind: MemoryKind) -> Iterator[SlabServer]:
    made = SlabServer(path, kind, keep_s=0.0, fill_s=TIMEOUT_S)
    made.start()
    yield made
    made.close()


@pytest.fixture
def workers() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as made:
        yield made


class Fetch:
    """As workers do; `close` ends them all."""

    def __init__(self, kind: MemoryKind) -> None:
        self._kind = kind
        self._slabs: list[SharedSlab] = []

    def __call__(self, path: Path, fill: Callable[[DeviceMemory], None], key: str = "digest") -> SharedSlab:
        slab = fetch_slab(path, key, NUM_BYTES, self._kind, fill, connect_timeout_s=5.0, fill_timeout_s=TIMEOUT_S)
        self._slabs.append(slab)
        return slab

    def close(self) -> None:
        for slab in self._slabs:
            slab.close()


@pytest.fixture
def fetch(kind: MemoryKind) -> Iterator[Fetch]:
    made = Fetch(kind)
    yield made
    made.close()


def buffer_of(slab: SharedSlab) -> mmap.mmap:
    assert isinstance(slab.memory, HostMemory)
    return slab.memory.buffer


def fill_with(value: int) -> Callable[[DeviceMemory], None]:
    def fill(memory: DeviceMemory) -> None:
        assert isinstance(memory, HostMemory)
        memory.buffer[:NUM_BYTES] = bytes([value]) * NUM_BYTES

    return fill


def never(_: DeviceMemory) -> None:
    raise AssertionError("it is filled already")


def test_the_first_worker_fills_and_the_others_map_the_same_bytes(fetch: Fetch, path: Path, server: SlabServer) -> None:
    first = fetch(path, fill_with(7))
    second, third = fetch(path, never), fetch(path, never)
    assert [slab.was_filled_here for slab in (first, second, third)] == [True, False, False]
    assert buffer_of(third)[:] == bytes([7]) * NUM_BYTES
    assert server.num_bytes == NUM_BYTES, "once"


def test_what_a_reader_writes_by_mistake_reaches_nobody_else(fetch: Fetch, path: Path, server: SlabServer) -> None:
    first, second = fetch(path, fill_with(7)), fetch(path, never)
    buffer_of(second)[0] = 1
    assert buffer_of(first)[0] == buffer_of(fetch(path, never))[0] == 7


def test_another_model_has_a_slab_of_its_own(fetch: Fetch, path: Path, server: SlabServer) -> None:
    first, second = fetch(path, fill_with(7)), fetch(path, fill_with(8), key="other")
    assert (buffer_of(first)[0], buffer_of(second)[0]) == (7, 8)
    assert server.num_bytes == 2 * NUM_BYTES


def test_who_comes_while_it_is_filled_waits_for_that(
    fetch: Fetch, path: Path, server: SlabServer, workers: ThreadPoolExecutor
) -> None:
    began, may_end = threading.Event(), threading.Event()

    def fill(memory: DeviceMemory) -> None:
        began.set()
        assert may_end.wait(TIMEOUT_S)
        fill_with(7)(memory)

    first = workers.submit(fetch, path, fill)
    assert began.wait(TIMEOUT_S)
    others: list[Future[SharedSlab]] = [workers.submit(fetch, path, never) for _ in range(3)]
    assert not any(other.done() for other in others)
    may_end.set()
    assert all(buffer_of(other.result(TIMEOUT_S))[0] == 7 for other in (first, *others))


def test_when_the_one_that_fills_fails_the_next_one_fills(
    fetch: Fetch, path: Path, server: SlabServer, workers: ThreadPoolExecutor
) -> None:
    began, may_end = threading.Event(), threading.Event()

    def fail(_: DeviceMemory) -> None:
        began.set()
        assert may_end.wait(TIMEOUT_S)
        raise RuntimeError("a broken file")

    first = workers.submit(fetch, path, fail)
    assert began.wait(TIMEOUT_S)
    second = workers.submit(fetch, path, fill_with(9))
    may_end.set()
    with pytest.raises(RuntimeError, match="a broken file"):
        first.result(TIMEOUT_S)
    assert second.result(TIMEOUT_S).was_filled_here
    assert buffer_of(second.result())[0] == 9
    assert server.num_bytes == NUM_BYTES, "the half-filled one is gone"


def test_a_slab_goes_when_nobody_has_used_it_for_a_while(fetch: Fetch, path: Path, server: SlabServer) -> None:
    first, second = fetch(path, fill_with(7)), fetch(path, never)
    first.close()
    server.drop_unused()
    assert server.num_bytes == NUM_BYTES, "it is in use"
    second.close()
    wait_until_dropped(server)
    assert fetch(path, fill_with(8)).was_filled_here


def wait_until_dropped(server: SlabServer) -> None:
    """The service hears of a closed connection in a thread of its own."""
    for _ in range(1000):
        server.drop_unused()
        if server.num_bytes == 0:
            return
        threading.Event().wait(0.01)
    raise AssertionError("the slab is kept")


def test_memory_that_cannot_be_had_is_said(fetch: Fetch, path: Path, kind: MemoryKind) -> None:
    def create(num_bytes: int) -> DeviceMemory:
        raise OSError(f"no {num_bytes} bytes left")

    server = SlabServer(path, MemoryKind(create, kind.open, kind.open_to_read))
    server.start()
    with pytest.raises(SlabRefused, match="no 8192 bytes left"):
        fetch(path, never)
    server.close()


def test_a_slab_of_another_size_under_the_same_key_is_refused(
    fetch: Fetch, path: Path, server: SlabServer, kind: MemoryKind
) -> None:
    fetch(path, fill_with(7))
    with pytest.raises(SlabRefused, match="num_bytes 4096: the slab of that key has 8192"):
        fetch_slab(path, "digest", 4096, kind, never)


def test_more_than_eight_models_are_refused_by_name_of_the_bound(fetch: Fetch, path: Path, server: SlabServer) -> None:
    kept = [fetch(path, fill_with(1), key=f"model {number}") for number in range(8)]
    with pytest.raises(SlabRefused, match="8 slabs are in use already"):
        fetch(path, never, key="one more")
    kept[0].close()
    wait_until_room(fetch, path)


def wait_until_room(fetch: Fetch, path: Path) -> None:
    for _ in range(1000):
        try:
            fetch(path, fill_with(1), key="one more").close()
        except SlabRefused:
            threading.Event().wait(0.01)
        else:
            return
    raise AssertionError("the unused slab does not make room")


def test_mapped_weights_outlive_the_service(fetch: Fetch, path: Path, server: SlabServer) -> None:
    first, second = fetch(path, fill_with(7)), fetch(path, never)
    server.close()
    assert buffer_of(first)[5] == buffer_of(second)[5] == 7
    assert not path.exists()


def test_where_nobody_listens_the_worker_is_told_in_time(path: Path, kind: MemoryKind) -> None:
    with pytest.raises(SlabsAway, match="No such file"):
        fetch_slab(path, "digest", NUM_BYTES, kind, never, connect_timeout_s=0.0)


def test_a_service_that_starts_later_is_found(
    fetch: Fetch, path: Path, kind: MemoryKind, workers: ThreadPoolExecutor
) -> None:
    worker = workers.submit(fetch, path, fill_with(7))
    server = SlabServer(path, kind)
    server.start()
    assert worker.result(TIMEOUT_S).was_filled_here
    server.close()


@pytest.mark.parametrize("nonsense", [b"", b"x", b"x" * 14, b"WSLB" + b"\x00" * 10, b"WSLB\xff\xff" + b"\x00" * 8])
def test_who_talks_nonsense_keeps_nobody_from_the_weights(
    fetch: Fetch, path: Path, server: SlabServer, nonsense: bytes
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(str(path))
        stranger.sendall(nonsense)
        assert fetch(path, fill_with(7)).was_filled_here
