"""Memory that is passed from process to process as a descriptor, and outlives whoever made it."""

import ctypes
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from weir.kv.memory.cuda import CudaDriver, CudaDriverError, CudaMemory
from weir.kv.memory.device import HostMemory, receive_memory, send_memory

_MAKER = """
import socket, sys
from weir.kv.memory.device import HostMemory, send_memory
memory = HostMemory.create(8192)
memory.buffer[:5] = b"pages"
send_memory(socket.socket(fileno=int(sys.argv[1])), memory)
"""


def test_memory_outlives_the_process_that_made_it() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        maker = subprocess.run(
            [sys.executable, "-c", _MAKER, str(theirs.fileno())], check=False, pass_fds=[theirs.fileno()]
        )
        assert maker.returncode == 0
        memory = receive_memory(ours, HostMemory.open)
    assert (memory.num_bytes, bytes(memory.buffer[:5])) == (8192, b"pages")
    memory.close()


def test_two_mappings_see_each_others_bytes() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        first = HostMemory.create(4096)
        send_memory(theirs, first)
        second = receive_memory(ours, HostMemory.open)
    second.buffer[100] = 7
    assert first.buffer[100] == 7
    first.close()
    second.close()


def test_the_pointer_is_where_the_bytes_are() -> None:
    memory = HostMemory.create(4096)
    view = np.frombuffer(memory.buffer, np.uint8)
    assert memory.pointer == view.ctypes.data
    memory.close()


def test_closing_gives_the_descriptor_back_once() -> None:
    memory = HostMemory.create(4096)
    fd = memory.fd
    memory.close()
    memory.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_memory_that_is_smaller_than_promised_is_refused() -> None:
    with pytest.raises(ValueError, match="num_bytes 8192: the memory behind the descriptor has 4096"):
        HostMemory.open(HostMemory.create(4096).fd, 8192)


def test_a_peer_that_closes_before_it_sent_anything_is_an_error() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(ConnectionError, match="got 0 bytes and 0 descriptors"):
        receive_memory(ours, HostMemory.open)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU here")
def test_without_a_driver_the_error_says_so() -> None:
    with pytest.raises(CudaDriverError, match="no CUDA driver here"):
        CudaDriver.load()


class PretendedMapping:
    """The calls of libcuda.so.1 that map shared memory, of a driver that knows `accesses` only."""

    def __init__(self, accesses: set[int]) -> None:
        self._accesses = accesses
        self.asked: list[int] = []
        self.num_mapped = 0

    def cuMemSetAccess(self, address: Any, size: Any, access: Any, count: Any) -> int:  # noqa: N802
        self.asked.append(access._obj.flags)
        return 0 if access._obj.flags in self._accesses else 801

    def cuMemMap(self, *_: Any) -> int:  # noqa: N802
        self.num_mapped += 1
        return 0

    def cuMemUnmap(self, *_: Any) -> int:  # noqa: N802
        self.num_mapped -= 1
        return 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *arguments: 0


READ, READ_WRITE = 1, 3


@pytest.mark.parametrize(
    ("known", "asked"), [({READ, READ_WRITE}, [READ]), ({READ_WRITE}, [READ, READ_WRITE])], ids=["knows", "knows not"]
)
def test_memory_to_be_read_is_mapped_so_where_the_driver_knows_such_mappings(known: set[int], asked: list[int]) -> None:
    library = PretendedMapping(known)
    CudaMemory(CudaDriver(cast(ctypes.CDLL, library)), ctypes.c_uint64(1), -1, 4096, 0, READ)
    assert (library.asked, library.num_mapped) == (asked, 1)


def test_memory_that_cannot_be_written_to_where_it_must_be_is_an_error_and_mapped_no_more() -> None:
    library = PretendedMapping({READ})
    with pytest.raises(CudaDriverError, match="cuMemSetAccess"):
        CudaMemory(CudaDriver(cast(ctypes.CDLL, library)), ctypes.c_uint64(1), -1, 4096, 0)
    assert (library.asked, library.num_mapped) == ([READ_WRITE], 0)


class PretendedPinning(PretendedMapping):
    """Memory of the host in the place of pinned and of the device's; and in which order it is used."""

    def __init__(self) -> None:
        super().__init__({READ_WRITE})
        self.device = (ctypes.c_ubyte * 4096)()
        self.pinned: dict[int, Any] = {}
        self.calls: list[str] = []

    def cuMemHostAlloc(self, address: Any, size: Any, flags: Any) -> int:  # noqa: N802
        buffer = (ctypes.c_ubyte * size.value)()
        self.pinned[ctypes.addressof(buffer)] = buffer
        address._obj.value = ctypes.addressof(buffer)
        return 0

    def cuMemFreeHost(self, address: Any) -> int:  # noqa: N802
        del self.pinned[address.value]
        return 0

    def cuMemAddressReserve(self, address: Any, *_: Any) -> int:  # noqa: N802
        address._obj.value = ctypes.addressof(self.device)
        return 0

    def cuCtxSetCurrent(self, *_: Any) -> int:  # noqa: N802
        self.calls.append("context")
        return 0

    def cuMemcpyDtoH_v2(self, into: Any, address: Any, size: Any) -> int:  # noqa: N802
        self.calls.append("read")
        ctypes.memmove(into, address.value, size.value)
        return 0

    def cuMemcpyDtoD_v2(self, into: Any, address: Any, size: Any) -> int:  # noqa: N802
        self.calls.append("copy")
        ctypes.memmove(into.value, address.value, size.value)
        return 0

    def cuCtxSynchronize(self) -> int:  # noqa: N802
        self.calls.append("wait")
        return 0

    def cuMemcpyHtoD_v2(self, address: Any, data: Any, size: Any) -> int:  # noqa: N802
        self.calls.append("write")
        ctypes.memmove(address.value, data, size.value)
        return 0


def device_memory(library: PretendedMapping) -> CudaMemory:
    return CudaMemory(CudaDriver(cast(ctypes.CDLL, library)), ctypes.c_uint64(1), -1, 4096, 0)


def test_bytes_come_from_the_device_and_go_there_through_pinned_memory() -> None:
    library = PretendedPinning()
    memory = device_memory(library)
    written, read = memory.host_buffer(64), memory.host_buffer(64)
    written[:] = bytes(range(64))
    memory.write(128, written)
    memory.read(128, read)
    assert bytes(read) == bytes(written) == bytes(library.device[128:192])
    assert library.calls == ["context", "write", "wait", "read"]


def test_bytes_come_from_memory_of_another_device_and_are_here_when_it_returns() -> None:
    library, there = PretendedPinning(), (ctypes.c_ubyte * 64)(*range(64))
    device_memory(library).copy_from(256, ctypes.addressof(there), 64)
    assert bytes(library.device[256:320]) == bytes(there)
    assert library.calls == ["context", "copy", "wait"]


def test_each_thread_has_the_context_before_it_copies() -> None:
    library = PretendedPinning()
    memory = device_memory(library)

    def write_twice() -> None:
        for _ in range(2):
            memory.write(0, memory.host_buffer(8))

    for _ in range(2):
        thread = threading.Thread(target=write_twice)
        thread.start()
        thread.join(10)
    assert library.calls == ["context", "write", "wait", "write", "wait"] * 2


def test_pinned_memory_is_used_again_once_nobody_refers_to_it_and_given_back_where_another_length_is_wanted() -> None:
    library = PretendedPinning()
    memory = device_memory(library)
    first = memory.host_buffer(64)
    part = first[:8]
    del first
    second = memory.host_buffer(64)
    assert len(library.pinned) == 2, "a part of the first one is still there"
    del part, second
    memory.host_buffer(64)
    assert len(library.pinned) == 2
    memory.host_buffer(32)
    assert [len(buffer) for buffer in library.pinned.values()] == [32]
