"""Memory at an address as a capsule: a view of it, of the device that it names, that keeps its owner alive."""

import ctypes
import gc
import struct
import weakref

import numpy as np
import torch
from torch.utils.dlpack import from_dlpack

from weir.kv.memory.dlpack import CPU, CUDA, byte_capsule


class Bytes:
    """Memory of this process."""

    def __init__(self, num_bytes: int) -> None:
        self.data = np.arange(num_bytes, dtype=np.uint8)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU, 0

    def __dlpack__(self, **_: object) -> object:
        return byte_capsule(self.data.ctypes.data, len(self.data), (CPU, 0), self)


def test_a_view_reads_and_writes_the_same_bytes() -> None:
    memory = Bytes(100)
    view = from_dlpack(memory)
    assert (view.dtype, tuple(view.shape), view.device.type) == (torch.uint8, (100,), "cpu")
    assert view.data_ptr() == memory.data.ctypes.data
    view[5] = 77
    memory.data[6] = 78
    assert memory.data[5] == 77
    assert int(view[6]) == 78


def test_numpy_reads_it_too() -> None:
    memory = Bytes(10)
    view = np.from_dlpack(memory)  # type: ignore[arg-type]  # of another keyword
    memory.data[3] = 99
    assert view[3] == 99


def test_the_owner_lives_until_the_last_view_of_a_view_is_gone() -> None:
    memory = Bytes(100)
    seen = weakref.ref(memory)
    part = from_dlpack(memory)[3:9]
    del memory
    gc.collect()
    assert part.tolist() == [3, 4, 5, 6, 7, 8]
    assert seen() is not None
    del part
    gc.collect()
    assert seen() is None


def test_a_capsule_that_nobody_has_used_lets_its_owner_go() -> None:
    memory = Bytes(100)
    seen = weakref.ref(memory)
    capsule = memory.__dlpack__()
    del memory
    gc.collect()
    assert seen() is not None
    del capsule
    gc.collect()
    assert seen() is None


def test_a_capsule_names_the_device_of_its_memory() -> None:
    capsule = byte_capsule(4096, 10, (CUDA, 3), None)
    pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    address, device_type, device_number = struct.unpack("<Qii", ctypes.string_at(pointer_of(capsule, b"dltensor"), 16))
    assert (address, device_type, device_number) == (4096, CUDA, 3)
