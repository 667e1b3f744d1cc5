"""`python -m benchmarks.planner`: the table of the planner."""

import json
import statistics
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.planner.loads import loads
from benchmarks.planner.replay import ARMS, TARGET, ArmOutcome, Replayer
from benchmarks.traces import TracesMissing
from weir.cli import EXIT_USAGE
from weir.cli.console import fail

Results = dict[str, list[dict[str, ArmOutcome]]]
"""Name of the load -> seed -> arm."""


def planner(
    names: Annotated[list[str] | None, typer.Argument(help="Loads, by the first word of their names. All.")] = None,
    seeds: Annotated[int, typer.Option(min=1, max=100)] = 5,
    arms: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(ARMS).replace(", ", ";"),
    processes: Annotated[int, typer.Option(min=1, max=64, help="Runs side by side.")] = 2,
    out: Annotated[Path | None, typer.Option(help="Also write every run into this JSON file.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Runs that are in the file of --out are taken from it.")
    ] = False,
) -> None:
    """Replays loads in simulation under the planner, simple rules, fixed numbers and an oracle; medians over seeds.

    Traces are looked for in the folder `traces` of WEIR_TEST_DATA. An arm's name has ; for its comma here. A seed of a
    load takes one to ten minutes of a core.

    \b
    python -m benchmarks.planner --out planner.json
    python -m benchmarks.planner --out planner.json --resume
    python -m benchmarks.planner day azure --seeds 2 --arms planner,oracle
    """
    wanted = [arm.replace(";", ", ") for arm in arms.split(",")]
    chosen = [load.name for load in loads() if not names or load.name.split()[0] in names]
    if not chosen or set(wanted) - set(ARMS):
        known = ", ".join(load.name.split()[0] for load in loads())
        fail(f"loads: {known}; arms: {', '.join(ARMS)}", code=EXIT_USAGE)
    if resume and out is None:
        fail("--resume: say by --out which file to go on from", code=EXIT_USAGE)
    stderr = Console(stderr=True, highlight=False)
    results = read_results(out) if resume and out is not None and out.exists() else {}
    tasks = tasks_left(results, chosen, seeds, wanted)
    try:
        with ProcessPoolExecutor(processes) as executor:
            for (name, seed, arm), outcome in zip(tasks, executor.map(_run, tasks), strict=True):
                results[name][seed][arm] = outcome
                stderr.print(f"{name}, seed {seed}, {arm}: {outcome.worker_s:.0f} worker-s, {outcome.attainment:.1%}")
                if out is not None:
                    out.write_text(json.dumps(_as_json(results), indent=1))
    except TracesMissing as missing:
        fail(str(missing), code=EXIT_USAGE)
    for name in chosen:
        _print(name, results[name][:seeds], wanted)


def _run(task: tuple[str, int, str]) -> ArmOutcome:
    name, seed, arm = task
    load = next(load for load in loads() if load.name == name)
    return Replayer(load, seed).run(arm)


def tasks_left(results: Results, names: Sequence[str], seeds: int, arms: Sequence[str]) -> list[tuple[str, int, str]]:
    """Load, seed and arm of each run that `results` lack, which get a place for it."""
    for name in names:
        by_seed = results.setdefault(name, [])
        by_seed += [{} for _ in range(seeds - len(by_seed))]
    return [
        (name, seed, arm) for seed in range(seeds) for name in names for arm in arms if arm not in results[name][seed]
    ]


def read_results(file: Path) -> Results:
    """What an earlier run has written into its file."""
    return {
        name: [{arm: ArmOutcome(**outcome) for arm, outcome in one.items()} for one in by_seed]
        for name, by_seed in json.loads(file.read_text()).items()
    }


def _as_json(results: Results) -> dict[str, list[dict[str, dict[str, float]]]]:
    return {
        name: [{arm: asdict(outcome) for arm, outcome in one.items()} for one in by_seed]
        for name, by_seed in results.items()
    }


def _print(name: str, by_seed: Sequence[dict[str, ArmOutcome]], arms: Sequence[str]) -> None:
    about = next(load.about for load in loads() if load.name == name)
    table = Table("arm", "worker-s", "of the oracle's", f"met (asked {TARGET:.0%})", "p99 TTFT s", "changes")
    for arm in arms:
        outcomes = [one[arm] for one in by_seed]
        ratios = [one[arm].worker_s / one["oracle"].worker_s for one in by_seed if "oracle" in one]
        table.add_row(
            arm,
            _spread((one.worker_s for one in outcomes), "{:.0f}"),
            _spread(ratios, "{:.2f}"),
            _spread((100 * one.attainment for one in outcomes), "{:.1f}"),
            _spread((one.p99_ttft_s for one in outcomes), "{:.1f}"),
            _spread((one.num_changes for one in outcomes), "{:.0f}"),
        )
    console = Console(highlight=False)
    console.print(f"{name}: {about}; {len(by_seed)} seeds, median (least to most)", markup=False)
    console.print(table)


def _spread(values: Iterable[float], form: str) -> str:
    found = sorted(values)
    if not found:
        return ""
    middle, low, high = (form.format(value) for value in (statistics.median(found), found[0], found[-1]))
    return middle if low == high else f"{middle} ({low} to {high})"


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(planner)
    app(prog_name="python -m benchmarks.planner")
