"""Whether workers can compute on a device. Nothing here imports torch or Triton: `weir up` and `weir doctor` ask."""

import ctypes
import importlib.util
import platform
from collections.abc import Callable
from importlib import metadata

from weir.core.device import Device
from weir.core.errors import WeirError
from weir.kv.memory.cuda import CudaDriver, CudaDriverError

_LEAST_CAPABILITY = (8, 0)
"""The kernels are compiled for, and bf16 matrix products exist from, this one on."""
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
_NAME_BYTES = 128


class DeviceMissing(WeirError):
    """There is no such device here; says what was looked for."""


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
        name, capability = _gpu(load_driver())
    except CudaDriverError as error:
        raise DeviceMissing(f"no GPU was found (looked for libcuda.so.1 and GPU 0: {error})") from error
    shown = f"{name}, compute capability {capability[0]}.{capability[1]}"
    if capability < _LEAST_CAPABILITY:
        raise DeviceMissing(f"GPU 0 is {shown}; the kernels need {'.'.join(map(str, _LEAST_CAPABILITY))} or later")
    torch_version = _version_of("torch")
    if torch_version.endswith("+cpu"):
        raise DeviceMissing(
            f"GPU 0 is {shown}, but PyTorch {torch_version} is built without CUDA (try `make setup TORCH=cuda`)"
        )
    _check_triton()
    return shown


def _gpu(driver: CudaDriver) -> tuple[str, tuple[int, int]]:
    handle, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(_NAME_BYTES)
    driver.call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(0))
    driver.call("cuDeviceGetName", name, ctypes.c_int(_NAME_BYTES), handle)
    driver.call("cuDeviceGetAttribute", ctypes.byref(major), ctypes.c_int(_MAJOR), handle)
    driver.call("cuDeviceGetAttribute", ctypes.byref(minor), ctypes.c_int(_MINOR), handle)
    return name.value.decode(errors="replace"), (major.value, minor.value)


def _check_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        raise DeviceMissing(f"Triton is not installed (looked for the package triton; this is {platform.system()})")


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        raise DeviceMissing(f"the package {package} is not installed") from None
