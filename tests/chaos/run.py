"""Streams amid faults, from a seed: `python -m tests.chaos.run --minutes 5 --seed 1` (`make chaos MINUTES=5`).

Prints faults by kind and by what the victim was doing, streams, tokens, losses, and how long both took to recover.
Ends with 1 if a stream lost or changed a token, a page leaked, or something did not come back.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
from tests.chaos.faults import FaultLog, Faults
from tests.chaos.traffic import Tally, Traffic, make_requests

from weir.testing.stack import Stack, wait_until

NUM_KINDS = 24
MIN_FAULTS = 3


@dataclass(frozen=True)
class Outcome:
    """`problems`: everything that must not be, in sentences."""

    faults: FaultLog
    tally: Tally
    problems: list[str]


def open_stack(runtime_dir: Path) -> Stack:
    """Two of all that can stand in for each other."""
    return Stack(runtime_dir, num_prefill=2, num_decode=2, flags=("--schedulers", "2"))


def run_chaos(stack: Stack, *, seed: int, duration_s: float, num_clients: int) -> Outcome:
    """Disturbs a running stack for so long, and waits until all is quiet again."""
    traffic = Traffic(stack.grpc_address, make_requests(seed, NUM_KINDS), seed)
    faults = Faults(stack, seed)
    asyncio.run(_disturb(traffic, faults, duration_s, num_clients))
    problems = [*traffic.tally.wrong, *faults.log.problems]
    try:
        wait_until(lambda: _is_clean(stack), timeout_s=30, what="nothing is left")
    except TimeoutError as error:
        problems.append(f"{error}: {_leftovers(stack)}")
    return Outcome(faults.log, traffic.tally, problems)


async def _disturb(traffic: Traffic, faults: Faults, duration_s: float, num_clients: int) -> None:
    await traffic.learn()
    running = asyncio.create_task(traffic.run(num_clients))
    try:
        await faults.run(duration_s, MIN_FAULTS)
    finally:
        traffic.stop()
        await running


def _is_clean(stack: Stack) -> bool:
    return _leftovers(stack) == ""


def _leftovers(stack: Stack) -> str:
    """What is not as it is in an idle stack; empty: all is."""
    try:
        errors = stack.integrity_errors()
        transfer = stack.metrics(stack.processes("transfer")[0])
        schedulers = [stack.metrics(process) for process in stack.processes("scheduler")]
        (scheduler,) = [metrics for metrics in schedulers if metrics["is_leader"]]
        gateway = stack.metrics(stack.processes("gateway")[0])
    except (grpc.RpcError, IndexError, ValueError) as error:
        return repr(error)
    num_leaked = transfer["total_pages"] - transfer["free_pages"] - transfer["cached_pages"]
    left = {
        "integrity errors": len(errors),
        "pages": num_leaked,
        "reserved pages": scheduler["reserved_pages"],
        "queued": scheduler["queued"],
        "in flight": gateway["requests_in_flight"],
    }
    return ", ".join([*(f"{count:g} {name}" for name, count in left.items() if count), *errors])


def report(outcome: Outcome) -> str:
    """For people, and for a results page."""
    tally, faults = outcome.tally, outcome.faults
    lines = [f"{count:5d}  {what}" for what, count in sorted(faults.counts.items())]
    lines += [
        f"{faults.num_faults:5d}  faults; recovered after {_quantiles(faults.recoveries_s)}",
        f"{tally.num_streams:5d}  streams, {tally.num_cancelled} cancelled by their clients, {tally.num_tokens} tokens;"
        f" longest pause of each {_quantiles(tally.pauses_s)}",
        f"{len(tally.wrong):5d}  streams lost or wrong",
    ]
    return "\n".join([*lines, *(f"       {problem}" for problem in outcome.problems)])


def _quantiles(values: Sequence[float]) -> str:
    if len(values) < 2:
        return "-"
    cuts = statistics.quantiles(values, n=100)
    return f"p50 {cuts[49]:.2f} s, p99 {cuts[98]:.2f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=64)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, open_stack(Path(folder)) as stack:
        outcome = run_chaos(stack, seed=flags.seed, duration_s=flags.minutes * 60, num_clients=flags.clients)
    print(report(outcome))
    return 1 if outcome.problems else 0


if __name__ == "__main__":
    sys.exit(main())
