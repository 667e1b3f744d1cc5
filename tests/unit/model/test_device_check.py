"""A device that is not there is named before anything is started, with what was looked for."""

import ctypes
import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from weir.kv.memory.cuda import CudaDriver, CudaDriverError
from weir.model.device_check import DeviceMissing, Gpu, check_device, find_gpu, gpu_uuid, read_gpu


class PretendedLibrary:
    """The calls of libcuda.so.1 that the check makes, for a GPU of this compute capability."""

    def __init__(self, major: int, minor: int, attributes: dict[int, int]) -> None:
        self._attributes = {75: major, 76: minor, 20: 0, 102: 1, 103: 1} | attributes

    def cuDeviceGet(self, handle: Any, number: ctypes.c_int) -> int:  # noqa: N802
        handle._obj.value = 40 + number.value
        return 0

    def cuDeviceGetName(self, name: Any, num_bytes: ctypes.c_int, handle: ctypes.c_int) -> int:  # noqa: N802
        assert (len(name), handle.value) == (num_bytes.value, 40)
        name.value = b"Pretended GPU"
        return 0

    def cuDeviceTotalMem_v2(self, value: Any, handle: ctypes.c_int) -> int:  # noqa: N802
        assert handle.value == 40
        value._obj.value = 80 << 30
        return 0

    def cuDeviceGetUuid(self, value: Any, handle: ctypes.c_int) -> int:  # noqa: N802
        assert handle.value == 40
        value._obj[:] = range(16)
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: ctypes.c_int, handle: ctypes.c_int) -> int:  # noqa: N802
        assert handle.value == 40
        value._obj.value = self._attributes[attribute.value]
        return 0


def driver(major: int, minor: int, attributes: dict[int, int] | None = None) -> Callable[[], CudaDriver]:
    """`attributes`: by number, where they are not those of a GPU that will do."""
    return lambda: CudaDriver(cast(ctypes.CDLL, PretendedLibrary(major, minor, attributes or {})))


def pretend_torch(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)


def test_a_gpu_that_will_do_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_torch(monkeypatch, "2.13.0")
    assert find_gpu(driver(9, 0)) == "Pretended GPU, compute capability 9.0"
    assert find_gpu(driver(8, 0)) == "Pretended GPU, compute capability 8.0"


def test_what_the_driver_says_of_a_gpu() -> None:
    expected = Gpu("Pretended GPU", (9, 0), True, False, "EXCLUSIVE_PROCESS", 80 << 30)
    assert read_gpu(driver(9, 0, {20: 3, 103: 0})()) == expected


def test_a_gpu_is_known_to_other_tools_by_its_uuid() -> None:
    assert gpu_uuid(driver(9, 0)()) == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"


def test_a_gpu_that_is_too_old_is_named_with_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_torch(monkeypatch, "2.13.0")
    with pytest.raises(DeviceMissing, match=r"Pretended GPU, compute capability 7\.5; the kernels need 8\.0 or later"):
        find_gpu(driver(7, 5))


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({102: 0}, r"no virtual memory management \(attribute 102\).* pass the whole GPU through"),
        ({103: 0}, r"exports no memory as a file descriptor \(attribute 103\).* not WSL"),
        ({20: 3}, r"compute mode is EXCLUSIVE_PROCESS.* `nvidia-smi -i 0 -c DEFAULT`"),
        ({20: 2}, r"compute mode is PROHIBITED.* `nvidia-smi -i 0 -c DEFAULT`"),
        ({20: 7}, r"compute mode is number 7"),
    ],
)
def test_a_gpu_whose_memory_processes_cannot_share_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, attributes: dict[int, int], said: str
) -> None:
    pretend_torch(monkeypatch, "2.13.0")
    with pytest.raises(DeviceMissing, match=rf"GPU 0 is Pretended GPU, compute capability 9\.0; its .*{said}"):
        find_gpu(driver(9, 0, attributes))


def test_a_pytorch_without_cuda_is_named_with_how_to_get_another(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_torch(monkeypatch, "2.13.0+cpu")
    with pytest.raises(DeviceMissing, match=r"PyTorch 2\.13\.0\+cpu is built without CUDA .*TORCH=cuda"):
        find_gpu(driver(9, 0))


def test_a_driver_without_a_gpu_is_an_error_that_says_what_was_looked_for() -> None:
    def load() -> CudaDriver:
        raise CudaDriverError("cuInit: no CUDA-capable device is detected (100)")

    with pytest.raises(DeviceMissing, match=r"looked for libcuda\.so\.1 and GPU 0: cuInit: no CUDA-capable device"):
        find_gpu(load)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU here")
def test_cuda_without_a_driver_is_an_error_that_names_the_device_and_the_way_out() -> None:
    with pytest.raises(DeviceMissing, match=r"device cuda: no GPU was found \(looked for libcuda.*use --device cpu"):
        check_device("cuda")


def test_the_other_devices_are_always_there() -> None:
    pytest.importorskip("triton", reason="Triton is installed on Linux only")
    check_device("cpu")
    check_device("interpreter")
