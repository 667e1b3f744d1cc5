"""Open files: services take what they may have, and say so when it is too little for their bounds."""

import re
from pathlib import Path

import pytest
from tests.unit.runtime.services import Service

from weir.runtime.descriptors import find_shortage
from weir_gateway.config import GatewayConfig
from weir_transfer.config import TransferConfig


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


@pytest.mark.parametrize("max_requests", [1, 1024])
def test_a_gateway_needs_room_for_every_connection_that_it_admits(max_requests: int) -> None:
    config = GatewayConfig(max_requests=max_requests)
    assert config.num_descriptors > config.max_calls + max_requests


def test_a_transfer_service_needs_a_connection_and_a_process_for_every_lease() -> None:
    assert TransferConfig(listen="unix:/x").num_descriptors > 2 * 256


def test_a_limit_that_just_suffices_is_no_shortage() -> None:
    assert find_shortage(256, 256) is None
    assert find_shortage(255, 256) is not None
