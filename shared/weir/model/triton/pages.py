"""Page memory on a device as tensors, and single pages of it as bytes on the host."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from weir.kv.geometry import PAGE_TOKENS
from weir.kv.memory.device import DeviceMemory, HostMemory
from weir.model.architecture import ModelConfig


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
