"""Each kind of fault: what it does to its victim, for how long, and how it ends."""

import asyncio
import contextlib
import random
import resource
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.driver.stack import ChaosStack

from weir.testing.stack import ProcessView

CUT_S = (0.5, 2.0, 8.0)
_FREEZE_S = (0.3, 1.0, 4.0)
_FILL_S = (1.0, 3.0)
_NUM_SPARE_DESCRIPTORS = 1
FILES = "files"
"""The role of what is no process: the file systems."""


@dataclass(frozen=True)
class Kind:
    """`has_died`: whether another process is to come in the victim's place."""

    name: str
    roles: Sequence[str]
    weight: int
    has_died: bool = False


_SERVICES = ("decode", "prefill", "transfer", "scheduler", "gateway")
KINDS = (
    Kind("kill", (*_SERVICES, "nats"), 4, has_died=True),
    Kind("restart", (*_SERVICES, "nats"), 2, has_died=True),
    Kind("freeze", (*_SERVICES, "nats"), 2),
    Kind("cut off from NATS", _SERVICES, 2),
    Kind("cut off from gateways", ("decode", "prefill"), 2),
    Kind("descriptors gone", (*_SERVICES, "nats"), 1),
    Kind("/dev/shm full", (FILES,), 2),
    Kind("disk of NATS full", (FILES,), 1),
)


class Inflicting:
    """Does it to one victim. What lasts has ended when the block is left."""

    def __init__(self, stack: ChaosStack, source: random.Random) -> None:
        self._stack = stack
        self._source = source

    def kinds_of(self, role: str) -> list[Kind]:
        """Those that can be made here, the likelier the oftener."""
        return [kind for kind in KINDS for _ in range(kind.weight) if role in kind.roles and not self.why_not(kind)]

    def why_not(self, kind: Kind) -> str:
        """Empty: it can be made here."""
        file_systems = {"/dev/shm full": self._stack.shm, "disk of NATS full": self._stack.store}
        file_system = file_systems.get(kind.name)
        return "" if file_system is None else file_system.why_not

    async def inflict(self, kind: Kind, victim: ProcessView) -> None:
        if kind.name == "kill":
            self._stack.signal(victim, signal.SIGKILL)
        elif kind.name == "restart":
            self._stack.signal(victim, signal.SIGTERM)
        else:
            async with self._holding(kind, victim) as durations_s:
                await asyncio.sleep(self._source.choice(durations_s))
            if kind.name == "disk of NATS full":
                # What an operator does: the server writes no more to a stream whose write has failed once.
                self._stack.signal(self._stack.views("nats")[0], signal.SIGTERM)

    @asynccontextmanager
    async def _holding(self, kind: Kind, victim: ProcessView) -> AsyncIterator[Sequence[float]]:
        stack = self._stack
        if kind.name == "freeze":
            stack.signal(victim, signal.SIGSTOP)
            try:
                yield _FREEZE_S
            finally:
                stack.signal(victim, signal.SIGCONT)
        elif kind.name == "cut off from NATS":
            await asyncio.to_thread(stack.nats_relay.cut_off, victim.pid)
            try:
                yield CUT_S
            finally:
                await asyncio.to_thread(stack.nats_relay.rejoin, victim.pid)
        elif kind.name == "cut off from gateways":
            relay = stack.worker_relays.try_find(victim.pid)
            if relay is None:
                raise RuntimeError(f"no relay stands before {victim.name} at {victim.address}")
            relay.cut()
            try:
                yield CUT_S
            finally:
                with contextlib.suppress(RuntimeError):  # closed, because the worker has gone meanwhile
                    await asyncio.to_thread(relay.restore)
        elif kind.name == "descriptors gone":
            with without_descriptors(victim.pid):
                yield _FILL_S
        else:
            file_system = stack.shm if kind.name == "/dev/shm full" else stack.store
            await asyncio.to_thread(file_system.fill)
            try:
                yield _FILL_S
            finally:
                file_system.free()


@contextlib.contextmanager
def without_descriptors(pid: int) -> Iterator[None]:
    """The process can open hardly anything meanwhile."""
    try:
        num_open = max(int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()) + 1
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(soft, num_open + _NUM_SPARE_DESCRIPTORS), hard))
    except (ProcessLookupError, FileNotFoundError):
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
