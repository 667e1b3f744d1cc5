"""Carries a step's small host arrays to a GPU in one copy."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

_ALIGN_BYTES = 16
"""Of each array: Triton compiles a kernel of its own for pointers that are aligned less."""

HostArray = npt.NDArray[np.int32] | npt.NDArray[np.float32] | npt.NDArray[np.float64]


class StepUpload:
    """Two buffers of `capacity_bytes`, one in pinned host memory and one on the device, reused by every step."""

    def __init__(self, capacity_bytes: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._staging = torch.empty(capacity_bytes, dtype=torch.uint8, pin_memory=is_cuda)
        self._arrived = torch.empty(capacity_bytes, dtype=torch.uint8, device=device)
        self._copied: torch.cuda.Event | None = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]

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
