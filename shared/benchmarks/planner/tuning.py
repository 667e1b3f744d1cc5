"""The tuner in simulation: loads on workers whose bounds begin badly, under the tuner and under every fixed setting.

Workers are about as fast as a small model's on processor cores, so that some thousands of requests take minutes, as
they do on fast ones with many more.
"""

import json
import random
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from weir.cli import EXIT_USAGE
from weir.cli.console import fail
from weir.core.cost import StepCost
from weir.core.roles import WorkerRole
from weir.planner.tuning.observation import TuningTick
from weir.planner.tuning.settings import Bound, Knob, TunerSettings
from weir.planner.tuning.steps import Deed, TuningStep
from weir.planner.tuning.tuner import Tuner
from weir.scheduling.limits import CoreLimits
from weir.sim.profile import CostProfile
from weir.sim.results.metrics import RequestOutcome, Slo
from weir.sim.simulator import simulate
from weir.sim.spec import LinkSpec, SystemSpec
from weir.sim.tuning import TuningSpec
from weir.sim.workloads.workload import Lengths, Workload, draw, poisson

_TICK_S = 1.0
_MOST_SEQS, _MOST_TOKENS = 64, 2048
_NUM_LENGTHS = 4096
_PROFILE = CostProfile(
    name="40 ms and 2.5 ms a sequence",
    step=StepCost(
        base_ms=40.0, prefill_token_ms=0.5, prefill_pair_ms=0.0, decode_sequence_ms=2.4, context_token_ms=3e-4
    ),
    num_pages=4000,
    kv_bytes_per_token=32_768,
    max_context_tokens=8192,
)


@dataclass(frozen=True, slots=True)
class TuningLoad:
    """`start`: of the bound that is tuned. `fixed`: the settings that it is compared with."""

    name: str
    about: str
    slo: Slo
    knob: Knob
    start: int
    fixed: tuple[int, ...]
    rate_a_s: float
    mean_prompt: float
    mean_output: float
    system: SystemSpec
    span_s: float = 750.0
    window_s: float = 5.0

    def make(self, seed: int) -> Workload:
        """Exponential lengths, Poisson arrivals."""
        source = np.random.default_rng(seed)
        times = poisson(self.rate_a_s, round(self.rate_a_s * self.span_s), source)
        prompts = 16 + source.exponential(self.mean_prompt, _NUM_LENGTHS)
        outputs = 8 + source.exponential(self.mean_output, _NUM_LENGTHS)
        lengths = [
            Lengths(min(4000, int(prompt)), min(600, int(output)))
            for prompt, output in zip(prompts.tolist(), outputs.tolist(), strict=True)
        ]
        return draw(lengths, times, source, name="tuned", max_tokens=600)

    @property
    def settings(self) -> TunerSettings:
        """Of its tuner."""
        return TunerSettings((self.knob,), self.slo.ttft_s, self.slo.tpot_s, window_s=self.window_s)

    @property
    def limits(self) -> CoreLimits:
        """Who has waited for longer than the first token may take is refused, so that a bad start leaves no backlog."""
        plain = CoreLimits()
        return replace(plain, lanes=tuple(replace(lane, max_wait_s=self.slo.ttft_s) for lane in plain.lanes))


def _split(num_prefill: int, num_decode: int) -> SystemSpec:
    sizes = {"max_num_seqs": _MOST_SEQS, "max_num_batched_tokens": _MOST_TOKENS}
    return SystemSpec.split(num_prefill, num_decode, _PROFILE, link=LinkSpec(25.0), **sizes)


def tuning_loads() -> tuple[TuningLoad, ...]:
    """In the order of the table."""
    slo = Slo(ttft_s=8.0, tpot_s=0.080)
    seqs = Knob("decode", "max_num_seqs", 2, _MOST_SEQS)
    tokens = Knob("prefill", "max_num_batched_tokens", 64, _MOST_TOKENS)
    fixed = (8, 11, 13, 15, 16, 18)
    return (
        TuningLoad(
            "small",
            "4 decode workers, 95 % of what they hold; max_num_seqs from 2",
            slo,
            seqs,
            2,
            fixed,
            7.3,
            200,
            90,
            _split(3, 4),
        ),
        TuningLoad(
            "large",
            "4 decode workers, 125 % of what they hold; max_num_seqs from 64",
            slo,
            seqs,
            64,
            fixed,
            9.6,
            200,
            90,
            _split(3, 4),
        ),
        TuningLoad(
            "prompts",
            "4 prefill workers; max_num_batched_tokens from 64",
            Slo(ttft_s=6.0, tpot_s=0.120),
            tokens,
            64,
            (128, 256, 512, 1024, 2048),
            7.2,
            800,
            12,
            _split(4, 2),
        ),
    )


@dataclass(frozen=True, slots=True)
class TuningOutcome:
    """`late_share`: of the requests that came in the last third, those that met the SLO. `bad_share`: of all tokens,
    those by canaries whose value was not kept. Windows until the last value was kept; the value at the end."""

    late_share: float
    late_goodput_a_s: float
    all_share: float
    bad_share: float = 0.0
    num_windows: float = 0.0
    value: int = 0
    steps: tuple[str, ...] = ()


class _Recorder:
    """Implements `weir.sim.tuning.TuningController`: the tuner, and what came of it."""

    def __init__(self, load: TuningLoad) -> None:
        self._tuner = Tuner(load.settings, random.Random(0))
        self._load = load
        self.value = load.start
        self.kept_at_s = 0.0
        self.num_tokens = 0.0
        self.num_bad_tokens = 0.0
        self._num_trial_tokens = 0.0
        self.steps: list[str] = []
        self._at_s = 0.0

    def look(self, tick: TuningTick) -> TuningStep | None:
        self._at_s = tick.at_s
        trial = self._tuner.trial
        for worker in tick.workers:
            if worker.role == self._load.knob.role:
                self.num_tokens += worker.num_tokens
                if trial is not None and worker.worker_id in trial.canaries:
                    self._num_trial_tokens += worker.num_tokens
        return self._tuner.look(tick)

    def begun(self, step: TuningStep) -> None:
        self.steps.append(f"{self._at_s:.0f} s {step.deed} {step.value} (was {step.was}): {step.reason}")
        if step.deed is Deed.KEEP:
            self.value, self.kept_at_s = step.value, self._at_s
        elif step.deed is Deed.END:
            self.num_bad_tokens += self._num_trial_tokens
        self._num_trial_tokens = 0.0
        self._tuner.begun(step)


def run_fixed(load: TuningLoad, value: int, seed: int) -> TuningOutcome:
    """All the time the same."""
    is_seqs = load.knob.bound == "max_num_seqs"
    num_seqs, num_tokens = (value, _MOST_TOKENS) if is_seqs else (_MOST_SEQS, value)
    pools = tuple(
        replace(pool, max_num_seqs=num_seqs, max_num_batched_tokens=num_tokens) if pool.role == load.knob.role else pool
        for pool in load.system.pools
    )
    result = simulate(replace(load.system, pools=pools), load.make(seed), limits=load.limits)
    return _outcome(load, result.outcomes)


def run_tuned(load: TuningLoad, seed: int) -> TuningOutcome:
    """From the bad start on."""
    recorder = _Recorder(load)
    start: dict[tuple[WorkerRole, Bound], int] = {(load.knob.role, load.knob.bound): load.start}
    tuning = TuningSpec(lambda: recorder, start, _TICK_S)
    result = simulate(load.system, load.make(seed), limits=load.limits, scaling=tuning)
    return replace(
        _outcome(load, result.outcomes),
        bad_share=recorder.num_bad_tokens / recorder.num_tokens,
        num_windows=recorder.kept_at_s / load.window_s,
        value=recorder.value,
        steps=tuple(recorder.steps),
    )


def _outcome(load: TuningLoad, outcomes: Sequence[RequestOutcome]) -> TuningOutcome:
    end_s = outcomes[-1].arrival_s
    late = [one for one in outcomes if one.arrival_s > end_s * 2 / 3]
    num_met = sum(load.slo.is_met_by(one) for one in late)
    all_share = sum(load.slo.is_met_by(one) for one in outcomes) / len(outcomes)
    return TuningOutcome(num_met / len(late), num_met / (end_s / 3), all_share)


def _run(task: tuple[str, int, int]) -> TuningOutcome:
    """Of a load, a seed and a fixed value; 0: the tuner."""
    name, seed, value = task
    load = next(load for load in tuning_loads() if load.name == name)
    return run_fixed(load, value, seed) if value else run_tuned(load, seed)


def tuning(
    names: Annotated[list[str] | None, typer.Argument(help="Loads. All.")] = None,
    seeds: Annotated[int, typer.Option(min=1, max=100)] = 5,
    processes: Annotated[int, typer.Option(min=1, max=64, help="Runs side by side.")] = 2,
    out: Annotated[Path | None, typer.Option(help="Also write every run into this JSON file.")] = None,
) -> None:
    """The tuner from bad starts beside fixed settings; medians over seeds.

    \b
    python -m benchmarks.planner.tuning --out tuning.json
    """
    chosen = [load for load in tuning_loads() if not names or load.name in names]
    if not chosen:
        fail(f"loads: {', '.join(load.name for load in tuning_loads())}", code=EXIT_USAGE)
    tasks = [(load.name, seed, value) for seed in range(seeds) for load in chosen for value in (0, *load.fixed)]
    found: dict[tuple[str, int, int], TuningOutcome] = {}
    with ProcessPoolExecutor(processes) as executor:
        for task, outcome in zip(tasks, executor.map(_run, tasks), strict=True):
            found[task] = outcome
            line = f"{task[0]}, seed {task[1]}, {task[2] or 'tuner'}: {outcome.late_share:.1%} late"
            Console(stderr=True, highlight=False).print(line, markup=False)
            if out is not None:
                out.write_text(json.dumps([[*task, asdict(outcome)] for task, outcome in found.items()], indent=1))
    console = Console(highlight=False, width=120)
    for load in chosen:
        console.print(f"{load.name}: {load.about}; {seeds} seeds, median (least to most)", markup=False)
        console.print(_table(load, seeds, found))


def _table(load: TuningLoad, seeds: int, found: Mapping[tuple[str, int, int], TuningOutcome]) -> Table:
    table = Table("setting", "met in the last third", "of the best fixed", "met in all", "windows", "on bad canaries")
    tuned = [found[load.name, seed, 0] for seed in range(seeds)]
    best = [max(found[load.name, seed, value].late_share for value in load.fixed) for seed in range(seeds)]
    for value in (0, *load.fixed):
        outcomes = [found[load.name, seed, value] for seed in range(seeds)]
        ratios = [one.late_share / most for one, most in zip(outcomes, best, strict=True)]
        row = [_spread([one.late_share for one in outcomes], "%"), _spread(ratios, "%")]
        row.append(_spread([one.all_share for one in outcomes], "%"))
        if value == 0:
            row += [_spread([one.num_windows for one in tuned], ""), _spread([one.bad_share for one in tuned], "%")]
        ends = ", ".join(str(one.value) for one in tuned)
        table.add_row(f"tuner from {load.start}, to {ends}" if value == 0 else str(value), *row)
    return table


def _spread(values: Sequence[float], unit: str) -> str:
    form = "{:.1%}" if unit else "{:.0f}"
    middle, low, high = (form.format(value) for value in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({low} to {high})"


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(tuning)
    app(prog_name="python -m benchmarks.planner.tuning")
