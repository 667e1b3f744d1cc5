"""`python -m tests.simulation --seeds 1000 [--from 1] [--replay SEED]`"""

import argparse
import sys
import time

from tests.simulation.world import Plan, run_seed


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--from", type=int, default=1, dest="first")
    parser.add_argument("--replay", type=int)
    arguments = parser.parse_args()
    seeds = [arguments.replay] if arguments.replay is not None else range(arguments.first, arguments.first + arguments.seeds)
    for seed in seeds:
        began = time.perf_counter()
        r = run_seed(Plan(seed))
        print(f"seed {seed}: {time.perf_counter()-began:.2f}s {r.num_events} events {r.num_faults} faults {r.virtual_s:.1f} virtual s {r.ends} {r.trace:x} {r.broken}", flush=True)
        if r.broken and arguments.replay is not None:
            print("\n".join(r.story))
    return 0


if __name__ == "__main__":
    sys.exit(main())
