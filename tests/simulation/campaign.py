"""Many seeds on all cores, the story of one that failed, and a smaller world in which it fails too."""

import gc
import itertools
import multiprocessing
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from tests.simulation.faults import CLIENT_KINDS, FAULTS, RATE_KINDS
from tests.simulation.mutants import MUTANTS
from tests.simulation.plan import Plan, Result
from tests.simulation.run import run_seed

_WORLDS_AT_A_TIME = 5
_LAST_LINES = 120
_EVENTS_BEHIND = 12
"""Behind the last page that came: what was reserved becomes cached, and the offer ends."""


def can_replay() -> bool:
    """Sets of names are walked in the order of their hashes: the same in each run only if that is fixed."""
    return os.environ.get("PYTHONHASHSEED") == "0"


def run_seeds(
    seeds: Sequence[int], num_processes: int, until: Callable[[], bool] = lambda: False, mutant: str = ""
) -> Iterator[Result]:
    """In processes of their own, in which hashes are fixed; in the order in which they end. No new ones are begun once
    `until` holds. `mutant`: with this defect (`tests.simulation.mutants`)."""
    return _run_plans((Plan(seed, mutant=mutant) for seed in seeds), num_processes, until)


def run_cuts(seed: int, roles: Sequence[str], num_processes: int) -> Iterator[Result]:
    """A small world for each write into the segment that the first process of each role makes where it does not die."""
    (undisturbed,) = _run_plans(iter([Plan(seed, cut=("", 0))]), 1)
    assert not undisturbed.broken, tell(undisturbed)
    assert undisturbed.ends.keys() == {"FINISHED"}, undisturbed.ends
    cuts = [(role, write) for role in roles for write in range(1, undisturbed.num_writes[role] + 1)]
    yield from _run_plans((Plan(seed, cut=cut) for cut in cuts), num_processes)


def run_crossings(seed: int, roles: Sequence[str], num_processes: int, every: int = 1) -> Iterator[Result]:
    """A small world for each event (or each `every`-th) of both sides of what crosses between two hosts, from its begin
    until the last page has come and some more, in which each role of `roles` dies after it."""
    undisturbed = list(_run_plans((Plan(seed, cut=(role, 0)) for role in roles), 1))
    for result in undisturbed:
        assert not result.broken, tell(result)
        assert result.ends.keys() == {"FINISHED"}, result.ends
    cuts = [
        (result.plan.cut[0], num_events)
        for result in undisturbed
        if result.plan.cut is not None
        for num_events in range(1, result.num_writes[result.plan.cut[0]] + _EVENTS_BEHIND, every)
    ]
    yield from _run_plans((Plan(seed, cut=cut) for cut in cuts), num_processes)


def _run_plans(
    plans: Iterator[Plan], num_processes: int, until: Callable[[], bool] = lambda: False
) -> Iterator[Result]:
    with _hashes_fixed():
        pool = ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn"))
        running: set[Future[list[Result]]] = set()
        try:
            while True:
                while len(running) < num_processes and not until():
                    some = list(itertools.islice(plans, _WORLDS_AT_A_TIME))
                    if not some:
                        break
                    running.add(pool.submit(_run_all, some))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield from future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def run_for(seeds: Sequence[int], num_processes: int, seconds: float) -> Iterator[Result]:
    """As many as fit into the time."""
    ends_at_s = time.monotonic() + seconds
    return run_seeds(seeds, num_processes, lambda: time.monotonic() > ends_at_s)


def _run_all(plans: Sequence[Plan]) -> list[Result]:
    gc.freeze()  # each world collects garbage, thrice: what was imported is none, and would be looked through each time
    return [run_plan(plan) for plan in plans]


def run_plan(plan: Plan) -> Result:
    """Its world, with its defect. The same one again needs `can_replay`."""
    with MUTANTS[plan.mutant].put_in() if plan.mutant else nullcontext():
        return run_seed(plan)


@contextmanager
def _hashes_fixed() -> Iterator[None]:
    before = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONHASHSEED"]
        else:
            os.environ["PYTHONHASHSEED"] = before


def try_find(mutant: str, first: int, max_worlds: int, num_processes: int) -> tuple[int, str] | None:
    """How many worlds it took until one showed the defect, and what was broken."""
    numbers, defect = range(first, first + max_worlds), MUTANTS[mutant]
    plans = (
        Plan(number, cut=(defect.cut_role, number) if defect.cut_role else None, mutant=mutant) for number in numbers
    )
    for num_worlds, result in enumerate(_run_plans(plans, num_processes), 1):
        if defect.shown_by in result.broken:
            return num_worlds, result.broken
    return None


def tell(result: Result) -> str:
    """The story of a world."""
    plan = result.plan
    again = [f"--replay {plan.seed}"]
    if plan.cut is not None:
        again.append(f"--cut {plan.cut[0]}:{plan.cut[1]}")
    if plan.mutant:
        again.append(f"--mutant {shlex.quote(plan.mutant)}")
    if plan.mix is not None:
        again.append("--shrink")
    lines = [
        f"seed {plan.seed} at commit {_commit()}: {result.broken or 'every promise was kept'}",
        f"  what could go wrong: {', '.join(result.mix)}",
        f"  {result.num_requests} requests, {result.num_events} events, {result.num_faults} faults, "
        f"{result.virtual_s:.1f} s; ends: {result.ends}",
        f"  what went wrong: {', '.join(f'{kind} {count}' for kind, count in sorted(result.struck.items()))}",
        *(f"  {line}" for line in result.story[-_LAST_LINES:]),
        f"  again: python -m tests.simulation {' '.join(again)}",
    ]
    return "\n".join(lines)


def shrink(plan: Plan) -> tuple[Plan, Result]:
    """Leaves kinds of faults out, then requests, as long as a promise is still broken. Needs `can_replay`."""
    result = run_plan(plan)
    kinds = [kind for kind in sorted((*FAULTS, *CLIENT_KINDS, *RATE_KINDS)) if kind in result.mix]
    plan = replace(plan, mix=frozenset(kinds))
    for kind in kinds:
        smaller = replace(plan, mix=(plan.mix or frozenset()) - {kind})
        plan, result = _smaller_if_broken(plan, result, smaller)
    for max_requests in (1, 2, 4, 8):
        smaller = replace(plan, max_requests=max_requests)
        found, result = _smaller_if_broken(plan, result, smaller)
        if found is smaller:
            return found, result
    return plan, result


def _smaller_if_broken(plan: Plan, result: Result, smaller: Plan) -> tuple[Plan, Result]:
    tried = run_plan(smaller)
    return (smaller, tried) if tried.broken else (plan, result)


def _commit() -> str:
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short=10", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.strip()
