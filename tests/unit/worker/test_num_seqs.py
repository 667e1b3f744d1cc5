"""How many sequences a worker runs where nobody has said: what its device is good for."""

import ctypes
from typing import cast

import pytest

from weir.kv.memory.cuda import CudaDriver
from weir.model.device_check import Gpu
from weir.worker import config as worker_config
from weir.worker.roles.config import DecodeConfig, PrefillConfig


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, gib: int) -> None:
    gpu = Gpu("Pretended GPU", (9, 0), True, True, "DEFAULT", gib << 30)
    driver = CudaDriver(cast(ctypes.CDLL, None))
    monkeypatch.setattr(CudaDriver, "load", lambda: driver)
    monkeypatch.setattr(worker_config, "read_gpu", lambda asked: gpu if asked is driver else None)


def test_on_a_cpu_it_is_32_and_no_gpu_is_asked() -> None:
    assert DecodeConfig().most_num_seqs == 32
    assert PrefillConfig().most_num_seqs == 16


@pytest.mark.parametrize(("gib", "expected"), [(15, 32), (24, 64), (80, 128)])
def test_on_a_gpu_it_follows_from_its_memory(monkeypatch: pytest.MonkeyPatch, gib: int, expected: int) -> None:
    pretend_gpu(monkeypatch, gib)
    assert DecodeConfig(device="cuda").most_num_seqs == expected


def test_what_was_asked_for_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch, 80)
    assert DecodeConfig(device="cuda", max_num_seqs=5).most_num_seqs == 5
    assert DecodeConfig(max_num_seqs=200).most_num_seqs == 200


def test_fewer_than_none_are_refused() -> None:
    with pytest.raises(ValueError, match="max_num_seqs -1: must be at least 0"):
        DecodeConfig(max_num_seqs=-1)
