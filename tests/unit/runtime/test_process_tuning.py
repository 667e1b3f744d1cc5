"""Services take the open files that they may have and say when these are too few; garbage is collected bit by bit."""

import gc
import re
from pathlib import Path

import grpc
import pytest
from tests.unit.runtime.services import Service, tokenize

import weir_scheduler.__main__ as scheduler
from weir.bench import scheduler as bench
from weir.runtime.process_tuning import find_shortage, short_collections
from weir_gateway.config import GatewayConfig
from weir_transfer.config import TransferConfig

_SHORT = (50, 1, 70_000)


def limits_of(pid: int) -> tuple[int, int]:
    """Soft and hard."""
    found = re.search(r"Max open files +(\d+) +(\d+)", Path(f"/proc/{pid}/limits").read_text())
    assert found is not None
    return int(found[1]), int(found[2])


def test_a_service_raises_its_soft_limit_to_the_hard_one(service_folder: Path) -> None:
    service = Service(service_folder, limits="-Sn 128")
    service.wait_ready()
    soft, hard = limits_of(service.process.pid)
    assert soft == hard > 128
    assert "files and connections can be open" not in service.log
    assert service.end() == 0


def test_a_service_says_when_the_hard_limit_is_below_its_bounds(service_folder: Path) -> None:
    service = Service(service_folder, limits="-n 200")
    service.wait_ready()
    line = "at most 200 files and connections can be open, the bounds of this process come to 256: connections"
    assert service.log.count(line) == 1
    assert service.end() == 0


def test_collections_of_a_service_that_is_ready_spare_what_it_has_started_with(service_folder: Path) -> None:
    service = Service(service_folder)
    with grpc.insecure_channel(service.wait_ready()["address"]) as channel:
        num_spared, num_looked_at = tokenize(channel, "frozen").token_ids
    assert num_looked_at < num_spared / 10
    assert service.end() == 0


@pytest.mark.parametrize("max_requests", [1, 1024])
def test_a_gateway_needs_room_for_every_connection_that_it_admits(max_requests: int) -> None:
    config = GatewayConfig(max_requests=max_requests)
    assert config.num_descriptors > config.max_calls + max_requests


def test_a_transfer_service_needs_a_connection_and_a_process_for_every_lease() -> None:
    assert TransferConfig(listen="unix:/x").num_descriptors > 2 * 256


def test_a_limit_that_just_suffices_is_no_shortage() -> None:
    assert find_shortage(256, 256) is None
    assert find_shortage(255, 256) is not None


def end_badly() -> None:
    with short_collections():
        raise RuntimeError(gc.get_threshold())


def test_collections_are_short_as_long_as_it_is_asked_for_also_if_it_ends_badly() -> None:
    before = gc.get_threshold()
    with pytest.raises(RuntimeError) as ended:
        end_badly()
    assert ended.value.args == (_SHORT,)
    assert before == gc.get_threshold() != _SHORT


def test_a_scheduler_runs_with_short_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def run_service(*_: object, **__: object) -> int:
        seen.append(gc.get_threshold())
        return 3

    monkeypatch.setattr(scheduler, "run_service", run_service)
    monkeypatch.setattr(scheduler, "load_config", lambda *_, **__: None)
    assert scheduler.main() == 3
    assert seen == [_SHORT]


def test_decisions_are_measured_as_the_scheduler_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def measure(*_: object) -> bench.DecisionCost:
        seen.append(gc.get_threshold())
        return bench.DecisionCost("fcfs", 1, 1, 1.0, 1.0, 1.0, 1.0, 1.0, 1, 1.0, 1.0)

    monkeypatch.setattr(bench, "measure", measure)
    config = bench.SchedulerBenchConfig(policies=("fcfs",), queued=(1,), pairs=(1,))
    assert bench.main(config, as_json=True) == 0
    assert seen == [_SHORT]
