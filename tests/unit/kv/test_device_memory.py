"""Memory that is passed from process to process as a descriptor, and outlives whoever made it."""

import ctypes
import os
import socket
import subprocess
import sys
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
