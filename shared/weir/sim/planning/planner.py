"""`weir plan` without its command line: judges pool sizes by simulating the load on them, seed by seed."""

import math
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weir.core.cost import StepCost
from weir.policy.registry import PolicySpec
from weir.scheduling.limits.core_limits import CoreLimits
from weir.sim.planning.search import Candidate, Plan, PlanLimits, PoolSizes, search
from weir.sim.profile import CostProfile
from weir.sim.results.metrics import Slos, Summary, summarize
from weir.sim.results.report import finite
from weir.sim.results.stats import Estimate, mean_estimate
from weir.sim.simulator import DEFAULT_POLICY, simulate
from weir.sim.spec import LinkSpec, PoolSpec, SystemSpec
from weir.sim.workloads.replay import Replay, load_workload
from weir.sim.workloads.workload import Workload

_TYPICAL_BATCH = 32
"""Sequences that share a decode step's base cost, for the first guess of the ratio only."""


@dataclass(frozen=True, slots=True)
class PlanJob:
    """The load, what it must meet, and the workers that may be bought. `decode_profile` None: as `profile`.

    `seeds` matter where arrivals are drawn or times spread; a trace with times of its own gives the same every time.
    """

    trace: Path
    replay: Replay
    slos: Slos
    profile: CostProfile
    decode_profile: CostProfile | None = None
    link: LinkSpec | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    limits: CoreLimits = field(default_factory=CoreLimits)
    policy: PolicySpec = DEFAULT_POLICY
    seeds: tuple[int, ...] = (0,)

    def system(self, pools: PoolSizes) -> SystemSpec:
        """Chunks as large as a step may be."""
        sizes = (self.max_num_seqs, self.max_num_batched_tokens, self.max_num_batched_tokens)
        if pools.num_local:
            return SystemSpec((PoolSpec("local", pools.num_local, self.profile, *sizes),))
        prefill = PoolSpec("prefill", pools.num_prefill, self.profile, *sizes)
        decode = PoolSpec("decode", pools.num_decode, self.decode_profile or self.profile, *sizes)
        return SystemSpec((prefill, decode), self.link)


def run_once(job: PlanJob, pools: PoolSizes, seed: int) -> Summary:
    """One simulation. Raises TraceError, ValueError."""
    workload = load_workload(job.trace, job.replay, seed)
    result = simulate(job.system(pools), workload, limits=job.limits, policy=job.policy)
    return summarize(result, job.slos)


@dataclass(slots=True)
class Planned:
    """A plan, and what each candidate's runs came to."""

    plan: Plan
    runs: dict[PoolSizes, Sequence[Summary]]

    def by_cost(self) -> list[Candidate]:
        """Cheapest first, the better one first among equals."""
        return sorted(self.plan.candidates, key=lambda c: (c.cost, -c.attainment.mean, c.pools))

    def mean(self, pools: PoolSizes, figure: str) -> float:
        """Over the runs that have the figure at all; NaN without one."""
        values = [value for run in self.runs[pools] if not math.isnan(value := run.as_dict()[figure])]
        return statistics.mean(values) if values else math.nan

    def as_dict(self) -> dict[str, Any]:
        best = self.plan.best
        return {
            "best": None if best is None else self._candidate(best),
            "candidates": [self._candidate(candidate) for candidate in self.by_cost()],
        }

    def _candidate(self, candidate: Candidate) -> dict[str, Any]:
        metrics = ("mean_ttft_s", "p99_ttft_s", "mean_tpot_s", "p99_worst_gap_s", "output_tokens_a_s")
        estimate = candidate.attainment
        return {
            **candidate.pools._asdict(),
            "cost": candidate.cost,
            "is_enough": candidate.is_enough,
            "attainment": finite({"mean": estimate.mean, "low": estimate.low, "high": estimate.high}),
            **finite({figure: self.mean(candidate.pools, figure) for figure in metrics}),
        }


def make_plan(
    job: PlanJob,
    limits: PlanLimits,
    executor: Executor | None = None,
    on_judged: Callable[[int, PoolSizes, float], None] | None = None,
) -> Planned:
    """Simulates until the cheapest pools are found; `executor` runs the seeds of one candidate side by side.

    Raises what `run_once` raises.
    """
    runs: dict[PoolSizes, Sequence[Summary]] = {}

    def judge(pools: PoolSizes) -> Estimate:
        many = map if executor is None else executor.map
        num = len(job.seeds)
        runs[pools] = list(many(run_once, [job] * num, [pools] * num, job.seeds))
        estimate = mean_estimate([run.attainment for run in runs[pools]])
        if on_judged is not None:
            on_judged(len(runs), pools, estimate.mean)
        return estimate

    return Planned(search(judge, limits), runs)


def guess_prefill_share(workload: Workload, prefill: StepCost, decode: StepCost, chunk_tokens: int) -> float:
    """Of the workers: as the work of the prompts is to that of the answers, in full decode batches."""
    num = len(workload.requests)
    num_prompt = max(1, round(sum(r.num_prompt_tokens for r in workload.requests) / num))
    num_output = sum(r.num_output_tokens for r in workload.requests) / num
    prefill_ms = prefill.prefill_ms(num_prompt, 0, chunk_tokens)
    context = num_prompt + num_output / 2
    step_ms = decode.base_ms / _TYPICAL_BATCH + decode.decode_sequence_ms + decode.context_token_ms * context
    return prefill_ms / (prefill_ms + num_output * step_ms)
