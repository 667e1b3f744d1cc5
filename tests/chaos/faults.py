"""Faults of the processes of a stack, one after another, from a seed: kill -9, SIGTERM, and standing still."""

import asyncio
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field

import grpc

from weir.testing.stack import ProcessView, Stack

RECOVERY_TIMEOUT_S = 90.0
VICTIMS = ("decode", "decode", "decode", "prefill", "prefill", "transfer", "scheduler", "nats")
"""The oftener, the likelier. A gateway takes its streams with it."""
KINDS = ("kill", "kill", "terminate", "freeze")


@dataclass
class FaultLog:
    """`counts`: by kind, role and what the victim was doing."""

    counts: Counter[str] = field(default_factory=Counter)
    recoveries_s: list[float] = field(default_factory=list)
    """From each fault until the victim, or who took its place, was ready again."""
    problems: list[str] = field(default_factory=list)

    @property
    def num_faults(self) -> int:
        return sum(self.counts.values())


class Faults:
    """One at a time: the next comes when the victim of the last is back."""

    def __init__(self, stack: Stack, seed: int) -> None:
        self._stack = stack
        self._source = random.Random(seed)
        self.log = FaultLog()

    async def run(self, duration_s: float, min_faults: int) -> None:
        """For so long, and longer where a slow machine has had fewer faults."""
        ends_at_s = time.monotonic() + duration_s
        while time.monotonic() < ends_at_s or self.log.num_faults < min_faults:
            await asyncio.sleep(self._source.uniform(0.5, 3.0))
            await self._disturb(self._source.choice(KINDS), self._source.choice(VICTIMS))

    async def _disturb(self, kind: str, role: str) -> None:
        victim = self._source.choice(await asyncio.to_thread(self._stack.processes, role))
        doing = await asyncio.to_thread(self._doing, victim)
        self.log.counts[f"{kind} {role} ({doing})"] += 1
        began_s = time.monotonic()
        if kind == "freeze":
            await self._freeze(victim)
        else:
            number = signal.SIGKILL if kind == "kill" else signal.SIGTERM
            self._stack.kill(victim, number)
        await self._wait_back(victim, has_died=kind != "freeze")
        self.log.recoveries_s.append(time.monotonic() - began_s)

    async def _freeze(self, victim: ProcessView) -> None:
        """For less or more than a lease lasts: then it is killed by the transfer service."""
        self._stack.kill(victim, signal.SIGSTOP)
        await asyncio.sleep(self._source.choice([0.3, 1.0, 4.0]))
        try:
            self._stack.kill(victim, signal.SIGCONT)
        except ProcessLookupError:
            return

    async def _wait_back(self, victim: ProcessView, *, has_died: bool) -> None:
        ends_at_s = time.monotonic() + RECOVERY_TIMEOUT_S
        while time.monotonic() < ends_at_s:
            if await asyncio.to_thread(self._is_back, victim, has_died=has_died):
                return
            await asyncio.sleep(0.2)
        self.log.problems.append(f"{victim.name} was not back within {RECOVERY_TIMEOUT_S:g} s")

    def _is_back(self, victim: ProcessView, *, has_died: bool) -> bool:
        now = next(process for process in self._stack.processes(victim.role) if process.name == victim.name)
        return now.state == "ready" and (now.pid != victim.pid or not has_died)

    def _doing(self, victim: ProcessView) -> str:
        if victim.role == "nats":
            return "serving"
        try:
            metrics = self._stack.metrics(victim)
        except grpc.RpcError:
            return "not answering"
        num = {name: metrics.get(name, 0) for name in ("num_running", "num_waiting", "queued", "granted", "leases")}
        return "busy" if any(num.values()) else "idle"
