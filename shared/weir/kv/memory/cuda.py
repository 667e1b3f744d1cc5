"""GPU memory by the driver's virtual memory calls, shared as a file descriptor.

Source: CUDA Driver API, "Virtual Memory Management". Memory that is shared by CUDA IPC dies with the process that made
it; memory of cuMemCreate lives as long as anybody holds its handle, a mapping or the exported descriptor. Bound by
ctypes, so that the library needs no package but the driver's own library.
"""

import ctypes
import os
import threading
import weakref
from collections import deque
from contextlib import suppress
from ctypes import byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint64, c_ushort, c_void_p
from dataclasses import dataclass

from weir.kv.memory.dlpack import CUDA, byte_capsule

_PINNED = 1
_ON_DEVICE = 1
_POSIX_FD = 1
_READ, _READ_WRITE = 1, 3
_RECOMMENDED = 1
_PORTABLE = 1
_MAX_KEPT_BUFFERS = 256


class CudaDriverError(Exception):
    """A call of the driver failed; the message names call and reason."""


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _AllocationFlags(ctypes.Structure):
    _fields_ = (
        ("compression_type", c_ubyte),
        ("gpu_direct_rdma_capable", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class _AllocationProp(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("requested_handle_types", c_int),
        ("location", _Location),
        ("win32_handle_meta_data", c_void_p),
        ("alloc_flags", _AllocationFlags),
    )


class _AccessDesc(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", c_int))


@dataclass(frozen=True, slots=True)
class CudaDriver:
    """libcuda.so.1, initialised."""

    library: ctypes.CDLL

    @classmethod
    def load(cls) -> "CudaDriver":
        """Raises CudaDriverError where there is no driver or no GPU."""
        try:
            library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaDriverError(f"no CUDA driver here: {error}") from error
        driver = cls(library)
        driver.call("cuInit", ctypes.c_uint(0))
        return driver

    def call(self, name: str, *arguments: object) -> None:
        code = getattr(self.library, name)(*arguments)
        if code != 0:
            text = c_char_p()
            self.library.cuGetErrorString(c_int(code), byref(text))
            raise CudaDriverError(f"{name}: {(text.value or b'unknown error').decode()} ({code})")

    def make_context_current(self, device: int) -> None:
        """The primary context, which PyTorch uses too."""
        handle, context = c_int(), c_void_p()
        self.call("cuDeviceGet", byref(handle), c_int(device))
        self.call("cuDevicePrimaryCtxRetain", byref(context), handle)
        self.call("cuCtxSetCurrent", context)


class PinnedBuffers:
    """Pinned memory of the host, which is dear to make: kept for the next of the same size. Any thread may take some,
    with a context current."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._kept: deque[tuple[int, int]] = deque()
        """(address, length)."""

    def take(self, num_bytes: int) -> memoryview:
        """Raises CudaDriverError where the host has too little memory."""
        address = self._try_kept(num_bytes) or self._make(num_bytes)
        buffer = (c_ubyte * num_bytes).from_address(address)
        weakref.finalize(buffer, self._kept.append, (address, num_bytes)).atexit = False
        return memoryview(buffer).cast("B")

    def _try_kept(self, num_bytes: int) -> int | None:
        """Whatever has another length, or is too much to keep, is given back to the host."""
        while self._kept:
            with suppress(IndexError):  # another thread was faster
                address, length = self._kept.popleft()
                if length == num_bytes and len(self._kept) < _MAX_KEPT_BUFFERS:
                    return address
                self._driver.call("cuMemFreeHost", c_void_p(address))
        return None

    def _make(self, num_bytes: int) -> int:
        address = c_void_p()
        self._driver.call("cuMemHostAlloc", byref(address), c_size_t(num_bytes), ctypes.c_uint(_PORTABLE))
        assert address.value is not None
        return address.value


class CudaMemory:
    """One mapping of a device's memory into this process. Implements `DeviceMemory`."""

    def __init__(
        self, driver: CudaDriver, handle: c_uint64, fd: int, num_bytes: int, device: int, access: int = _READ_WRITE
    ) -> None:
        """Maps `handle`, which and whose `fd` are this object's from here on."""
        self._driver = driver
        self._handle = handle
        self._fd = fd
        self._num_bytes = num_bytes
        self._device = device
        self._entered = threading.local()
        self._pinned = PinnedBuffers(driver)
        self._pointer = _map(driver, handle, num_bytes, device, access)

    @classmethod
    def create(cls, num_bytes: int, device: int = 0, driver: CudaDriver | None = None) -> "CudaMemory":
        """At least `num_bytes`, rounded up to the device's granularity. Raises CudaDriverError."""
        driver = driver or CudaDriver.load()
        driver.make_context_current(device)
        prop = _AllocationProp(type=_PINNED, requested_handle_types=_POSIX_FD, location=_Location(_ON_DEVICE, device))
        granularity = c_size_t()
        driver.call("cuMemGetAllocationGranularity", byref(granularity), byref(prop), c_int(_RECOMMENDED))
        rounded = -(-num_bytes // granularity.value) * granularity.value
        handle, fd = c_uint64(), c_int(-1)
        driver.call("cuMemCreate", byref(handle), c_size_t(rounded), byref(prop), c_uint64(0))
        try:
            driver.call("cuMemExportToShareableHandle", byref(fd), handle, c_int(_POSIX_FD), c_uint64(0))
            return cls(driver, handle, fd.value, rounded, device)
        except BaseException:
            _release(driver, handle, fd.value)
            raise

    @classmethod
    def open(cls, fd: int, num_bytes: int, device: int = 0, driver: CudaDriver | None = None) -> "CudaMemory":
        """Memory that another process made. `fd` is this object's then. Raises CudaDriverError."""
        return cls._open(fd, num_bytes, device, _READ_WRITE, driver)

    @classmethod
    def open_to_read(cls, fd: int, num_bytes: int, device: int = 0) -> "CudaMemory":
        """As `open`; the device refuses to write to it, where the driver knows such mappings of shared memory."""
        return cls._open(fd, num_bytes, device, _READ)

    @classmethod
    def _open(cls, fd: int, num_bytes: int, device: int, access: int, driver: CudaDriver | None = None) -> "CudaMemory":
        driver = driver or CudaDriver.load()
        driver.make_context_current(device)
        handle = c_uint64()
        driver.call("cuMemImportFromShareableHandle", byref(handle), c_void_p(fd), c_int(_POSIX_FD))
        try:
            return cls(driver, handle, fd, num_bytes, device, access)
        except BaseException:
            driver.call("cuMemRelease", handle)
            raise

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def fd(self) -> int:
        return self._fd

    @property
    def pointer(self) -> int:
        return self._pointer

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """So that `torch.as_tensor(memory, device="cuda")` is a view: uint8 [num_bytes]."""
        return {"shape": (self._num_bytes,), "typestr": "|u1", "data": (self._pointer, False), "version": 3}

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self._device

    def __dlpack__(self, **_: object) -> object:
        """The same view for who does not find out whose memory it is: DLPack names the device. On any stream."""
        return byte_capsule(self._pointer, self._num_bytes, (CUDA, self._device), self)

    def host_buffer(self, num_bytes: int) -> memoryview:
        """Pinned: the device copies from and to it by itself."""
        self._enter()
        return self._pinned.take(num_bytes)

    def read(self, offset: int, into: memoryview) -> None:
        self._enter()
        buffer = (c_ubyte * len(into)).from_buffer(into)
        self._driver.call("cuMemcpyDtoH_v2", buffer, c_uint64(self._pointer + offset), c_size_t(len(into)))

    def write(self, offset: int, data: memoryview) -> None:
        self._enter()
        buffer = (c_ubyte * len(data)).from_buffer(data)
        self._driver.call("cuMemcpyHtoD_v2", c_uint64(self._pointer + offset), buffer, c_size_t(len(data)))
        self._driver.call("cuCtxSynchronize")  # of pinned memory it may return before the bytes are there

    def copy_from(self, offset: int, pointer: int, num_bytes: int) -> None:
        """What is there may be another device's: mapping it here has given this one access to it."""
        self._enter()
        self._driver.call("cuMemcpyDtoD_v2", c_uint64(self._pointer + offset), c_uint64(pointer), c_size_t(num_bytes))
        self._driver.call("cuCtxSynchronize")  # it returns before the bytes are there

    def _enter(self) -> None:
        """A thread that has used no GPU so far has no context."""
        if not getattr(self._entered, "is_done", False):
            self._driver.make_context_current(self._device)
            self._entered.is_done = True

    def close(self) -> None:
        """No view of the memory may be used any more."""
        if self._pointer == 0:
            return
        address, size = c_uint64(self._pointer), c_size_t(self._num_bytes)
        self._pointer = 0
        self._driver.make_context_current(self._device)  # this thread may have used no GPU so far
        self._driver.call("cuCtxSynchronize")
        self._driver.call("cuMemUnmap", address, size)
        self._driver.call("cuMemAddressFree", address, size)
        _release(self._driver, self._handle, self._fd)


def _map(driver: CudaDriver, handle: c_uint64, num_bytes: int, device: int, flags: int) -> int:
    address, size = c_uint64(), c_size_t(num_bytes)
    driver.call("cuMemAddressReserve", byref(address), size, c_size_t(0), c_uint64(0), c_uint64(0))
    try:
        driver.call("cuMemMap", address, size, c_size_t(0), handle, c_uint64(0))
        try:
            _set_access(driver, address, size, _AccessDesc(_Location(_ON_DEVICE, device), flags))
        except BaseException:
            driver.call("cuMemUnmap", address, size)
            raise
    except BaseException:
        driver.call("cuMemAddressFree", address, size)
        raise
    return int(address.value)


def _set_access(driver: CudaDriver, address: c_uint64, size: c_size_t, access: _AccessDesc) -> None:
    """Where a driver refuses a mapping that is only read, one that is also written: nobody writes to it."""
    try:
        driver.call("cuMemSetAccess", address, size, byref(access), c_size_t(1))
    except CudaDriverError:
        if access.flags != _READ:
            raise
        access.flags = _READ_WRITE
        driver.call("cuMemSetAccess", address, size, byref(access), c_size_t(1))


def _release(driver: CudaDriver, handle: c_uint64, fd: int) -> None:
    driver.call("cuMemRelease", handle)
    if fd >= 0:
        os.close(fd)
