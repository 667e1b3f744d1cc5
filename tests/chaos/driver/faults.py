"""Faults from a seed: of each role one victim at a time, of several roles at once."""

import asyncio
import random
import time
from dataclasses import dataclass, field

import grpc
from tests.chaos.driver.kinds import FILES, Inflicting, Kind
from tests.chaos.driver.stack import ChaosStack

from weir.testing.stack import ProcessView

RECOVERY_TIMEOUT_S = 90.0
MAX_AT_ONCE = 3
MEAN_PAUSES_S = {
    "decode": 14.0,
    "gateway": 17.0,
    "prefill": 20.0,
    "scheduler": 22.0,
    "transfer": 30.0,
    "nats": 40.0,
    FILES: 45.0,
}
"""From one fault of a role until its next victim is sought: seconds, half as many to half as many more."""
_POLL_S = 0.1
_CLOSING_S = 1.0
"""What a gateway's death does may be seen a little later than it comes."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One that is over. `recovery_s`: from its beginning until the victim, or who took its place, was ready."""

    kind: str
    role: str
    doing: str
    recovery_s: float


@dataclass
class FaultLog:
    """`problems`: victims that did not come back."""

    faults: list[Fault] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    disturbed: dict[str, list[list[float]]] = field(default_factory=dict)
    """By name: from when to when, inf while it lasts."""

    def was_disturbed(self, name: str, since_s: float) -> bool:
        return any(ended_s + _CLOSING_S >= since_s for _, ended_s in self.disturbed.get(name, []))


class Faults:
    """`run` goes on for so long, and longer until there were `min_faults`."""

    def __init__(self, stack: ChaosStack, seed: int) -> None:
        self._stack = stack
        self._seed = seed
        self._at_once = asyncio.Semaphore(MAX_AT_ONCE)
        self.source = random.Random(seed)
        self.log = FaultLog()

    async def run(self, duration_s: float, min_faults: int) -> None:
        ends_at_s = time.monotonic() + duration_s
        stopping = asyncio.Event()
        roles = [asyncio.create_task(self._haunt(role, stopping)) for role in MEAN_PAUSES_S]
        while time.monotonic() < ends_at_s or len(self.log.faults) < min_faults:
            await asyncio.sleep(_POLL_S)
            self._stack.worker_relays.check()
            for failed in (role for role in roles if role.done()):
                failed.result()
        stopping.set()
        await asyncio.gather(*roles)

    async def _haunt(self, role: str, stopping: asyncio.Event) -> None:
        source = random.Random(f"{self._seed} {role}")
        inflicting = Inflicting(self._stack, source)
        kinds = inflicting.kinds_of(role)
        pause_s = source.uniform(0.5, 0.5 * MEAN_PAUSES_S[role])
        while kinds and not await _is_set_within(stopping, pause_s):
            async with self._at_once:
                if not stopping.is_set():
                    await self._disturb(role, source.choice(kinds), inflicting, source)
            pause_s = source.uniform(0.5, 1.5) * MEAN_PAUSES_S[role]

    async def _disturb(self, role: str, kind: Kind, inflicting: Inflicting, source: random.Random) -> None:
        victim, doing = await asyncio.to_thread(self._choose, role, source)
        if victim is None:
            return
        began_s = time.monotonic()
        while_it_lasts = [began_s, float("inf")]
        self.log.disturbed.setdefault(victim.name, []).append(while_it_lasts)
        await inflicting.inflict(kind, victim)
        is_back = await self._wait_back(victim, has_died=kind.has_died)
        while_it_lasts[1] = time.monotonic()
        if is_back:
            self.log.faults.append(Fault(kind.name, role, doing, time.monotonic() - began_s))
        else:
            now = "; ".join(str(view) for view in self._stack.views(victim.role))
            said = self._stack.last_lines(victim.name)
            self.log.problems.append(
                f"{victim.name} (process {victim.pid}) was not back {RECOVERY_TIMEOUT_S:g} s after {kind.name};"
                f" there is {now}; its log ends with {said}"
            )

    def _choose(self, role: str, source: random.Random) -> tuple[ProcessView | None, str]:
        """The busiest of a role, but for every fourth time; None while one of them is not ready, by another's fault."""
        if role == FILES:
            return ProcessView(FILES, FILES, 0, "", "ready", 0), "in use"
        views = self._stack.views(role)
        if any(view.state != "ready" for view in views):
            return None, ""
        source.shuffle(views)
        found = [(view, *self._look(view)) for view in views]
        victim, _, doing = found[0] if source.random() < 0.25 else max(found, key=lambda entry: entry[1])
        return victim, doing

    def _look(self, view: ProcessView) -> tuple[float, str]:
        """(how busy it is, what it does)"""
        if view.role == "nats":
            return 1.0, "serving"
        try:
            metrics = self._stack.metrics(view)
        except grpc.RpcError:
            return 0.0, "not answering"
        return describe_work(view.role, metrics)

    async def _wait_back(self, victim: ProcessView, *, has_died: bool) -> bool:
        ends_at_s = time.monotonic() + RECOVERY_TIMEOUT_S
        while time.monotonic() < ends_at_s:
            if await asyncio.to_thread(self._is_back, victim, has_died=has_died):
                return True
            await asyncio.sleep(_POLL_S)
        return False

    def _is_back(self, victim: ProcessView, *, has_died: bool) -> bool:
        """It is ready, answers on a new connection, and somebody leads where that depends on it."""
        try:
            for now in self._stack.views("" if victim.role == FILES else victim.role):
                if victim.role != FILES and now.name != victim.name:
                    continue
                if now.state != "ready" or (has_died and now.pid == victim.pid):
                    return False
                if now.role != "nats":
                    self._stack.metrics(now)
        except grpc.RpcError:
            return False
        needs_leader = victim.role in ("scheduler", "nats", FILES)
        return not needs_leader or self._stack.try_find_leader() is not None


def describe_work(role: str, metrics: dict[str, float]) -> tuple[float, str]:
    """(how busy, in words) by what a process reports."""
    num = {name: metrics.get(name, 0.0) for name in ("num_running", "num_waiting", "granted", "queued")}
    if role in ("decode", "prefill"):
        busy = num["num_running"] + num["num_waiting"]
        return busy, {"decode": "decoding", "prefill": "prefilling"}[role] if busy else "idle"
    if role == "scheduler":
        if not metrics.get("is_leader"):
            return 0.0, "standing by"
        return 1.0 + num["queued"], "leading, with a queue" if num["queued"] else "leading"
    if role == "gateway":
        busy = metrics.get("requests_in_flight", 0.0)
        return busy, "serving" if busy else "idle"
    busy = metrics.get("leased_pages", 0.0)
    return busy, "pages in use" if busy else "idle"


async def _is_set_within(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return False
    return True
