"""What the processes of two hosts say of themselves: is all well, what is left when all is idle, what has crossed."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from tests.hosts.chaos.stack import HostProcess, StackOfHosts

_NUM_PROCESSES = 11
_NUM_WORKERS = 4
_WATCH_S = 0.5
_COUNTED = (
    "remote_prefixes_total",
    "remote_prefixes_failed_total",
    "remote_pages_received_total",
    "remote_pages_sent_total",
    "remote_pages_wrong_total",
    "remote_streams_broken_total",
)
_SETTLED = ("leased_pages", "orphaned_pages", "shared_pages", "remote_pages_reserved", "remote_pages_pinned")


@dataclass(frozen=True)
class Told:
    """By one process."""

    process: HostProcess
    metrics: Mapping[str, float]
    integrity_errors: tuple[str, ...]


class Books:
    def __init__(self, stack: StackOfHosts) -> None:
        self._stack = stack
        self._counted: dict[tuple[str, int, str], dict[str, float]] = defaultdict(dict)
        """By a transfer service's process and incarnation."""

    async def watch(self) -> None:
        """Until cancelled: what a process has counted goes with it."""
        while True:
            await self._all_told()
            await asyncio.sleep(_WATCH_S)

    def crossed(self) -> dict[str, float]:
        """Sums over all incarnations, as of the last look at each."""
        return {name: sum(one.get(name, 0.0) for one in self._counted.values()) for name in _COUNTED}

    async def why_not_well(self) -> str:
        """Empty: every process is ready and answers, and one scheduler leads, which knows all workers."""
        expected = self._stack.processes()
        if len(expected) < _NUM_PROCESSES:
            return f"{len(expected)} of {_NUM_PROCESSES} processes"
        unready = [process.name for process in expected if not process.is_ready]
        if unready:
            return f"not ready: {', '.join(unready)}"
        told = await self._all_told()
        silent = {process.name for process in expected if process.state.role != "nats"} - {
            one.process.name for one in told
        }
        if silent:
            return f"no answer of {', '.join(sorted(silent))}"
        leaders = [one.metrics for one in told if one.metrics.get("is_leader")]
        if len(leaders) != 1:
            return f"{len(leaders)} schedulers lead"
        if leaders[0]["workers"] != _NUM_WORKERS or leaders[0].get("workers_drained"):
            return f"the leader knows {leaders[0]['workers']:g} of {_NUM_WORKERS} workers"
        return ""

    async def integrity_errors(self) -> list[str]:
        return [f"{one.process.name}: {error}" for one in await self._all_told() for error in one.integrity_errors]

    async def leftovers(self) -> str:
        """What is not as it is in an idle stack; empty: all is. For when nobody asks for anything."""
        why = await self.why_not_well()
        if why:
            return why
        left = []
        for one in await self._all_told():
            figures = one.metrics
            if one.process.state.role == "transfer":
                found = {name: figures[name] for name in _SETTLED}
                found["lost pages"] = figures["total_pages"] - figures["free_pages"] - figures["cached_pages"]
                found["pending prefixes"] = figures["prefix_pending"]
            elif one.process.state.role == "gateway":
                found = {"requests in flight": figures["requests_in_flight"]}
            elif figures.get("is_leader"):
                found = {name: figures[name] for name in ("reserved_pages", "queued")}
            else:
                found = {}
            left += [f"{count:g} {name} at {one.process.name}" for name, count in found.items() if count]
            left += [f"{one.process.name}: {error}" for error in one.integrity_errors]
        return ", ".join(left)

    async def _all_told(self) -> list[Told]:
        processes = [process for process in self._stack.processes() if process.state.role != "nats"]
        answers = await asyncio.gather(*(self._stack.try_describe(process) for process in processes))
        told = [
            Told(process, dict(answer.metrics), tuple(answer.integrity_errors))
            for process, answer in zip(processes, answers, strict=True)
            if answer is not None
        ]
        for one in told:
            if one.process.state.role == "transfer":
                key = (one.process.name, one.process.pid, str(one.process.state.started_at))
                self._counted[key] = {name: one.metrics[name] for name in _COUNTED if name in one.metrics}
        return told
