"""How busy a worker's GPU is and what of its memory is in use, by NVIDIA's management library (NVML)."""

import importlib
import logging
from collections.abc import Mapping
from typing import Any, Protocol

from weir.core.device import Device
from weir.kv.memory.cuda import CudaDriver, CudaDriverError
from weir.model.device_check import gpu_uuid

_log = logging.getLogger(__name__)


class _Utilization(Protocol):
    gpu: int
    """Per cent of the last sampling period in which a kernel ran."""


class _Memory(Protocol):
    used: int
    total: int


class Nvml(Protocol):
    """What is used of the module `pynvml` (package nvidia-ml-py)."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None: ...  # noqa: N802 - the library's names

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any: ...  # noqa: N802

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> _Utilization: ...  # noqa: N802

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> _Memory: ...  # noqa: N802


class GpuMeter:
    """Of the GPU by whose UUID it was opened: the one that PyTorch calls 0, whichever others NVML sees."""

    def __init__(self, nvml: Nvml, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle

    def metrics(self) -> Mapping[str, float]:
        """All workers of a GPU show the same. Empty when the driver does not say."""
        try:
            utilization = self._nvml.nvmlDeviceGetUtilizationRates(self._handle)
            memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        except self._nvml.NVMLError:
            return {}
        return {
            "gpu_utilization": utilization.gpu / 100,
            "gpu_memory_used_bytes": float(memory.used),
            "gpu_memory_total_bytes": float(memory.total),
        }


def try_gpu_meter(device: Device) -> GpuMeter | None:
    """None: the device is no GPU, or NVML is not to be had. May take a second: not in an event loop."""
    if device != "cuda":
        return None
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError as error:
        _log.warning("no figures of the GPU: %s; pip install nvidia-ml-py", error)
        return None
    try:
        return try_open_meter(nvml, gpu_uuid(CudaDriver.load()))
    except CudaDriverError as error:
        _log.warning("no figures of the GPU: %s", error)
        return None


def try_open_meter(nvml: Nvml, uuid: str) -> GpuMeter | None:
    """Of the GPU with that UUID."""
    try:
        nvml.nvmlInit()
        return GpuMeter(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
    except nvml.NVMLError as error:
        _log.warning("no figures of the GPU: NVML says %s", error)
        return None
