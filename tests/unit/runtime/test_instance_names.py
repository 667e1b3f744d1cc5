"""Names of instances on machines that share a NATS, and of processes that share an index."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.runtime.config import ServiceConfig, check_instance
from weir.runtime.stack.config import StackConfig, default_instance
from weir.runtime.stack.instances import choose_instance
from weir.runtime.stack.paths import InstancePaths

SHARED = "nats://nats.internal:4222"


def name_on(machine: str, monkeypatch: pytest.MonkeyPatch, **changes: str) -> str:
    monkeypatch.setattr("socket.gethostname", lambda: machine)
    return StackConfig(**changes).instance_name  # type: ignore[arg-type]


def test_stacks_of_two_machines_that_share_a_nats_have_different_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert name_on("one", monkeypatch, nats=SHARED) == "weir-one-50051"
    assert name_on("two", monkeypatch, nats=SHARED) == "weir-two-50051"
    assert name_on("one", monkeypatch) == "weir-50051"
    assert name_on("one", monkeypatch, nats=SHARED, instance="prod") == "prod"


@given(st.text(min_size=1), st.text(min_size=1))
def test_machines_of_any_name_make_instance_names_that_differ(one: str, other: str) -> None:
    names = [default_instance(65535, machine) for machine in (one, other)]
    for name in names:
        check_instance(name)
    assert (names[0] == names[1]) == (one == other)


def test_long_names_are_told_apart_by_what_is_cut_off() -> None:
    names = {default_instance(65535, f"{'a' * 60}-{number}") for number in range(50)}
    assert len(names) == 50


def test_status_and_down_find_a_stack_by_its_port_with_either_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "one")
    assert choose_instance(tmp_path, "", 50051).folder.name == "weir-50051"
    paths = InstancePaths(tmp_path / "weir-one-50051")
    paths.make()
    paths.state_file.write_text("{}")
    assert choose_instance(tmp_path, "", 50051).folder.name == "weir-one-50051"
    assert choose_instance(tmp_path, "", 50052).folder.name == "weir-50052"


@pytest.mark.parametrize("host", ["worker-3.internal", "10.0.0.7", "fd00::3", "[fd00::3]", ""])
def test_a_host_can_be_advertised_by_name_or_address(host: str) -> None:
    assert ServiceConfig(advertise_host=host).advertise_host == host


@pytest.mark.parametrize("host", ["worker-3:50051", "http://worker", "two words", "0.0.0.0", "::"])
def test_what_nobody_can_connect_to_is_not_advertised(host: str) -> None:
    with pytest.raises(ValueError, match="advertise_host"):
        ServiceConfig(advertise_host=host)
