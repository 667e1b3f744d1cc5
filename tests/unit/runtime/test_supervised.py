"""One supervised process: its log, and what a machine refuses it: a process, a descriptor, room on the disk."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.runtime.services import kill_all
from tests.unit.runtime.stacks import FAST, fake_spec

from weir.runtime.stack.paths import InstancePaths
from weir.runtime.stack.starter import ProcessStarter
from weir.runtime.stack.supervised import (
    ProcessFailed,
    StartPolicy,
    SupervisedProcess,
    last_lines,
    open_for_child,
    rotate,
    trim,
)


class Watched:
    """A supervised fake process, the phases it went through, and the troubles that were told."""

    def __init__(self, folder: Path, policy: StartPolicy = FAST) -> None:
        paths = InstancePaths(folder)
        paths.make()
        self.phases: list[str] = []
        self.start_errors: list[str] = []
        self.troubles: list[str] = []
        spec = fake_spec(paths, "decode-0")
        self.process = SupervisedProcess(spec, policy, ProcessStarter(os.environ), self._on_change, self._on_trouble)

    def _on_change(self, process: SupervisedProcess) -> None:
        self.phases.append(process.state.phase)
        if process.state.phase == "restarting" and process.start_error is not None:
            self.start_errors.append(str(process.start_error))

    def _on_trouble(self, what: str, error: Exception) -> None:
        self.troubles.append(f"{what}: {error}")

    async def wait_ready(self) -> None:
        await asyncio.wait_for(self.process.ready.wait(), 20)


@asynccontextmanager
async def running(folder: Path, policy: StartPolicy = FAST) -> AsyncIterator[tuple[Watched, "asyncio.Task[None]"]]:
    watched = Watched(folder, policy)
    run = asyncio.create_task(watched.process.run())
    try:
        yield watched, run
        await watched.process.stop(5)
        await asyncio.wait_for(run, 10)
    finally:
        run.cancel()
        kill_all(folder)


async def until(holds: Callable[[], bool], run: "asyncio.Task[None]") -> None:
    async with asyncio.timeout(20):
        while not holds():
            assert not run.done(), run.exception()
            await asyncio.sleep(0.01)


class Refusal:
    """Stands before a function: raises as long as there are errors left, then lets calls through."""

    def __init__(self, real: Any, *errors: Exception) -> None:
        self._real = real
        self.errors = list(errors)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.errors:
            raise self.errors.pop(0)
        return self._real(*args, **kwargs)


@pytest.mark.parametrize(("healthy_s", "starts_at_once"), [(0.0, True), (600.0, False)])
async def test_one_that_was_ready_for_long_enough_starts_again_at_once(
    tmp_path: Path, healthy_s: float, starts_at_once: bool
) -> None:
    policy = replace(FAST, first_backoff_s=60.0, max_backoff_s=60.0, healthy_s=healthy_s)
    async with running(tmp_path / "i", policy) as (watched, run):
        await watched.wait_ready()
        watched.process.restart_for_ever()
        watched.process.kill()
        await until(lambda: "restarting" in watched.phases, run)
        if starts_at_once:
            await watched.wait_ready()
        else:
            await asyncio.sleep(0.3)
        assert watched.process.state.num_restarts == int(starts_at_once)


@pytest.mark.parametrize(
    "error",
    [
        BlockingIOError(errno.EAGAIN, "no process"),
        OSError(errno.EMFILE, "no descriptor"),
        RuntimeError("can't start new thread"),
    ],
    ids=["EAGAIN", "EMFILE", "thread"],
)
async def test_a_start_that_the_machine_refuses_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async with running(tmp_path / "i") as (watched, run):
        await watched.wait_ready()
        watched.process.restart_for_ever()
        refusal = Refusal(asyncio.create_subprocess_exec, *[error] * 4)  # more than a start of the stack may fail
        monkeypatch.setattr("asyncio.create_subprocess_exec", refusal)
        watched.process.kill()
        await until(lambda: watched.phases.count("ready") == 2, run)
        assert watched.start_errors == [str(error)] * 4
        assert watched.process.state.num_restarts == 5


async def test_starts_that_are_refused_before_the_stack_was_ready_end_it_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = Refusal(asyncio.create_subprocess_exec, *[OSError(errno.ENOMEM, "no memory")] * 3)
    monkeypatch.setattr("asyncio.create_subprocess_exec", refusal)
    watched = Watched(tmp_path / "i")
    with pytest.raises(ProcessFailed, match=r"decode-0 could not be started \(start 3\): \[Errno 12\] no memory"):
        await asyncio.wait_for(watched.process.run(), 10)
    assert refusal.errors == []


async def test_a_log_that_cannot_be_kept_small_is_told_once_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Refusal(None, *[OSError(errno.ENOSPC, "no room")] * 1000)
    monkeypatch.setattr("weir.runtime.stack.supervised.trim", full)
    async with running(tmp_path / "i") as (watched, run):
        await watched.wait_ready()
        await until(lambda: len(full.errors) <= 997, run)
        watched.process.kill()  # what the watching task failed with would end `run` here
        await until(lambda: watched.phases.count("ready") == 2, run)
        await until(lambda: len(full.errors) <= 995, run)
    assert len(watched.troubles) == 1
    assert watched.troubles[0].endswith("decode-0.log cannot be kept small: [Errno 28] no room")


async def test_a_probe_that_has_no_descriptor_asks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = Refusal(Path.read_text, *[OSError(errno.EMFILE, "no descriptor")] * 4)

    def read_text(path: Path, *args: Any, **kwargs: Any) -> Any:
        return refusal(path, *args, **kwargs)

    # The first of these calls reads when the process began; the others are the probe's.
    monkeypatch.setattr(Path, "read_text", read_text)
    async with running(tmp_path / "i") as (watched, _):
        await watched.wait_ready()
        assert watched.process.state.phase == "ready"
    assert [trouble.partition(":")[0] for trouble in watched.troubles] == [
        "decode-0",
        "decode-0 cannot be asked whether it is ready",
    ]


def test_a_log_that_is_too_long_is_emptied_under_its_writer(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    log = open_for_child(path)
    os.write(log, b"x" * 100 + b"\n")
    assert not trim(path, 101)
    assert trim(path, 100)
    os.write(log, b"after\n")
    os.close(log)
    assert path.read_bytes() == b"after\n"
    assert (tmp_path / "a.log.1").read_bytes() == b"x" * 100 + b"\n"
    assert not trim(tmp_path / "none.log", 0)


def test_the_log_of_the_last_start_is_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    rotate(path)
    path.write_text("first")
    rotate(path)
    assert not path.exists()
    assert (tmp_path / "a.log.1").read_text() == "first"


def test_last_lines_are_the_last_ones_whatever_bytes_they_are(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"".join(b"line %d\n" % number for number in range(5000)) + b"\xff\xfe\n")
    assert last_lines(path, 3) == ["line 4998", "line 4999", "\ufffd\ufffd"]
    assert last_lines(tmp_path / "none.log") == []
