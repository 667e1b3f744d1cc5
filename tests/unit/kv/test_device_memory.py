"""Memory that is passed from process to process as a descriptor, and outlives whoever made it."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from weir.kv.memory.cuda import CudaDriver, CudaDriverError
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
