"""Two hosts amid faults, from a seed, as root: `python -m tests.hosts.chaos --seed 1 --faults 200`.

In rounds: clients ask for answers to prompts of a few long beginnings, so that pages cross all the time, while one to
three faults happen; then all must be well, every stream ended with the tokens that it has undisturbed, and no page left
in either arena. Ends with 1, and the story of the round, where it is not so; or where too few prefixes have crossed.
"""

import argparse
import asyncio
import contextlib
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.driver.faults import Fault as MadeFault
from tests.chaos.driver.faults import FaultLog
from tests.chaos.driver.report import fault_table, quantiles, titled_list
from tests.chaos.driver.traffic import Traffic
from tests.hosts.chaos.books import Books
from tests.hosts.chaos.kinds import Fault, FaultMaker
from tests.hosts.chaos.stack import INSTANCE, StackOfHosts, open_hosts

from weir.testing.load import greedy_request
from weir.wire.v1 import inference_pb2

NUM_PREFIXES, NUM_TAILS = 20, 2
PREFIX_TOKENS = 448
_MAX_FAULTS_A_ROUND = 3
_ONCE_A_ROUND = ("power loss", "drain")
_SPREAD_S = 2.0
_LEAST_S = 3.0
"""Of a round."""
_WELL_TIMEOUT_S = 120.0
_ENDED_TIMEOUT_S = 260.0
_IDLE_TIMEOUT_S = 45.0
_POLL_S = 0.3
_LEAST_CROSSED_SHARE = 0.5
"""Prefixes that crossed, for each fault."""


@dataclass
class Outcome:
    duration_s: float = 0.0
    problems: list[str] = field(default_factory=list)
    rounds: list[str] = field(default_factory=list)
    """The story of each."""


class Rounds:
    """Of a stack that runs."""

    def __init__(self, stack: StackOfHosts, seed: int, num_clients: int) -> None:
        self._num_clients = num_clients
        self._source = random.Random(seed)
        self._making = FaultMaker(stack, self._source)
        self._gateways = [host.name for host in stack.pair]
        self._began_s = time.monotonic()
        self.log = FaultLog()
        self.books = Books(stack)
        self.traffic = Traffic(stack.gateways, make_requests(seed), seed, self._was_disturbed)
        self.outcome = Outcome()

    async def run(self, num_faults: int) -> None:
        """Until so many faults were made, or something is not as it must be."""
        await self.traffic.learn()
        watching = asyncio.create_task(self.books.watch())
        try:
            while len(self.log.faults) < num_faults and not self.outcome.problems:
                await self._round(min(_MAX_FAULTS_A_ROUND, num_faults - len(self.log.faults)))
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
            self.outcome.duration_s = time.monotonic() - self._began_s

    async def _round(self, max_faults: int) -> None:
        began_s, num_streams = time.monotonic(), self.traffic.tally.num_streams
        story = [f"round {len(self.outcome.rounds) + 1} at {began_s - self._began_s:.1f} s"]
        asking = asyncio.create_task(self.traffic.run(self._num_clients))
        try:
            faults = self._choose(self._source.randint(1, max_faults))
            await asyncio.gather(*(self._disturb(fault, story) for fault in faults))
            await asyncio.sleep(max(0.0, began_s + _LEAST_S - time.monotonic()))
        finally:
            self.traffic.stop()
            _, unended = await asyncio.wait([asking], timeout=_ENDED_TIMEOUT_S)
        if unended:
            asking.cancel()
            self.outcome.problems.append(f"streams had not ended after {_ENDED_TIMEOUT_S:g} s")
        else:
            asking.result()
        left = await _wait_empty(self.books.leftovers, _IDLE_TIMEOUT_S)
        if left:
            self.outcome.problems.append(f"not idle after {_IDLE_TIMEOUT_S:g} s: {left}")
        tally = self.traffic.tally
        self.outcome.problems += [*tally.lost, *tally.wrong, *self.log.problems]
        story.append(f"{tally.num_streams - num_streams} streams ended; {self.books.crossed()}")
        self.outcome.rounds.append("\n  ".join(story))
        sys.stderr.write(f"{self.outcome.rounds[-1]}\n")

    def _choose(self, num_faults: int) -> list[Fault]:
        faults: list[Fault] = []
        while len(faults) < num_faults:
            fault = self._making.choose()
            if fault.kind not in _ONCE_A_ROUND or all(other.kind not in _ONCE_A_ROUND for other in faults):
                faults.append(fault)
        return faults

    async def _disturb(self, fault: Fault, story: list[str]) -> None:
        await asyncio.sleep(self._source.uniform(0.0, _SPREAD_S))
        began_s = time.monotonic()
        while_it_lasts = [began_s, float("inf")]
        for name in fault.victims:
            self.log.disturbed.setdefault(name, []).append(while_it_lasts)
        is_made = await asyncio.to_thread(fault.inflict)
        why = await _wait_empty(self.books.why_not_well, _WELL_TIMEOUT_S)
        errors = await self.books.integrity_errors()
        ended_s = while_it_lasts[1] = time.monotonic()
        story.append(
            f"{began_s - self._began_s:.1f} to {ended_s - self._began_s:.1f} s: {fault.kind}, {fault.doing}"
            f" {fault.victims or ''}{'' if is_made else ' (could not be made)'}"
        )
        if why or errors:
            self.log.problems.append(f"{_WELL_TIMEOUT_S:g} s after {fault.kind} ({fault.doing}): {why} {errors}")
        elif is_made:
            self.log.faults.append(MadeFault(fault.kind, "", fault.doing, ended_s - began_s))

    def _was_disturbed(self, gateway: int, since_s: float) -> bool:
        return self.log.was_disturbed(self._gateways[gateway], since_s)


def make_requests(seed: int) -> list[inference_pb2.GenerateRequest]:
    """Of a few long beginnings; greedy and seeded ones."""
    source = random.Random(seed)
    requests: list[inference_pb2.GenerateRequest] = []
    for _ in range(NUM_PREFIXES):
        prefix = [source.randrange(100, 40_000) for _ in range(PREFIX_TOKENS)]
        for tail in range(NUM_TAILS):
            end = [source.randrange(100, 40_000) for _ in range(source.randrange(5, 25))]
            request = greedy_request([*prefix, *end], max_tokens=source.choice([4, 12, 40]), ignore_eos=True)
            if tail % 2:
                sampling = request.options.sampling
                sampling.temperature, sampling.seed, sampling.top_p = 0.9, len(requests), 0.95
            requests.append(request)
    return requests


async def _wait_empty(look: Callable[[], Awaitable[str]], timeout_s: float) -> str:
    """What it found last; empty as soon as it finds nothing."""
    ends_at_s = time.monotonic() + timeout_s
    while (found := await look()) and time.monotonic() < ends_at_s:  # noqa: ASYNC110 - other processes do not tell
        await asyncio.sleep(_POLL_S)
    return found


def report(rounds: Rounds, command: str) -> str:
    """Markdown."""
    tally, faults, outcome = rounds.traffic.tally, rounds.log.faults, rounds.outcome
    crossed = rounds.books.crossed()
    lines = [
        f"# Two hosts amid faults: `{command}`",
        "",
        f"{outcome.duration_s / 60:.1f} minutes, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}.",
        "",
        f"- **{len(faults)} faults** in {len(outcome.rounds)} rounds; all was well again after"
        f" {quantiles([fault.recovery_s for fault in faults])}",
        f"- **{tally.num_streams} streams** with {tally.num_tokens} tokens; longest pause {quantiles(tally.pauses_s)}",
        f"- **{len(tally.lost)} lost, {len(tally.wrong)} wrong**, {len(outcome.problems)} problems in all;"
        f" {tally.num_cancelled} cancelled, {tally.num_resumed} gone on with at another gateway,"
        f" {tally.num_ended_with_gateway} ended with theirs, {sum(tally.refusals.values())} refused before a token",
        *(f"- {name}: {value:g}" for name, value in crossed.items()),
        "",
        *fault_table(rounds.log),
        *titled_list("Refused with", [f"{count}: {reason}" for reason, count in tally.refusals.most_common(8)]),
        *titled_list("Problems", outcome.problems),
    ]
    if outcome.problems:
        lines += ["", "The last rounds:", "", *outcome.rounds[-3:]]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--keep-logs", type=Path, help="folder that gets the logs of all processes")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, open_hosts(Path(folder)) as stack:
        rounds = Rounds(stack, flags.seed, flags.clients)
        asyncio.run(rounds.run(flags.faults))
        if flags.keep_logs is not None:
            for host in stack.hosts:
                kept = flags.keep_logs / host.name
                shutil.copytree(host.files / f"run/weir/{INSTANCE}/logs", kept, dirs_exist_ok=True)
                shutil.copy(host.disk / "host.log", kept)
    crossed = rounds.books.crossed()
    num_whole = crossed["remote_prefixes_total"] - crossed["remote_prefixes_failed_total"]
    if num_whole < _LEAST_CROSSED_SHARE * flags.faults:
        rounds.outcome.problems.append(f"only {num_whole:g} prefixes crossed whole")
    sys.stdout.write(report(rounds, f"python -m tests.hosts.chaos --seed {flags.seed} --faults {flags.faults}"))
    return 1 if rounds.outcome.problems else 0


if __name__ == "__main__":
    sys.exit(main())
