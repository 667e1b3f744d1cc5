"""What clients see where streams of one host spread over two: `python -m tests.hosts.measure_rebalancing` (as root).

Four streams begin at a while b is drained, then b takes work again; in turns with rebalancing off and on. Both hosts
share this machine's cores, so that little is to be gained here: it shows what a move costs.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
from tests.hosts.streams import Streams
from tests.hosts.test_rebalancing import STORIES, drain_b, open_measured_hosts
from tests.hosts.two_hosts import RUNTIME, TIMEOUT_S, WEIR, TwoHosts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=1)
    asked = parser.parse_args()
    print("| rebalancing | moved | all four, s | between tokens p50, p99, longest, ms |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder, open_measured_hosts(Path(folder)) as hosts:
        for _ in range(asked.rounds):
            for is_on in (False, True):
                print(_round(hosts, is_on=is_on), flush=True)


def _round(hosts: TwoHosts, *, is_on: bool) -> str:
    hosts.a.run(*WEIR, "limits", "set", f"rebalances={str(is_on).lower()}", *RUNTIME, timeout_s=TIMEOUT_S)
    drain_b(hosts, "--grace-s", "0", "--wait")
    before = hosts.figures(hosts.a)["gateway-0"]["migrations_moved_total"]
    streams = Streams(hosts.a, [replace(one, options=one.options | {"max_tokens": 400}) for one in STORIES[:4]])
    streams.wait_begun()
    drain_b(hosts, "--undo")
    read = streams.read()
    moved = hosts.figures(hosts.a)["gateway-0"]["migrations_moved_total"] - before
    gaps_ms = 1000 * np.concatenate([one.gaps_s for one in read])
    took_s = max(one.times_s[-1] for one in read) - min(one.times_s[0] for one in read)
    shown = ", ".join(f"{value:.0f}" for value in (*np.percentile(gaps_ms, [50, 99]), gaps_ms.max()))
    return f"| {'on' if is_on else 'off'} | {moved:.0f} | {took_s:.1f} | {shown} |"


if __name__ == "__main__":
    main()
