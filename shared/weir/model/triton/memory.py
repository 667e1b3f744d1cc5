"""Memory on a device: page memory as tensors, single pages of it as bytes on the host, a step's arrays on their way."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.dlpack import from_dlpack

from weir.kv.geometry import PAGE_TOKENS
from weir.kv.memory.device import DeviceMemory, HostMemory
from weir.model.architecture import ModelConfig
from weir.model.precision import page_geometry
from weir.ops.reference_quantized import KvScales

_log = logging.getLogger(__name__)
_ALIGN_BYTES = 16
"""Of each array: Triton compiles a kernel of its own for pointers that are aligned less."""

HostArray = npt.NDArray[np.int32] | npt.NDArray[np.float32] | npt.NDArray[np.float64]


def memory_tensor(memory: DeviceMemory, device: torch.device) -> torch.Tensor:
    """A view: uint8 [num_bytes]. `device` is the memory's.

    Raises RuntimeError if PyTorch makes no view of it.
    """
    if isinstance(memory, HostMemory):
        return torch.frombuffer(memory.buffer, dtype=torch.uint8)
    tensor = _try_as_tensor(memory, device)
    if tensor is None:
        tensor = from_dlpack(memory)
    if tensor.data_ptr() != memory.pointer or tensor.device != device:
        raise RuntimeError(
            f"PyTorch {torch.__version__} makes no view of device memory at {memory.pointer:#x}: "
            f"its tensor is at {tensor.data_ptr():#x} on {tensor.device}, expected {device}"
        )
    return tensor


def _try_as_tensor(memory: DeviceMemory, device: torch.device) -> torch.Tensor | None:
    """By its __cuda_array_interface__. PyTorch then asks the CUDA runtime whose memory it is, which may know nothing of
    what the driver's virtual memory calls have mapped. DLPack names the device itself."""
    try:
        tensor = torch.as_tensor(memory, device=device)
    except (RuntimeError, TypeError, ValueError) as error:
        _log.warning("torch.as_tensor makes no tensor of device memory, DLPack is used: %s", error)
        return None
    if tensor.data_ptr() != memory.pointer:
        _log.warning("torch.as_tensor makes a copy of device memory, DLPack is used")
        return None
    return tensor


def page_tensor(
    memory: DeviceMemory, config: ModelConfig, num_pages: int, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """A view of the first pages: [num_pages, layers, 2 (key, value), kv heads, PAGE_TOKENS, head_dim], or of int8
    [num_pages, bytes of a page], whose scales lie behind its numbers.

    Raises ValueError if the memory is smaller than that.
    """
    shape = page_shape(config, num_pages, dtype)
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    if memory.num_bytes < num_bytes:
        raise ValueError(f"page memory has {memory.num_bytes} bytes, {num_pages} pages of this model need {num_bytes}")
    return memory_tensor(memory, device)[:num_bytes].view(dtype).view(shape)


def page_shape(config: ModelConfig, num_pages: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Of the tensor of all pages."""
    if dtype is torch.int8:
        return num_pages, page_geometry(config, "bf16-kv8").page_bytes
    return num_pages, config.num_layers, 2, config.num_kv_heads, PAGE_TOKENS, config.head_dim


@dataclass(frozen=True, slots=True)
class LayerPages:
    """Views of one layer: [num_pages, kv heads, PAGE_TOKENS, head_dim] each; `scales` where they are int8."""

    keys: torch.Tensor
    values: torch.Tensor
    scales: KvScales | None


def layer_pages(pages: torch.Tensor, config: ModelConfig) -> list[LayerPages]:
    """Of every layer. `pages` are of `page_shape`."""
    if pages.dtype is not torch.int8:
        return [LayerPages(pages[:, layer, 0], pages[:, layer, 1], None) for layer in range(config.num_layers)]
    shape = (len(pages), config.num_layers, 2, config.num_kv_heads, PAGE_TOKENS)
    num_numbers = int(np.prod(shape[1:])) * config.head_dim
    numbers = pages[:, :num_numbers].view(*shape, config.head_dim)
    scales = pages[:, num_numbers:].view(torch.float32).view(shape)
    return [
        LayerPages(numbers[:, layer, 0], numbers[:, layer, 1], KvScales(scales[:, layer, 0], scales[:, layer, 1]))
        for layer in range(config.num_layers)
    ]


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
