"""A stack's supervisor as a whole, in a process of its own, with real (small) processes to look after."""

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests.unit.runtime.drive_stack import LineReporter
from tests.unit.runtime.services import kill_all
from tests.unit.runtime.stacks import FAST, Driver, FakeProcess, fake_plan, fake_spec, is_alive, wait_until

from weir.kv.arena.segment import Segment, segment_path
from weir.kv.geometry import ArenaGeometry
from weir.runtime.stack.instances import end_instance
from weir.runtime.stack.leftovers import remove_leftovers
from weir.runtime.stack.paths import InstanceBusy, InstancePaths
from weir.runtime.stack.plan import ProcessSpec
from weir.runtime.stack.starter import ProcessStarter, StartedProcess
from weir.runtime.stack.state import try_read_state
from weir.runtime.stack.supervised import SupervisedProcess
from weir.runtime.stack.supervisor import Supervisor

ALL = tuple(FakeProcess(name) for name in ("nats", "transfer-0", "scheduler-0", "prefill-0", "decode-0", "gateway-0"))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """An instance's folder; nothing of the instance may be alive at the end of a test."""
    folder = tmp_path / f"t{os.getpid()}"
    yield folder
    assert kill_all(folder) == []


def test_a_stack_starts_is_written_down_and_ends_without_a_trace(folder: Path) -> None:
    socket = folder / "arena.sock"
    processes = [*ALL[:1], FakeProcess("transfer-0", ("--socket", str(socket))), *ALL[2:]]
    with Driver(folder, processes) as driver:
        state = driver.wait_phase("ready")
        pids = driver.pids()
        segment = segment_path(folder.name)
        segment.write_bytes(b"what a transfer service that was killed would leave")

        assert {p.name: p.phase for p in state.processes} == {p.name: "ready" for p in processes}
        assert [p.address for p in state.processes] == [f"fake:{pids[p.name]}" for p in state.processes]
        assert all(is_alive(pid) for pid in pids.values())
        assert socket.exists()

        driver.signal(signal.SIGTERM)
        code, output = driver.wait()

    assert code == 0, output
    assert "stack ready" in output
    assert [name for name, pid in pids.items() if is_alive(pid)] == []
    assert not segment.exists()
    assert sorted(path.name for path in folder.iterdir()) == ["lock", "logs"]


def test_what_a_process_says_of_itself_is_told_once_and_written_down(folder: Path) -> None:
    processes = [*ALL[:1], FakeProcess("transfer-0", ("--note", "the well is deep", "--note", "and wide")), *ALL[2:]]
    with Driver(folder, processes) as driver:
        state = driver.wait_phase("ready")
        assert state.notes == ("the well is deep", "and wide")
        killed = driver.pids()["transfer-0"]
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: driver.pids().get("transfer-0") not in (None, killed) and driver.state().notes != ())
        driver.wait_phase("ready")
        driver.signal(signal.SIGTERM)
        code, output = driver.wait()
    assert code == 0, output
    assert output.count("note: the well is deep\n") == output.count("note: and wide\n") == 1


def test_a_stack_whose_folder_was_cleaned_away_still_ends_as_a_whole(folder: Path) -> None:
    with Driver(folder, ALL) as driver:
        driver.wait_phase("ready")
        pids = driver.pids()
        shutil.rmtree(folder)
        driver.signal(signal.SIGTERM)
        code, output = driver.wait()
    assert code == 0, output
    assert output.count("not written:") == 1
    assert [name for name, pid in pids.items() if is_alive(pid)] == []


def test_down_ends_a_stack_whose_folder_was_deleted(folder: Path) -> None:
    with Driver(folder, ALL) as driver:
        driver.wait_phase("ready")
        pids = driver.pids()
        shutil.rmtree(folder)
        ended = asyncio.run(end_instance(driver.paths))
        code, output = driver.wait()
    assert (ended.was_supervised, ended.leftovers.pids, code) == (True, (), 0), output
    assert [name for name, pid in pids.items() if is_alive(pid)] == []


def test_a_second_supervisor_lets_a_stack_alone_whose_folder_was_deleted(folder: Path) -> None:
    with Driver(folder, ALL) as first:
        first.wait_phase("ready")
        pids = first.pids()
        shutil.rmtree(folder)
        with Driver(folder, ALL) as second:
            code, output = second.wait()
        assert code == 1
        assert f"already running (process {first.process.pid}), though its folder was deleted" in output
        assert f"`weir down --instance {folder.name}` ends it" in output
        assert all(is_alive(pid) for pid in pids.values())


def test_a_stack_that_can_say_nothing_goes_on_and_ends_as_a_whole(folder: Path) -> None:
    with Driver(folder, ALL) as driver:
        driver.wait_phase("ready")
        assert driver.process.stdout is not None
        driver.process.stdout.close()  # as a terminal that is gone: every line it writes is an error
        os.kill(driver.pids()["decode-0"], signal.SIGKILL)
        wait_until(lambda: next(p for p in driver.state().processes if p.name == "decode-0").num_restarts == 1)
        pids = driver.pids()
        driver.signal(signal.SIGTERM)
        driver.process.wait(20)
    assert [name for name, pid in pids.items() if is_alive(pid)] == []


def test_workers_are_started_last_for_before_the_first_of_them_much_is_imported(folder: Path) -> None:
    with Driver(folder, ALL) as driver:
        driver.wait_phase("ready")
        by_start = sorted(driver.pids().items(), key=lambda one: one[1])
        driver.signal(signal.SIGTERM)
        driver.wait()
    assert sorted(name for name, _ in by_start[-2:]) == ["decode-0", "prefill-0"]


def test_processes_end_in_the_order_in_which_they_need_each_other(folder: Path, tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    processes = [FakeProcess(p.name, ("--ended-file", str(ended))) for p in ALL]
    with Driver(folder, processes) as driver:
        driver.wait_phase("ready")
        names = {str(pid): name for name, pid in driver.pids().items()}
        driver.signal(signal.SIGINT)
        code, output = driver.wait()
    assert code == 0, output
    order = [names[line.split()[0]] for line in ended.read_text().splitlines()]
    assert order[0] == "gateway-0"
    assert sorted(order[1:3]) == ["decode-0", "prefill-0"]
    assert order[3:] == ["scheduler-0", "transfer-0", "nats"]


@pytest.mark.parametrize("name", ["nats", "transfer-0", "decode-0", "gateway-0"])
def test_a_process_that_is_killed_is_started_again(folder: Path, name: str) -> None:
    with Driver(folder, ALL) as driver:
        driver.wait_phase("ready")
        before = driver.pids()
        os.kill(before[name], signal.SIGKILL)

        def is_back() -> bool:
            process = next(p for p in driver.state().processes if p.name == name)
            return process.phase == "ready" and process.identity is not None and process.num_restarts == 1

        wait_until(is_back)
        after = driver.pids()
        assert after[name] != before[name]
        assert {n: pid for n, pid in after.items() if n != name} == {n: p for n, p in before.items() if n != name}
        assert driver.state().phase == "ready"


def test_after_the_first_readiness_no_number_of_deaths_ends_the_stack(folder: Path) -> None:
    with Driver(folder, (*ALL[:2], FakeProcess("decode-0", ("--crash-s", "0.3")))) as driver:
        driver.wait_phase("ready")
        wait_until(lambda: next(p for p in driver.state().processes if p.name == "decode-0").num_restarts >= 5, 20)
        assert driver.process.poll() is None
        assert driver.state().phase == "ready"


def test_a_process_that_keeps_failing_ends_the_start_and_its_last_words_are_shown(folder: Path) -> None:
    failing = FakeProcess("prefill-0", ("--never-ready", "--crash-s", "0.05"))
    with Driver(folder, (*ALL[:3], failing)) as driver:
        code, output = driver.wait()
    assert code == 1
    assert "prefill-0 ended with exit code 7 (start 3)" in output
    assert "I cannot go on: the well is dry" in output
    assert try_read_state(InstancePaths(folder).state_file) is None


def test_wrong_usage_is_not_tried_twice(folder: Path) -> None:
    failing = FakeProcess("prefill-0", ("--never-ready", "--crash-s", "0.05", "--exit-code", "2"))
    with Driver(folder, (*ALL[:1], failing)) as driver:
        code, output = driver.wait()
    assert code == 1
    assert "prefill-0 ended with exit code 2;" in output
    assert "died" not in output


def test_a_stack_that_is_never_ready_says_who_is_late(folder: Path) -> None:
    with Driver(folder, (*ALL[:2], FakeProcess("decode-0", ("--never-ready",))), start_timeout_s=1.0) as driver:
        code, output = driver.wait()
    assert code == 1
    # On a busy machine others may be late too.
    late = [name for name in ("nats", "transfer-0", "decode-0") if f"ready {name} " not in output]
    assert "decode-0" in late
    assert f"not ready within 1 s: {', '.join(late)};" in output


def test_a_start_that_is_broken_off_leaves_nothing(folder: Path) -> None:
    with Driver(folder, (*ALL[:2], FakeProcess("decode-0", ("--never-ready",)))) as driver:
        wait_until(lambda: driver.paths.state_file.exists() and len(driver.pids()) == 3)
        pids = driver.pids()
        driver.signal(signal.SIGINT)
        code, output = driver.wait()
    assert code == 130, output
    assert [name for name, pid in pids.items() if is_alive(pid)] == []


def test_a_second_signal_does_not_wait_for_anybody(folder: Path) -> None:
    deaf = [FakeProcess(p.name, ("--ignore-term",)) for p in ALL]
    with Driver(folder, deaf, grace_s=60.0) as driver:
        driver.wait_phase("ready")
        pids = driver.pids()
        driver.signal(signal.SIGINT)
        driver.wait_phase("stopping")
        driver.signal(signal.SIGINT)
        code, output = driver.wait(timeout_s=30.0)  # half of the grace period
    assert code == 0, output
    assert [name for name, pid in pids.items() if is_alive(pid)] == []


def test_a_deaf_process_is_killed_after_its_grace_period(folder: Path) -> None:
    with Driver(folder, (FakeProcess("gateway-0", ("--ignore-term",)),)) as driver:
        driver.wait_phase("ready")
        pid = driver.pids()["gateway-0"]
        driver.signal(signal.SIGTERM)
        code, output = driver.wait()
    assert code == 0, output
    assert not is_alive(pid)


class ReadyReporter(LineReporter):
    """Sets `is_ready` when the stack is."""

    def __init__(self) -> None:
        self.is_ready = asyncio.Event()

    def stack_ready(self, endpoints: Mapping[str, str], after_s: float) -> None:
        self.is_ready.set()


async def test_a_process_that_not_even_a_kill_ends_keeps_no_other_one_alive(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that waits for a device in the kernel. What is left in the end is killed or named."""
    monkeypatch.setattr("weir.runtime.stack.supervised._KILL_S", 0.1)
    monkeypatch.setattr("weir.runtime.stack.supervisor._STOP_MARGIN_S", 0.5)
    monkeypatch.setattr("weir.runtime.stack.supervisor._LAST_EXITS_S", 0.1)
    monkeypatch.setattr(SupervisedProcess, "kill", lambda _: None)
    started, start = list[StartedProcess](), ProcessStarter.start

    async def kept(starter: ProcessStarter, spec: ProcessSpec, log: int) -> StartedProcess:
        started.append(await start(starter, spec, log))
        return started[-1]

    monkeypatch.setattr(ProcessStarter, "start", kept)
    paths, reporter = InstancePaths(folder), ReadyReporter()
    paths.make()
    specs = [fake_spec(paths, "nats"), fake_spec(paths, "decode-0", "--ignore-term"), fake_spec(paths, "gateway-0")]
    running = asyncio.create_task(Supervisor(fake_plan(paths, specs, grace_s=0.0), reporter, os.environ, FAST).run())
    await asyncio.wait_for(reporter.is_ready.wait(), 20)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, 20)
    assert len(started) == len(specs)
    async with asyncio.timeout(10):  # a killed process takes a moment to go
        await asyncio.gather(*(process.wait() for process in started))


def test_children_outlive_a_killed_supervisor_and_the_next_start_replaces_them(folder: Path) -> None:
    with Driver(folder, ALL) as first:
        first.wait_phase("ready")
        old = first.pids()
        first.signal(signal.SIGKILL)
        first.wait()
        assert all(is_alive(pid) for pid in old.values())

        with Driver(folder, ALL) as second:
            second.wait_phase("ready")
            assert [name for name, pid in old.items() if is_alive(pid)] == []
            assert set(second.pids().values()).isdisjoint(old.values())
            second.signal(signal.SIGTERM)
            _, output = second.wait()
    assert f"leftovers {len(ALL)}" in output


def test_down_leaves_alone_what_another_user_has_put_in_the_place_of_the_segment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, segment = InstancePaths(folder), segment_path(folder.name)
    paths.make()
    segment.write_bytes(b"a trap")
    try:
        with monkeypatch.context() as as_another_user:
            as_another_user.setattr("weir.runtime.stack.leftovers.os.getuid", lambda: os.geteuid() + 1)
            assert asyncio.run(remove_leftovers(paths)).files == ()
        assert segment.exists()
        assert asyncio.run(remove_leftovers(paths)).files == (segment,)
        assert not segment.exists()
    finally:
        segment.unlink(missing_ok=True)


@pytest.mark.parametrize("user", ["transfer service", "worker"])
def test_a_segment_of_the_same_name_that_others_use_stays(folder: Path, tmp_path: Path, user: str) -> None:
    """An instance of that name whose runtime folder is another one: its state and processes are not seen from here."""
    paths, segment = InstancePaths(folder), segment_path(folder.name, tmp_path)
    paths.make()
    used = Segment.create(segment, ArenaGeometry(4096, 4, 2, 64), "digest")
    if user == "worker":
        transfer, used = used, Segment.open(segment)
        transfer.close()
    removed = asyncio.run(remove_leftovers(paths, segment_dir=tmp_path))
    assert (removed.in_use, removed.files, segment.exists()) == ((segment,), (), True)
    used.close()
    del used
    assert asyncio.run(remove_leftovers(paths, segment_dir=tmp_path)).files == (segment,)
    assert not segment.exists()


def test_down_ends_what_a_killed_supervisor_left(folder: Path) -> None:
    with Driver(folder, ALL) as driver:
        driver.wait_phase("ready")
        pids = driver.pids()
        segment = segment_path(folder.name)
        segment.write_bytes(b"pages")
        driver.signal(signal.SIGKILL)
        driver.wait()

        ended = asyncio.run(end_instance(driver.paths, timeout_s=10))

    assert not ended.was_supervised
    assert sorted(ended.leftovers.pids) == sorted(pids.values())
    assert [name for name, pid in pids.items() if is_alive(pid)] == []
    assert not segment.exists()


def test_leftovers_are_found_without_a_state_file(folder: Path) -> None:
    with Driver(folder, ALL) as driver:
        driver.wait_phase("ready")
        pids = driver.pids()
        driver.signal(signal.SIGKILL)
        driver.wait()
        driver.paths.state_file.write_text('{"half": ')

        ended = asyncio.run(end_instance(driver.paths, timeout_s=10))

    assert sorted(ended.leftovers.pids) == sorted(pids.values())


def test_down_ends_a_running_stack_and_then_finds_nothing(folder: Path) -> None:
    with Driver(folder, ALL) as driver:
        driver.wait_phase("ready")
        pids = driver.pids()
        first = asyncio.run(end_instance(driver.paths))
        code, _ = driver.wait()
        second = asyncio.run(end_instance(driver.paths, timeout_s=10))
    assert (first.was_supervised, code) == (True, 0)
    assert [name for name, pid in pids.items() if is_alive(pid)] == []
    assert not second.was_running


def test_down_does_not_wait_for_ever_for_a_supervisor_that_hangs(folder: Path) -> None:
    with Driver(folder, ALL) as driver:
        driver.wait_phase("ready")
        pids = driver.pids()
        driver.signal(signal.SIGSTOP)
        asyncio.run(end_instance(driver.paths, timeout_s=0.5))
        assert driver.wait()[0] == -signal.SIGKILL
    assert [name for name, pid in pids.items() if is_alive(pid)] == []


def test_an_instance_has_one_supervisor(folder: Path) -> None:
    with Driver(folder, ALL[:2]) as first:
        first.wait_phase("ready")
        with Driver(folder, ALL[:2]) as second:
            code, output = second.wait()
        assert code == 1
        assert "already running" in output
        with pytest.raises(InstanceBusy), first.paths.locked():
            pytest.fail("held by two")
        assert first.state().phase == "ready"


def test_two_instances_do_not_meet(folder: Path) -> None:
    other = folder.with_name(f"{folder.name}b")
    with Driver(folder, ALL[:3]) as first, Driver(other, ALL[:3]) as second:
        first.wait_phase("ready")
        second.wait_phase("ready")
        asyncio.run(end_instance(second.paths, timeout_s=10))
        assert second.wait()[0] == 0
        assert all(is_alive(pid) for pid in first.pids().values())
        assert first.state().phase == "ready"
