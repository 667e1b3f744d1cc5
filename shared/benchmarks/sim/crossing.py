"""Where it pays that one host computes prompts for another one: `python -m benchmarks.sim.crossing TRACE --rate R`.

Two hosts of simulated H100s, four workers together, by what may cross between them and the rate of their link: time to
the first token, and the share of requests that meet both targets. The scheduler is the one that serves.
"""

import argparse
import itertools
from pathlib import Path

from weir.scheduling.limits import CoreLimits, Crossing, PlacingLimits
from weir.sim.profile import load_profile
from weir.sim.results.metrics import slo_from_ms, slos_of, summarize
from weir.sim.simulator import simulate
from weir.sim.spec import LinkSpec, PoolSpec, SystemSpec
from weir.sim.workloads.traces import Replay, load_workload
from weir.sim.workloads.workload import Workload

_GBIT_S = (1.0, 10.0, 25.0, 100.0)
_LATENCY_MS = 0.1
_PROFILE = "h100-llama3-8b"
Layout = tuple[tuple[int, int], ...]
"""(prefill, decode workers) of each host."""
_RUNS: tuple[tuple[Layout, tuple[Crossing, ...]], ...] = (
    (((1, 1), (1, 1)), ("nothing", "prefixes", "prompts")),
    (((2, 1), (0, 1)), ("nothing", "prompts")),
    (((2, 0), (0, 2)), ("prompts",)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--rate", type=float, required=True, help="requests a second, Poisson")
    parser.add_argument("--num-requests", type=int, default=400)
    parser.add_argument("--ttft-ms", type=float, default=1000.0)
    parser.add_argument("--gap-ms", type=float, default=100.0)
    asked = parser.parse_args()
    workload = load_workload(asked.trace, Replay(asked.num_requests, asked.rate, "poisson"))
    print("| hosts | crosses | Gb/s | first token, mean / p99 s | time a token, ms | longest gap, p99 ms | meet both |")
    print("|---|---|---|---|---|---|---|")
    has_beginnings = any(request.prefix_blocks for request in workload.requests)
    for (layout, kinds), gbit_s in itertools.product(_RUNS, _GBIT_S):
        for crossing in kinds:
            if crossing == "nothing" and gbit_s != _GBIT_S[0]:
                continue  # no link is used
            if crossing == "prefixes" and not has_beginnings:
                continue
            print(_row(layout, crossing, gbit_s, workload, asked.ttft_ms, asked.gap_ms), flush=True)


def _row(layout: Layout, crossing: Crossing, gbit_s: float, workload: Workload, ttft_ms: float, gap_ms: float) -> str:
    limits = CoreLimits(placing=PlacingLimits(crossing=crossing))
    result = simulate(_system(layout, gbit_s), workload, limits=limits)
    found = summarize(result, slos_of(limits, slo_from_ms(ttft_ms, gap_ms, 0.0, 0.0))).as_dict()
    num_crossed = result.counters.get("core_placed_crossing_total", 0.0)
    what = f"{crossing} ({num_crossed:.0f})" if crossing == "prompts" else crossing
    hosts = " \\| ".join(f"{prefill}P {decode}D" for prefill, decode in layout)
    times = f"{found['mean_ttft_s']:.2f} / {found['p99_ttft_s']:.2f} | {1000 * found['mean_tpot_s']:.1f}"
    rate = "-" if crossing == "nothing" else f"{gbit_s:g}"
    return (
        f"| {hosts} | {what} | {rate} | {times} | {1000 * found['p99_worst_gap_s']:.0f} | {found['attainment']:.0%} |"
    )


def _system(layout: Layout, gbit_s: float) -> SystemSpec:
    profile = load_profile(_PROFILE)
    pools: list[PoolSpec] = []
    for number, (num_prefill, num_decode) in enumerate(layout):
        pools += [PoolSpec("prefill", num_prefill, profile, host=f"h{number}")] if num_prefill else []
        pools += [PoolSpec("decode", num_decode, profile, host=f"h{number}")] if num_decode else []
    return SystemSpec(tuple(pools), host_link=LinkSpec(gbit_s / 8, _LATENCY_MS))


if __name__ == "__main__":
    main()
