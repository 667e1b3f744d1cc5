"""`python -m tests.simulation`: worlds from seeds, and the stories of those in which a promise was broken."""

import argparse
import os
import sys
import time

from tests.simulation.campaign import can_replay, run_for, run_plan, shrink, tell, try_find
from tests.simulation.mutants import MUTANTS
from tests.simulation.plan import CROSSING_ROLES, Plan
from tests.simulation.roles import ROLES

_ALL_DAY_S = 86_400.0


def main() -> int:
    """1: a promise was broken."""
    parser = _parser()
    arguments = parser.parse_args()
    if arguments.replay is None and (arguments.cut or arguments.mutant or arguments.shrink):
        parser.error("--cut, --mutant and --shrink are for --replay SEED")
    if not can_replay():  # hashes are fixed at the start of a program
        os.execve(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]], _fixed_environment())
    if arguments.mutants:
        return _find_mutants(arguments)
    if arguments.replay is not None:
        plan = Plan(arguments.replay, cut=arguments.cut, mutant=arguments.mutant)
        result = run_plan(plan)
        if result.broken and arguments.shrink:
            plan, result = shrink(plan)
            print(f"with {plan.max_requests or 'all'} requests and only: {', '.join(sorted(plan.mix or ()))}")
        print(tell(result))
        return int(bool(result.broken))
    return _run_many(arguments)


def _run_many(arguments: argparse.Namespace) -> int:
    began_s, num_run, num_broken = time.monotonic(), 0, 0
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    for result in run_for(seeds, arguments.processes, arguments.seconds):
        num_run += 1
        if result.broken:
            num_broken += 1
            print(tell(result), flush=True)
        if num_run % 100 == 0:
            print(f"{num_run} seeds in {time.monotonic() - began_s:.0f} s, {num_broken} broken", flush=True)
    print(f"{num_run} seeds from {arguments.first} in {time.monotonic() - began_s:.0f} s, {num_broken} broken")
    return int(num_broken > 0)


def _find_mutants(arguments: argparse.Namespace) -> int:
    """1: one was not found."""
    num_missed = 0
    for name in MUTANTS:
        found = try_find(name, arguments.first, arguments.seeds, arguments.processes)
        num_missed += found is None
        where = f"not within {arguments.seeds} worlds" if found is None else f"{found[0]} worlds: {found[1]}"
        print(f"{name}: {where}", flush=True)
    return int(num_missed > 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=500, help="How many; of --mutants: how many each at most.")
    parser.add_argument("--from", type=int, default=1, dest="first", metavar="SEED", help="The first one.")
    parser.add_argument("--seconds", type=float, default=_ALL_DAY_S, help="None is begun after so long.")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--replay", type=int, metavar="SEED", help="Only this one, and its story.")
    parser.add_argument("--cut", type=_cut, metavar="ROLE:WRITE", help="With --replay: its first process dies in it.")
    parser.add_argument("--mutant", choices=MUTANTS, default="", metavar="NAME", help="With --replay: this defect.")
    parser.add_argument("--shrink", action="store_true", help="With --replay: a smaller world that fails too.")
    parser.add_argument("--mutants", action="store_true", help="Undo one mend after the other: is each missed?")
    return parser


def _cut(text: str) -> tuple[str, int]:
    """`prefill:12`: in its 12th write into the segment. `:0`: nobody dies."""
    role, _, write = text.partition(":")
    roles = (*ROLES, *CROSSING_ROLES)
    if role not in ("", *roles) or not write.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: must be ROLE:WRITE, as prefill:12; ROLE one of {', '.join(roles)}")
    return role, int(write)


def _fixed_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONHASHSEED": "0"}


if __name__ == "__main__":
    sys.exit(main())
