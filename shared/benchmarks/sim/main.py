"""`python -m benchmarks.sim`: runs experiments, prints what came out, writes it down."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.sim.experiment import Experiment, Size, TracesMissing
from benchmarks.sim.registry import experiment_names, load_experiment
from benchmarks.sim.report import bound, figure_rows, measured_checks, show, write_results
from benchmarks.sim.results import Results
from benchmarks.sim.runner import run_experiment


def list_experiments() -> None:
    """Prints name and claim of each."""
    table = Table("experiment", "shows", title_justify="left")
    for name in experiment_names():
        table.add_row(name, load_experiment(name).claim)
    Console().print(table)


def main(names: Sequence[str], size: Size, out: Path | None, num_processes: int) -> int:
    """Runs the named experiments, or all. Returns 1 if one that was named lacks its traces.

    A check that is not met is a result like any other, shown and written down; it does not fail the command. Raises
    ValueError for a name that there is not, OSError if `out` cannot be written.
    """
    stderr = Console(stderr=True, highlight=False)
    exit_code = 0
    for experiment in [load_experiment(name) for name in names or experiment_names()]:
        try:
            results = _run(experiment, size, num_processes, stderr)
        except TracesMissing as missing:
            stderr.print(f"{experiment.name}: skipped: {missing}", style="yellow", markup=False, soft_wrap=True)
            exit_code = 1 if names else exit_code
            continue
        _print(experiment, results, size)
        if out is not None:
            for path in write_results(experiment, results, size, out):
                stderr.print(f"wrote {path}", markup=False, soft_wrap=True)
    return exit_code


def _run(experiment: Experiment, size: Size, num_processes: int, console: Console) -> Results:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(experiment.name, total=None)
        return run_experiment(
            experiment,
            size,
            num_processes=num_processes,
            on_progress=lambda done, total: progress.update(bar, completed=done, total=total),
        )


def _print(experiment: Experiment, results: Results, size: Size) -> None:
    console = Console(highlight=False)
    console.print(f"{experiment.name}: {experiment.title}", style="bold", markup=False)
    console.print(experiment.compared, markup=False)
    figures = Table("point", "arm", *(figure.label for figure in experiment.figures))
    for row in figure_rows(experiment, results):
        figures.add_row(*row)
    console.print(figures)
    if checks := measured_checks(experiment, results, size):
        table = Table("asked", "bound", "measured", "met")
        for check, estimate in checks:
            table.add_row(check.claim, bound(check), show(estimate), "yes" if check.is_met(estimate) else "NO")
        console.print(table)
    for sentence in experiment.findings(results):
        console.print(f"- {sentence}", markup=False)
