"""Processes that are not this one's children: who they are, whether they live, and signals that hit no other."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from weir.core.clock import SystemClock
from weir.core.process import ProcessIdentity, try_read_start_ticks

_FOLDER_VARIABLE = "WEIR_SUPERVISED_IN"
_SUPERVISOR_VARIABLE = "WEIR_SUPERVISED_BY"

_POLL_S = 0.02


def try_identify(pid: int) -> ProcessIdentity | None:
    """Who has this pid now; None if nobody."""
    start_ticks = try_read_start_ticks(pid)
    return None if start_ticks is None else ProcessIdentity(pid, start_ticks)


def is_running(identity: ProcessIdentity) -> bool:
    """False for a zombie (it does nothing any more) and for another process that was given the same pid."""
    try:
        stat = Path(f"/proc/{identity.pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    fields = stat[stat.rindex(")") + 2 :].split()
    return fields[0] not in "ZX" and int(fields[19]) == identity.start_ticks


def send_signal(identity: ProcessIdentity, number: signal.Signals) -> bool:
    """Signals exactly this process, never a later owner of its pid. False if it is gone."""
    try:
        descriptor = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return False
    try:
        # The descriptor pins whoever has the pid now; only then does comparing the start time settle who that is.
        if not is_running(identity):
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, number)
        return True
    finally:
        os.close(descriptor)


async def end_processes(identities: Iterable[ProcessIdentity], *, term_s: float, kill_s: float) -> list[int]:
    """SIGTERM to all, SIGKILL after `term_s`; returns the pids that are still there `kill_s` later."""
    left = [identity for identity in identities if send_signal(identity, signal.SIGTERM)]
    left = await _wait_gone(left, term_s)
    left = [identity for identity in left if send_signal(identity, signal.SIGKILL)]
    return [identity.pid for identity in await _wait_gone(left, kill_s)]


async def _wait_gone(identities: list[ProcessIdentity], limit_s: float) -> list[ProcessIdentity]:
    clock = SystemClock()
    deadline_s = clock.now_s() + limit_s
    left = identities
    # Polled: the exit of a process that is not a child wakes nobody.
    while (left := [identity for identity in left if is_running(identity)]) and clock.now_s() < deadline_s:  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)
    return left


@dataclass(frozen=True, slots=True)
class Tagged:
    """A process that was started for the instance in `folder`. Its supervisor may be gone."""

    identity: ProcessIdentity
    folder: Path
    supervisor: ProcessIdentity | None


def tag(folder: Path, supervisor: ProcessIdentity) -> dict[str, str]:
    """For the environment of every process of an instance, to be found by when nothing else is left of it."""
    return {_FOLDER_VARIABLE: str(folder), _SUPERVISOR_VARIABLE: f"{supervisor.pid}:{supervisor.start_ticks}"}


def find_tagged(folder: Path) -> list[Tagged]:
    """Processes of this user that were started for the instance in `folder`, however they are recorded."""
    return [tagged for tagged in all_tagged() if tagged.folder == folder]


def all_tagged() -> Iterator[Tagged]:
    """Processes of this user that were started for any instance."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            # Read before the environment: a pid that changes hands in between is then not taken for the tagged one.
            identity = try_identify(int(entry.name))
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # gone meanwhile, or somebody else's
            continue
        tags = {name: value for name, _, value in (os.fsdecode(variable).partition("=") for variable in variables)}
        if identity is not None and _FOLDER_VARIABLE in tags:
            yield Tagged(identity, Path(tags[_FOLDER_VARIABLE]), _try_parse(tags.get(_SUPERVISOR_VARIABLE, "")))


def _try_parse(text: str) -> ProcessIdentity | None:
    pid, _, start_ticks = text.partition(":")
    return ProcessIdentity(int(pid), int(start_ticks)) if pid.isdecimal() and start_ticks.isdecimal() else None
