"""Streams amid faults, from a seed: `python -m tests.chaos.run --minutes 5 --seed 1` (`make chaos MINUTES=5`).

Two of everything that can stand in for each other are killed, restarted, frozen, cut off and left without room, several
at a time, while 64 clients stream. Prints faults by kind and by what the victim was doing, streams, losses, how long
both took to recover, and memory. Ends with 1 if a stream lost or changed a token, a page leaked, a process was above
its bound, or something did not come back. Even seeds leave every prompt to the prefill workers.
"""

import argparse
import asyncio
import contextlib
import shutil
import sys
import tempfile
import time
from pathlib import Path

import grpc
from tests.chaos.driver.faults import Faults
from tests.chaos.driver.kinds import KINDS, Inflicting
from tests.chaos.driver.memory import MemoryWatch
from tests.chaos.driver.report import Outcome, report
from tests.chaos.driver.requests import make_requests
from tests.chaos.driver.stack import ChaosStack
from tests.chaos.driver.traffic import Traffic

from weir.testing.stack import wait_until

NUM_KINDS = 24
MIN_FAULTS = 3
_CLEAN_TIMEOUT_S = 45.0


def open_stack(folder: Path, seed: int) -> ChaosStack:
    return ChaosStack(folder, hands_off=seed % 2 == 0)


def run_chaos(stack: ChaosStack, *, seed: int, duration_s: float, num_clients: int) -> Outcome:
    """Disturbs a running stack for so long, and waits until all is quiet again."""
    faults = Faults(stack, seed)
    log = faults.log
    traffic = Traffic(
        stack.grpc_addresses,
        make_requests(seed, NUM_KINDS),
        seed,
        lambda number, since_s: log.was_disturbed(f"gateway-{number}", since_s),
    )
    memory = MemoryWatch(stack)
    command = f"make chaos MINUTES={duration_s / 60:g} SEED={seed}"
    began_s = time.monotonic()
    asyncio.run(_disturb(traffic, faults, memory, duration_s, num_clients))
    duration_s = time.monotonic() - began_s
    tally = traffic.tally
    problems = [*tally.lost, *tally.wrong, *log.problems, *memory.problems]
    try:
        wait_until(lambda: _leftovers(stack) == "", timeout_s=_CLEAN_TIMEOUT_S, what="nothing is left")
    except TimeoutError as error:
        problems.append(f"{error}: {_leftovers(stack)}")
    inflicting = Inflicting(stack, faults.source)
    not_made = [f"{kind.name}: {why_not}" for kind in KINDS if (why_not := inflicting.why_not(kind))]
    return Outcome(command, duration_s, log, tally, memory.max_mib, problems, not_made)


async def _disturb(traffic: Traffic, faults: Faults, memory: MemoryWatch, duration_s: float, num_clients: int) -> None:
    await traffic.learn()
    watching = asyncio.create_task(memory.run())
    running = asyncio.create_task(traffic.run(num_clients))
    try:
        await faults.run(duration_s, MIN_FAULTS)
    finally:
        traffic.stop()
        await running
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching


def _leftovers(stack: ChaosStack) -> str:
    """What is not as it is in an idle stack; empty: all is."""
    leader = stack.try_find_leader()
    if leader is None:
        return "nobody leads"
    try:
        errors = stack.integrity_errors()
        (transfer,) = [stack.metrics(view) for view in stack.views("transfer")]
        num_in_flight = sum(stack.metrics(view)["requests_in_flight"] for view in stack.views("gateway"))
    except (grpc.RpcError, KeyError) as error:
        return repr(error)
    left = {
        "integrity errors": len(errors),
        "pages": transfer["total_pages"] - transfer["free_pages"] - transfer["cached_pages"],
        "reserved pages": leader["reserved_pages"],
        "queued": leader["queued"],
        "in flight": num_in_flight,
    }
    return ", ".join([*(f"{count:g} {name}" for name, count in left.items() if count), *errors])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--out", type=Path, help="file that gets the report too")
    parser.add_argument("--keep-logs", type=Path, help="folder that gets the logs of all processes")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, open_stack(Path(folder), flags.seed) as stack:
        outcome = run_chaos(stack, seed=flags.seed, duration_s=flags.minutes * 60, num_clients=flags.clients)
        if flags.keep_logs is not None:
            shutil.copytree(stack.folder / "logs", flags.keep_logs, dirs_exist_ok=True)
            shutil.copy(stack.nats.log_path, flags.keep_logs)
    page = report(outcome)
    print(page)
    if flags.out is not None:
        flags.out.write_text(page)
    return 1 if outcome.problems else 0


if __name__ == "__main__":
    sys.exit(main())
