"""Memory on a device: page memory as tensors, single pages of it as bytes on the host, a step's arrays on their way."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from weir.kv.geometry import PAGE_TOKENS
from weir.kv.memory.device import DeviceMemory, HostMemory
from weir.model.architecture import ModelConfig

_ALIGN_BYTES = 16
"""Of each array: Triton compiles a kernel of its own for pointers that are aligned less."""

HostArray = npt.NDArray[np.int32] | npt.NDArray[np.float32] | npt.NDArray[np.float64]


def memory_tensor(memory: DeviceMemory, device: torch.device) -> torch.Tensor:
    """A view: uint8 [num_bytes]. `device` is the memory's."""
    if isinstance(memory, HostMemory):
        return torch.frombuffer(memory.buffer, dtype=torch.uint8)
    return torch.as_tensor(memory, device=device)  # by its __cuda_array_interface__


def page_tensor(
    memory: DeviceMemory, config: ModelConfig, num_pages: int, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """A view of the first pages: [num_pages, layers, 2 (key, value), kv heads, PAGE_TOKENS, head_dim].

    Raises ValueError if the memory is smaller than that.
    """
    shape = (num_pages, config.num_layers, 2, config.num_kv_heads, PAGE_TOKENS, config.head_dim)
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    if memory.num_bytes < num_bytes:
        raise ValueError(f"page memory has {memory.num_bytes} bytes, {num_pages} pages of this model need {num_bytes}")
    return memory_tensor(memory, device)[:num_bytes].view(dtype).view(shape)


class DevicePages:
    """Implements `weir.engine.memory.swapping.PageBytes`. A page passes through one buffer of the host."""

    def __init__(self, pages: torch.Tensor) -> None:
        """`pages` [num_pages, ...]: each page is one piece of memory."""
        self._pages = pages.view(torch.uint8).view(len(pages), -1)
        self._staging = torch.empty(self._pages.shape[1], dtype=torch.uint8, pin_memory=pages.is_cuda)

    def read(self, page_id: int) -> npt.NDArray[np.uint8]:
        self._staging.copy_(self._pages[page_id])
        return self._staging.numpy()

    def fill(self, page_id: int, fill: Callable[[npt.NDArray[np.uint8]], bool]) -> bool:
        if not fill(self._staging.numpy()):
            return False
        self._pages[page_id].copy_(self._staging)
        return True


def upload_bytes_of(arrays: Sequence[HostArray]) -> int:
    """What `StepUpload` needs for them."""
    return sum(-(-array.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES for array in arrays)


class StepUpload:
    """Carries a step's arrays to the device in one copy.

    Two buffers of `capacity_bytes`, one in pinned host memory and one on the device, are reused by every step.
    """

    def __init__(self, capacity_bytes: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._staging = torch.empty(capacity_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        self._arrived = torch.empty(capacity_bytes, dtype=torch.uint8, device=device)
        self._copied: torch.cuda.Event | None = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

    @property
    def capacity_bytes(self) -> int:
        return len(self._staging)

    def send(self, arrays: Sequence[HostArray]) -> list[torch.Tensor]:
        """Views of the device's buffer, of the arrays' shapes and types; valid until the next `send`.

        Raises:
            ValueError: the arrays take more than the capacity.
        """
        offsets, end = [], 0
        for array in arrays:
            offsets.append(end)
            end += -(-array.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        if end > len(self._staging):
            raise ValueError(f"a step's index takes {end} bytes, the upload has room for {len(self._staging)}")
        if self._copied is not None:
            self._copied.synchronize()  # the copy of the step before may still read the staging buffer
        staging = self._staging.numpy()
        for offset, array in zip(offsets, arrays, strict=True):
            staging[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._arrived[:end].copy_(self._staging[:end], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return [self._view(offset, array) for offset, array in zip(offsets, arrays, strict=True)]

    def _view(self, offset: int, array: HostArray) -> torch.Tensor:
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        return self._arrived[offset : offset + array.nbytes].view(dtype).view(array.shape)
