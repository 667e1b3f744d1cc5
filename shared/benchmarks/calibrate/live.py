"""Both sides of `python -m benchmarks.calibrate`: a stack of its own, asked over HTTP, and its simulation."""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.calibrate.loads import (
    CalibrateConfig,
    Costs,
    LoadFigures,
    Overheads,
    Round,
    Served,
    figures_of,
    jobs_of,
    overheads_of,
    system_of,
    trace_of,
)
from weir.bench.profile import try_cost_of
from weir.bench.serving.jobs import random_prompts
from weir.bench.serving.load import run_cold
from weir.bench.serving.records import BenchRequest, ServedRequest
from weir.core.cost import StepCost
from weir.sim.results.metrics import SimResult
from weir.sim.simulator import simulate
from weir.sim.workloads.workload import Workload
from weir.testing.stack import ProcessView, Stack
from weir.worker.engine.cost_meter import CONTENTION, MEAN_PREFIX

_NUM_IDLE = 20
_IDLE_OUTPUT_LEN = 16
_IDLE_PROMPT_LEN = 64
_MIN_HAND_OFFS = 5
_BURST_SEED, _WARM_UP_SEED, _ROUND_SEED = 1000, 2000, 3000
_MAX_WARM_UPS = 6
_FIT_S = 7.0
"""A worker fits at most every 5 s, when it renews its registry entry."""


@dataclass(frozen=True, slots=True)
class LoadRun:
    """All rounds at one load, and the costs with which each was simulated."""

    load: float
    rate_a_s: float
    rounds: tuple[Round, ...]
    costs: tuple[Costs, ...]


@dataclass(frozen=True, slots=True)
class CalibrationReport:
    """All that was measured. `capacity_a_s`: requests/s when all came at once."""

    overheads: Overheads
    capacity_a_s: float
    num_pages: int
    num_warm_ups: int
    loads: tuple[LoadRun, ...]
    fit_quality: dict[str, dict[str, float]]
    """By worker, after the warm-up."""


def calibrate(config: CalibrateConfig, say: Callable[[str], None]) -> CalibrationReport:
    """Starts a stack and ends it. Raises RuntimeError for one that does not start, fails requests or fits no costs."""
    with (
        tempfile.TemporaryDirectory(prefix="weir-cal-") as folder,
        Stack(Path(folder), flags=("--model", config.model)) as stack,
    ):
        return _Calibrator(config, stack, say).run()


class _Calibrator:
    """One stack under measurement."""

    def __init__(self, config: CalibrateConfig, stack: Stack, say: Callable[[str], None]) -> None:
        self._config = config
        self._stack = stack
        self._say = say
        self._processes = {view.role: view for view in stack.processes()}

    def run(self) -> CalibrationReport:
        self._say("one request at a time")
        self._serve(self._idle_jobs(_IDLE_PROMPT_LEN, 2)[:4])  # kernels and connections are warm after these
        overheads = self._measure_overheads()
        self._say("all at once")
        capacity_a_s = self._measure_capacity()
        num_warm_ups = self._warm_up(capacity_a_s)
        quality = {role: self._fit_quality(role) for role in ("prefill", "decode")}
        num_pages = round(self._metrics("transfer")["total_pages"])
        loads = tuple(
            self._run_load(load, load * capacity_a_s, number, overheads, num_pages)
            for number, load in enumerate(self._config.loads)
        )
        return CalibrationReport(overheads, capacity_a_s, num_pages, num_warm_ups, loads, quality)

    def _measure_overheads(self) -> Overheads:
        alone = [self._serve([job])[0] for job in self._idle_jobs(1, _IDLE_OUTPUT_LEN)]
        idle_itl_s = statistics.median((r.latency_s - r.ttft_s) / (r.output_len - 1) for r in alone)
        hand_offs_s = []
        for job in self._idle_jobs(_IDLE_PROMPT_LEN, 2):
            num_before = self._metrics("scheduler").get("placed_split_total", 0.0)
            record = self._serve([job])[0]
            if self._metrics("scheduler").get("placed_split_total", 0.0) > num_before:
                hand_offs_s.append(record.latency_s - record.ttft_s - idle_itl_s)
        hand_off_s = statistics.median(hand_offs_s) if len(hand_offs_s) >= _MIN_HAND_OFFS else None
        return overheads_of(statistics.median(r.ttft_s for r in alone), idle_itl_s, hand_off_s)

    def _measure_capacity(self) -> float:
        workload = trace_of(self._config, 1.0, self._config.seed + _BURST_SEED)
        jobs = jobs_of(workload, self._config.seed + _BURST_SEED)
        records = self._serve([BenchRequest(job.prompt, job.output_len) for job in jobs])
        return len(records) / max(r.started_s + r.latency_s - records[0].started_s for r in records)

    def _warm_up(self, capacity_a_s: float) -> int:
        """Serves loads as the measured ones, but others, until both workers know their costs."""
        for number in range(_MAX_WARM_UPS):
            load = self._config.loads[number % len(self._config.loads)]
            self._say(f"warm-up {number + 1} at {load:g}")
            seed = self._config.seed + _WARM_UP_SEED + number
            self._serve(jobs_of(trace_of(self._config, load * capacity_a_s, seed), seed))
            time.sleep(_FIT_S)
            are_all_seen = number + 1 >= len(self._config.loads)
            if are_all_seen and all(self._try_cost(role) for role in ("prefill", "decode")):
                return number + 1
        raise RuntimeError(f"after {_MAX_WARM_UPS} warm-ups a worker still has no costs: give more --num-requests")

    def _run_load(self, load: float, rate_a_s: float, number: int, overheads: Overheads, num_pages: int) -> LoadRun:
        """The same trace in every round; each is simulated before it is served, with what is known by then."""
        seed = self._config.seed + _ROUND_SEED + number
        workload = trace_of(self._config, rate_a_s, seed)
        rounds, costs = [], []
        for index in range(self._config.rounds):
            self._say(f"load {load:g}, round {index + 1} of {self._config.rounds}")
            known = self._costs()
            simulated = simulate(system_of(known, overheads, num_pages), workload)
            real, real_local_share = self._real_round(workload, seed)
            share = statistics.fmean(outcome.is_local for outcome in simulated.outcomes)
            rounds.append(Round(real, figures_of(_simulated(simulated)), real_local_share, share))
            costs.append(known)
            time.sleep(_FIT_S)
        return LoadRun(load, rate_a_s, tuple(rounds), tuple(costs))

    def _real_round(self, workload: Workload, seed: int) -> tuple[LoadFigures, float]:
        num_split = self._metrics("scheduler").get("placed_split_total", 0.0)
        records = self._serve(jobs_of(workload, seed))
        num_split = self._metrics("scheduler").get("placed_split_total", 0.0) - num_split
        return figures_of(_served(records)), 1 - num_split / len(records)

    def _serve(self, jobs: Sequence[BenchRequest]) -> list[ServedRequest]:
        return asyncio.run(run_cold(self._stack.http_url, self._config.model, jobs))

    def _idle_jobs(self, prompt_len: int, output_len: int) -> list[BenchRequest]:
        return [BenchRequest(prompt, output_len) for prompt in random_prompts(_NUM_IDLE, prompt_len, self._config.seed)]

    def _costs(self) -> Costs:
        contention = {role: self._metrics(role)[CONTENTION] for role in ("prefill", "decode")}
        return Costs(self._cost("prefill"), self._cost("decode"), contention["prefill"], contention["decode"])

    def _cost(self, role: str) -> StepCost:
        cost = self._try_cost(role)
        if cost is None:
            raise RuntimeError(f"the {role} worker has forgotten its costs: was it started again?")
        return cost

    def _try_cost(self, role: str) -> StepCost | None:
        return try_cost_of(self._metrics(role), MEAN_PREFIX)

    def _fit_quality(self, role: str) -> dict[str, float]:
        metrics = self._metrics(role)
        return {name: metrics[f"step_cost_{name}"] for name in ("steps", "r2", "error_p05", "error_p95")}

    def _metrics(self, role: str) -> dict[str, float]:
        process: ProcessView = self._processes[role]
        return self._stack.metrics(process)


def _served(records: Sequence[ServedRequest]) -> list[Served]:
    return [Served(r.started_s, r.started_s + r.ttft_s, r.started_s + r.latency_s, r.output_len) for r in records]


def _simulated(result: SimResult) -> list[Served]:
    served = []
    for outcome in result.outcomes:
        if outcome.first_token_s is None or outcome.last_token_s is None or outcome.refusal:
            raise RuntimeError(f"{outcome.request_id} did not end well in the simulation: {outcome.refusal}")
        times_s = (outcome.arrival_s, outcome.first_token_s, outcome.last_token_s)
        served.append(Served(*times_s, outcome.num_output_tokens))
    return served
