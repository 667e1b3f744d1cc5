"""A rolling restart: its order, and the processes of a running stack that go through it."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.unit.runtime.stacks import Driver, FakeProcess

from weir.core.errors import NotFound, Unavailable
from weir.kv.arena.segment import Segment, try_find_mismatch
from weir.kv.geometry import ArenaGeometry
from weir.runtime.stack.paths import InstancePaths
from weir.runtime.stack.rolling import RestartFailed, RestartStep, RollingRestart, plan_restart
from weir.runtime.stack.state import ProcessState

NAMES = ("nats", "transfer-0", "scheduler-0", "scheduler-1", "prefill-0", "decode-0", "decode-1", "gateway-0")


def state_of(name: str) -> ProcessState:
    return ProcessState(name, name.partition("-")[0], "ready", None, 0, 0.0, f"address-of-{name}", "")


STATES = [state_of(name) for name in NAMES]


def names_of(steps: Sequence[RestartStep]) -> list[tuple[str, ...]]:
    return [step.names for step in steps]


def test_the_standby_comes_before_the_leader_and_nats_last() -> None:
    steps = plan_restart(STATES, (), leader="scheduler-0", mismatch="")
    assert [name for (name,) in names_of(steps)] == [
        *("scheduler-1", "scheduler-0", "transfer-0", "prefill-0", "decode-0", "decode-1", "gateway-0", "nats")
    ]


def test_only_what_is_named_restarts() -> None:
    steps = plan_restart(STATES, ("gateway-0", "decode-1"), leader="scheduler-0", mismatch="")
    assert names_of(steps) == [("decode-1",), ("gateway-0",)]


def test_an_arena_that_cannot_be_kept_starts_cold_with_all_its_workers() -> None:
    steps = plan_restart(STATES, (), leader="scheduler-1", mismatch="version 6")
    assert names_of(steps) == [
        ("scheduler-0",),
        ("scheduler-1",),
        ("transfer-0", "prefill-0", "decode-0", "decode-1"),
        ("gateway-0",),
        ("nats",),
    ]
    assert steps[2].reason == "version 6"
    (only,) = plan_restart(STATES, ("decode-1",), leader="scheduler-0", mismatch="version 6")
    assert only.names == ("transfer-0", "prefill-0", "decode-0", "decode-1"), "a new worker could not attach"
    assert names_of(plan_restart(STATES, ("gateway-0",), leader="", mismatch="version 6")) == [("gateway-0",)]


def test_a_name_that_no_process_has_is_refused() -> None:
    with pytest.raises(NotFound, match="no process is named 'decode-7'; there are: nats, transfer-0"):
        plan_restart(STATES, ("gateway-0", "decode-7"), leader="", mismatch="")


def test_a_segment_of_another_version_is_told_without_touching_it(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    assert try_find_mismatch(path) is None
    segment = Segment.create(path, ArenaGeometry(64, 8, 4, 256), "digest")
    assert try_find_mismatch(path) is None
    version = 8  # after the magic number
    with path.open("r+b") as file:
        file.seek(version)
        file.write(b"\x63")
    assert "its layout has version 99" in (try_find_mismatch(path) or "")
    assert path.exists()
    segment.unlink()
    segment.close()


class Lines:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def step_begins(self, step: RestartStep) -> None:
        self.lines.append(f"begins {' '.join(step.names)}")

    def worker_drained(self, name: str, after_s: float, problem: str) -> None:
        self.lines.append(f"drained {name} {problem}".strip())

    def step_ended(self, step: RestartStep, after_s: float) -> None:
        self.lines.append(f"ended {' '.join(step.names)}")


async def lead(processes: Sequence[ProcessState]) -> str | None:
    """The first scheduler that is ready."""
    return next((one.name for one in processes if one.role == "scheduler" and one.phase == "ready"), None)


async def drain(address: str) -> None:
    assert address.startswith("fake:")


def test_every_process_is_another_one_afterwards_and_each_waited_for_the_one_before(tmp_path: Path) -> None:
    lines = Lines()
    names = ["scheduler-0", "decode-0", "decode-1", "nats"]
    with Driver(tmp_path / "rolls", [FakeProcess(name) for name in names]) as driver:
        driver.wait_phase("ready")
        before = driver.pids()
        restart = RollingRestart(driver.paths, lines, drain, lead, timeout_s=20)
        asyncio.run(restart.run((), [tmp_path / "no segment"]))
        after = driver.pids()
        assert driver.state().phase == "ready"
    assert before.keys() == after.keys()
    assert not set(before.values()) & set(after.values())
    assert lines.lines == [
        *("begins scheduler-0", "ended scheduler-0"),
        *("begins decode-0", "drained decode-0", "ended decode-0"),
        *("begins decode-1", "drained decode-1", "ended decode-1"),
        *("begins nats", "ended nats"),
    ]


def test_a_worker_that_cannot_be_drained_is_told_and_restarted_all_the_same(tmp_path: Path) -> None:
    async def refuse(address: str) -> None:
        raise Unavailable("no scheduler answers")

    lines = Lines()
    with Driver(tmp_path / "rolls", [FakeProcess("decode-0")]) as driver:
        driver.wait_phase("ready")
        before = driver.pids()
        asyncio.run(RollingRestart(driver.paths, lines, refuse, lead, timeout_s=20).run((), [tmp_path / "none"]))
        assert driver.pids() != before
    assert lines.lines[1] == "drained decode-0 no scheduler answers"


def test_one_that_does_not_come_back_ends_the_restart_and_the_next_ones_are_not_touched(tmp_path: Path) -> None:
    stubborn = FakeProcess("decode-0", ("--ignore-term",))
    with Driver(tmp_path / "rolls", [stubborn, FakeProcess("gateway-0")]) as driver:
        driver.wait_phase("ready")
        before = driver.pids()
        with pytest.raises(RestartFailed, match=r"not ready 0\.5 s after its end: decode-0; see .*decode-0\.log"):
            asyncio.run(RollingRestart(driver.paths, Lines(), drain, lead, timeout_s=0.5).run((), [tmp_path / "none"]))
        assert driver.pids() == before


def test_a_stack_without_a_supervisor_is_not_restarted(tmp_path: Path) -> None:
    paths = InstancePaths(tmp_path / "none")
    with pytest.raises(Unavailable, match="none has no supervisor here"):
        asyncio.run(RollingRestart(paths, Lines(), drain, lead, timeout_s=1).run((), [tmp_path / "none"]))
