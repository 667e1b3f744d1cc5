"""Page memory that several processes map and that no single one of them owns: on a GPU, or its stand-in on the host.

The memory is named by a file descriptor, which is passed over a Unix socket. It lives as long as anybody holds the
descriptor or a mapping: not with the process that made it, so pages outlive workers.
"""

import ctypes
import mmap
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from weir.core.device import Device
from weir.kv.arena.segment import Segment
from weir.kv.memory.cuda import CudaMemory

_MAX_FDS = 1


class DeviceMemory(Protocol):
    """One mapping in this process. `close` may be called twice."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def fd(self) -> int:
        """To be passed on. Belongs to this object."""
        ...

    @property
    def pointer(self) -> int:
        """Address of the first byte, on the device."""
        ...

    def host_buffer(self, num_bytes: int) -> memoryview:
        """Memory of the host that the device reads and writes fast. It is there as long as it is referred to."""
        ...

    def read(self, offset: int, into: memoryview) -> None:
        """Copies bytes from the device; returns when they are there. Other threads run meanwhile."""
        ...

    def write(self, offset: int, data: memoryview) -> None:
        """Copies bytes to the device; kernels that begin when it has returned read them."""
        ...

    def copy_from(self, offset: int, pointer: int, num_bytes: int) -> None:
        """Copies bytes from an address in other memory of this kind that this process maps, also of another device;
        returns when they are here. Other threads run meanwhile."""
        ...

    def close(self) -> None: ...


_MemoryT = TypeVar("_MemoryT", bound=DeviceMemory)


class HostMemory:
    """Anonymous shared memory of the host, for tests and for machines without a GPU."""

    def __init__(self, fd: int, num_bytes: int, access: int = mmap.ACCESS_WRITE) -> None:
        """Maps `fd`, and owns it from here on."""
        self._fd = fd
        self._num_bytes = num_bytes
        self._mapping = mmap.mmap(fd, num_bytes, access=access)

    @classmethod
    def create(cls, num_bytes: int) -> "HostMemory":
        """Raises OSError when there is too little memory."""
        fd = os.memfd_create("weir-pages", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, num_bytes)
            return cls(fd, num_bytes)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def open(cls, fd: int, num_bytes: int) -> "HostMemory":
        """Raises ValueError if the memory is smaller than that. `fd` is this object's then."""
        _check_size(fd, num_bytes)
        return cls(fd, num_bytes)

    @classmethod
    def open_to_read(cls, fd: int, num_bytes: int) -> "HostMemory":
        """As `open`; a page that is written here becomes this process's own."""
        _check_size(fd, num_bytes)
        return cls(fd, num_bytes, mmap.ACCESS_COPY)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def fd(self) -> int:
        return self._fd

    @property
    def pointer(self) -> int:
        return int(np.frombuffer(self._mapping, np.uint8).ctypes.data)

    @property
    def buffer(self) -> mmap.mmap:
        return self._mapping

    def host_buffer(self, num_bytes: int) -> memoryview:
        return memoryview(bytearray(num_bytes))

    def read(self, offset: int, into: memoryview) -> None:
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(self._mapping, np.uint8, len(into), offset))

    def write(self, offset: int, data: memoryview) -> None:
        np.copyto(np.frombuffer(self._mapping, np.uint8, len(data), offset), np.frombuffer(data, np.uint8))

    def copy_from(self, offset: int, pointer: int, num_bytes: int) -> None:
        ctypes.memmove(self.pointer + offset, pointer, num_bytes)

    def close(self) -> None:
        """Views of `buffer` keep the mapping until they are gone."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _check_size(fd: int, num_bytes: int) -> None:
    found = os.fstat(fd).st_size
    if found < num_bytes:
        raise ValueError(f"num_bytes {num_bytes}: the memory behind the descriptor has {found}")


@dataclass(frozen=True, slots=True)
class MemoryKind:
    """How memory of a device is made, `create(num_bytes)`, and mapped elsewhere, `open(fd, num_bytes)`."""

    create: Callable[[int], DeviceMemory]
    open: Callable[[int, int], DeviceMemory]
    open_to_read: Callable[[int, int], DeviceMemory]
    """As `open`; what is written there by mistake reaches nobody else."""


def try_memory_kind(device: Device) -> MemoryKind | None:
    """None: the pages are in the segment."""
    if device == "cuda":
        return MemoryKind(CudaMemory.create, CudaMemory.open, CudaMemory.open_to_read)
    if device == "interpreter":
        return MemoryKind(HostMemory.create, HostMemory.open, HostMemory.open_to_read)
    return None


@dataclass(frozen=True, slots=True)
class ArenaMemory:
    """An arena as a worker maps it. `pages` None: they are in the segment."""

    segment: Segment
    pages: DeviceMemory | None = None


def listen_at(path: Path, backlog: int) -> socket.socket:
    """A Unix stream socket for this user alone. One that is there already is a dead service's. Raises OSError."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)
        listening.bind(str(path))
        path.chmod(0o600)
        listening.listen(backlog)
    except BaseException:
        listening.close()
        raise
    return listening


def receive_exactly(connection: socket.socket, num_bytes: int) -> bytes:
    """Raises ConnectionError if it ends before, and TimeoutError."""
    received = b""
    while len(received) < num_bytes:
        part = connection.recv(num_bytes - len(received))
        if not part:
            raise ConnectionError(f"{len(received)} bytes, expected {num_bytes}")
        received += part
    return received


def send_memory(connection: socket.socket, memory: DeviceMemory) -> None:
    """Passes the memory on over a Unix stream socket. The receiver gets a descriptor of its own."""
    socket.send_fds(connection, [memory.num_bytes.to_bytes(8, "little")], [memory.fd])


def receive_memory(connection: socket.socket, open_memory: Callable[[int, int], _MemoryT]) -> _MemoryT:
    """What `send_memory` sent, mapped by `open_memory(fd, num_bytes)`. Raises ConnectionError if nothing came."""
    data, fds, _, _ = socket.recv_fds(connection, 8, _MAX_FDS)
    if len(data) != 8 or len(fds) != _MAX_FDS:
        for fd in fds:
            os.close(fd)
        raise ConnectionError(f"expected 8 bytes and one descriptor, got {len(data)} bytes and {len(fds)} descriptors")
    try:
        return open_memory(fds[0], int.from_bytes(data, "little"))
    except BaseException:
        os.close(fds[0])
        raise
