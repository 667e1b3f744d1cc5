"""What `weir doctor` says that a stack needs is what the services' own bounds come to."""

import resource
from pathlib import Path

import pytest

from weir.cli import doctor
from weir.kv.arena_size import FreeMemory
from weir.kv.layout import layout_of
from weir.worker.roles.config import DecodeConfig, PrefillConfig
from weir_gateway.config import GatewayConfig
from weir_scheduler.config import SchedulerConfig
from weir_transfer.config import TransferConfig, with_model_shape
from weir_transfer.sizing import size_arena


def test_the_descriptors_that_it_names_are_those_of_the_process_that_needs_most() -> None:
    configs = (DecodeConfig(), GatewayConfig(), PrefillConfig(), SchedulerConfig(), TransferConfig())
    assert max(config.num_descriptors for config in configs) == doctor.NUM_DESCRIPTORS


def test_the_room_in_dev_shm_is_that_of_the_arena_and_of_one_decode_workers_swapped_pages() -> None:
    assert DecodeConfig().swap_bytes == -1, "a quarter of the arena"
    assert TransferConfig().num_slots == doctor.NUM_SLOTS
    config = TransferConfig(load="dummy", model_shape=TransferConfig().model)
    plenty = FreeMemory(1 << 42, 1 << 42)
    geometry = size_arena(config, with_model_shape(config), lambda config: plenty).geometry
    assert doctor.default_shm_bytes() == pytest.approx(1.25 * layout_of(geometry).memory_bytes, rel=0.001)


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


def test_a_cache_of_kernels_that_others_can_write_is_in_the_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WEIR_CACHE", str(tmp_path))
    assert not [one for one in doctor._arithmetic(2, set()) if one.what == "kernels"]
    of_one_machine = tmp_path / "kernels" / "avx2-1f"
    of_one_machine.mkdir()
    for folder in (of_one_machine, tmp_path / "kernels"):
        folder.chmod(0o777)
        (finding,) = (one for one in doctor._arithmetic(2, set()) if one.what == "kernels")
        assert (finding.verdict, f"{folder} has mode 0777" in finding.found) == ("missing", True)
