"""Whether workers can compute on a device. Nothing here imports torch or Triton: `weir up` and `weir doctor` ask."""

import ctypes
import importlib.util
import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from uuid import UUID

from weir.core.device import Device
from weir.core.errors import WeirError
from weir.kv.memory.cuda import CudaDriver, CudaDriverError

_LEAST_CAPABILITY = (8, 0)
"""The kernels are compiled for, and bf16 matrix products exist from, this one on."""
_NAME_BYTES = 128

# of CUdevice_attribute
_COMPUTE_MODE = 20
_MAJOR, _MINOR = 75, 76
_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102
_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103

_DEFAULT_MODE = 0
_MODE_NAMES = {0: "DEFAULT", 1: "EXCLUSIVE_THREAD", 2: "PROHIBITED", 3: "EXCLUSIVE_PROCESS"}


class DeviceMissing(WeirError):
    """There is no such device here, or not one that will do; says what was looked for, and what to do."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """What a GPU's driver says of it. `compute_mode`: which processes may use it; DEFAULT is any number."""

    name: str
    capability: tuple[int, int]
    has_virtual_memory: bool
    shares_by_descriptor: bool
    compute_mode: str
    total_bytes: int

    def __str__(self) -> str:
        return f"{self.name}, compute capability {self.capability[0]}.{self.capability[1]}"


def check_device(device: Device) -> None:
    """Raises DeviceMissing. Cheap enough to be asked before anything is started."""
    if device == "cpu":
        return
    try:
        if device == "cuda":
            find_gpu()
        else:
            _check_triton()
    except DeviceMissing as missing:
        raise DeviceMissing(f"device {device}: {missing}; use --device cpu") from missing


def find_gpu(load_driver: Callable[[], CudaDriver] = CudaDriver.load) -> str:
    """Name and compute capability of GPU 0, if Weir can use it. Raises DeviceMissing, without naming a device."""
    try:
        gpu = read_gpu(load_driver())
    except CudaDriverError as error:
        raise DeviceMissing(f"no GPU was found (looked for libcuda.so.1 and GPU 0: {error})") from error
    obstacle = _obstacle(gpu)
    if obstacle:
        raise DeviceMissing(f"GPU 0 is {gpu}; {obstacle}")
    torch_version = _version_of("torch")
    if torch_version.endswith("+cpu"):
        raise DeviceMissing(
            f"GPU 0 is {gpu}, but PyTorch {torch_version} is built without CUDA (try `make setup TORCH=cuda`)"
        )
    _check_triton()
    return str(gpu)


def read_gpu(driver: CudaDriver, number: int = 0) -> Gpu:
    """Raises CudaDriverError. Makes no context: nothing is taken of the GPU's memory."""
    handle, name = ctypes.c_int(), ctypes.create_string_buffer(_NAME_BYTES)
    driver.call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(number))
    driver.call("cuDeviceGetName", name, ctypes.c_int(_NAME_BYTES), handle)

    total = ctypes.c_size_t()
    driver.call("cuDeviceTotalMem_v2", ctypes.byref(total), handle)

    def attribute(which: int) -> int:
        value = ctypes.c_int()
        driver.call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(which), handle)
        return value.value

    mode = attribute(_COMPUTE_MODE)
    return Gpu(
        name.value.decode(errors="replace"),
        (attribute(_MAJOR), attribute(_MINOR)),
        attribute(_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) != 0,
        attribute(_POSIX_FILE_DESCRIPTOR_SUPPORTED) != 0,
        _MODE_NAMES.get(mode, f"number {mode}"),
        total.value,
    )


def gpu_uuid(driver: CudaDriver, number: int = 0) -> str:
    """As NVIDIA's tools write it, "GPU-" and 32 hex digits in groups. Raises CudaDriverError."""
    handle, found = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    driver.call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(number))
    driver.call("cuDeviceGetUuid", ctypes.byref(found), handle)
    return f"GPU-{UUID(bytes=bytes(found))}"


def _obstacle(gpu: Gpu) -> str:
    """Why Weir cannot use it, and what to do; empty if it can."""
    if gpu.capability < _LEAST_CAPABILITY:
        return f"the kernels need {'.'.join(map(str, _LEAST_CAPABILITY))} or later"
    if not gpu.has_virtual_memory:
        return (
            "its driver has no virtual memory management (attribute 102), which page memory is made by: in a virtual "
            "machine pass the whole GPU through, or turn on unified memory for its vGPU; elsewhere update the driver"
        )
    if not gpu.shares_by_descriptor:
        return (
            "its driver exports no memory as a file descriptor (attribute 103), by which processes share pages: it "
            "needs Linux itself, not WSL, and in a virtual machine the whole GPU passed through"
        )
    if gpu.compute_mode != _MODE_NAMES[_DEFAULT_MODE]:
        return (
            f"its compute mode is {gpu.compute_mode}, but the transfer service and every worker use it at the same "
            "time: set `nvidia-smi -i 0 -c DEFAULT` (as root)"
        )
    return ""


def _check_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        raise DeviceMissing(f"Triton is not installed (looked for the package triton; this is {platform.system()})")


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        raise DeviceMissing(f"the package {package} is not installed") from None
