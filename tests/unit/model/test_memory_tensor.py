"""Device memory as a tensor: a view of it, by whichever way PyTorch takes, or an error; never a copy."""

import logging

import numpy as np
import pytest
import torch

from weir.kv.memory.device import HostMemory
from weir.kv.memory.dlpack import CPU, byte_capsule
from weir.model.triton.memory import memory_tensor

_CPU = torch.device("cpu")


class PretendedMemory:
    """Of the host, but seen as a GPU's is: by what it says of itself."""

    fd = -1

    def __init__(self, num_bytes: int) -> None:
        self.data = np.arange(num_bytes, dtype=np.uint8)

    @property
    def num_bytes(self) -> int:
        return len(self.data)

    @property
    def pointer(self) -> int:
        return int(self.data.ctypes.data)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU, 0

    def __dlpack__(self, **_: object) -> object:
        return byte_capsule(self.pointer, len(self.data), (CPU, 0), self)

    def host_buffer(self, num_bytes: int) -> memoryview:
        raise NotImplementedError

    def read(self, offset: int, into: memoryview) -> None:
        raise NotImplementedError

    def write(self, offset: int, data: memoryview) -> None:
        raise NotImplementedError

    def copy_from(self, offset: int, pointer: int, num_bytes: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing is mapped."""


class NotToBeFound(PretendedMemory):
    """As where the CUDA runtime does not know the address: `torch.as_tensor` fails."""

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        raise ValueError("The specified pointer resides on host memory and is not registered with any CUDA device.")


class Copied(PretendedMemory):
    """`torch.as_tensor` has elements to copy and nothing to look at."""

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> int:
        return int(self.data[index])


class CopiedByAll(Copied):
    def __dlpack__(self, **_: object) -> object:
        copy = PretendedMemory(len(self.data))
        return byte_capsule(copy.pointer, len(self.data), (CPU, 0), copy)


def test_memory_of_the_host_is_seen_by_its_buffer() -> None:
    memory = HostMemory.create(4096)
    tensor = memory_tensor(memory, _CPU)
    assert tensor.data_ptr() == memory.pointer
    del tensor
    memory.close()


@pytest.mark.parametrize("kind", [NotToBeFound, Copied])
def test_where_as_tensor_makes_no_view_dlpack_does(
    kind: type[PretendedMemory], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = kind(100)
    monkeypatch.setattr(torch, "as_tensor", _as_tensor_without_dlpack)
    with caplog.at_level(logging.WARNING):
        tensor = memory_tensor(memory, _CPU)
    assert tensor.data_ptr() == memory.pointer
    tensor[5] = 77
    assert memory.data[5] == 77
    assert "DLPack is used" in caplog.text


def test_a_copy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "as_tensor", _as_tensor_without_dlpack)
    with pytest.raises(RuntimeError, match=r"PyTorch .* makes no view of device memory at 0x"):
        memory_tensor(CopiedByAll(100), _CPU)


def test_a_tensor_on_another_device_is_refused() -> None:
    with pytest.raises(RuntimeError, match="on cpu, expected meta"):
        memory_tensor(PretendedMemory(100), torch.device("meta"))


def _as_tensor_without_dlpack(memory: PretendedMemory, device: torch.device) -> torch.Tensor:
    """As it was before it knew DLPack: by the CUDA array interface, or as a sequence."""
    if isinstance(memory, NotToBeFound):
        _ = memory.__cuda_array_interface__
    return torch.tensor(memory.data.tolist(), dtype=torch.uint8, device=device)
