"""What `weir doctor` says that a stack needs is what the services' own bounds come to."""

import resource

import pytest

from weir.cli import doctor
from weir.worker.roles.config import DecodeConfig, PrefillConfig
from weir_gateway.config import GatewayConfig
from weir_scheduler.config import SchedulerConfig
from weir_transfer.config import TransferConfig


def test_the_descriptors_that_it_names_are_those_of_the_process_that_needs_most() -> None:
    configs = (DecodeConfig(), GatewayConfig(), PrefillConfig(), SchedulerConfig(), TransferConfig())
    assert max(config.num_descriptors for config in configs) == doctor.NUM_DESCRIPTORS


def test_the_room_in_dev_shm_is_that_of_the_arena_and_of_one_decode_workers_swapped_pages() -> None:
    assert DecodeConfig().swap_bytes == -1, "a quarter of the arena"
    assert TransferConfig().arena_bytes * 1.25 / 2**30 == doctor.LEAST_SHM_GIB


@pytest.mark.parametrize(
    ("hard", "verdict"), [(1024, "warning"), (doctor.NUM_DESCRIPTORS, "ok"), (resource.RLIM_INFINITY, "ok")]
)
def test_too_few_open_files_are_a_warning_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, hard: int, verdict: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, hard))
    finding = doctor._open_files()
    assert (finding.verdict, "256 here" in finding.found) == (verdict, True)
    assert bool(finding.remedy) == (verdict == "warning")
