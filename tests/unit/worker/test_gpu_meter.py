"""Figures of a GPU, from a stand-in for its library; the library's names are checked against the library."""

import importlib
from dataclasses import dataclass, field

import pytest

from weir.worker.engine.gpu_meter import Nvml, try_gpu_meter, try_open_meter


class FakeError(Exception):
    """As the library's."""


@dataclass
class Utilization:
    gpu: int = 37


@dataclass
class Memory:
    used: int = 3 << 30
    total: int = 80 << 30


@dataclass
class FakeNvml:
    """One GPU; `is_lost` once its driver does not answer any more."""

    NVMLError: type[Exception] = FakeError
    uuid: str = "GPU-12ab"
    is_lost: bool = False
    calls: list[str] = field(default_factory=list)

    def nvmlInit(self) -> None:  # noqa: N802
        self.calls.append("init")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if uuid != self.uuid:
            raise FakeError(f"{uuid} not found")
        return uuid

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Utilization:  # noqa: N802
        if self.is_lost or handle != self.uuid:
            raise FakeError("GPU is lost")
        return Utilization()

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Memory:  # noqa: N802
        assert handle == self.uuid
        return Memory()


def test_it_shows_how_busy_the_gpu_is_and_its_memory() -> None:
    meter = try_open_meter(FakeNvml(), "GPU-12ab")
    assert meter is not None
    assert meter.metrics() == {
        "gpu_utilization": 0.37,
        "gpu_memory_used_bytes": 3 << 30,
        "gpu_memory_total_bytes": 80 << 30,
    }


def test_a_gpu_that_does_not_answer_has_no_figures() -> None:
    nvml = FakeNvml()
    meter = try_open_meter(nvml, "GPU-12ab")
    assert meter is not None
    nvml.is_lost = True
    assert meter.metrics() == {}


def test_an_unknown_gpu_is_said_and_costs_the_figures_alone(caplog: pytest.LogCaptureFixture) -> None:
    assert try_open_meter(FakeNvml(), "GPU-other") is None
    assert "no figures of the GPU: NVML says GPU-other not found" in caplog.text


def test_without_a_gpu_there_is_nothing_to_ask() -> None:
    assert try_gpu_meter("cpu") is None
    assert try_gpu_meter("interpreter") is None


def test_the_library_has_what_is_asked_of_it() -> None:
    nvml = importlib.import_module("pynvml")
    names = [name for name in vars(Nvml) if name.lower().startswith("nvml")] + ["NVMLError"]
    assert len(names) >= 5
    assert all(hasattr(nvml, name) for name in names)
    assert try_open_meter(nvml, "GPU-none") is None, "no driver here, or no such GPU: its own error was caught"
