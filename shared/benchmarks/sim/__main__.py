"""`python -m benchmarks.sim`: runs experiments, prints what came out, writes it down."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.sim.experiment import Experiment, Results, Size
from benchmarks.sim.report import bound, figure_rows, measured_checks, show, write_results
from benchmarks.sim.runner import experiment_names, load_experiment, run_experiment
from benchmarks.traces import TracesMissing
from weir.cli import EXIT_USAGE
from weir.cli.console import fail


def sim(
    names: Annotated[list[str] | None, typer.Argument(help="Experiments to run. Default: all.")] = None,
    size: Annotated[str, typer.Option(help="small: seconds each, coarse. full: minutes each, what is kept.")] = "small",
    out: Annotated[Path | None, typer.Option(help="Also write NAME.md, NAME.json and plots into this folder.")] = None,
    processes: Annotated[int, typer.Option(min=1, max=64, help="Runs side by side.")] = 2,
    list_only: Annotated[bool, typer.Option("--list", help="Only say which experiments there are.")] = False,
) -> None:
    """Experiments on the simulator: what each policy claims, over several seeds, beside what it came to.

    Trace files are looked for in the folder `traces` of WEIR_TEST_DATA.

    \b
    python -m benchmarks.sim --list
    python -m benchmarks.sim vtc-arena --size full --out results
    """
    if size not in set(Size):
        raise typer.BadParameter(f"--size {size}: must be {' or '.join(Size)}")
    if list_only:
        _list()
        return
    try:
        experiments = [load_experiment(name) for name in names or experiment_names()]
    except ValueError as error:
        fail(str(error), code=EXIT_USAGE)
    # A check that is not met is a result like any other, shown and written down; it does not fail the command.
    stderr = Console(stderr=True, highlight=False)
    exit_code = 0
    for experiment in experiments:
        try:
            results = _run(experiment, Size(size), processes, stderr)
        except TracesMissing as missing:
            stderr.print(f"{experiment.name}: skipped: {missing}", style="yellow", markup=False, soft_wrap=True)
            exit_code = 1 if names else exit_code
            continue
        _print(experiment, results, Size(size))
        if out is not None:
            try:
                paths = write_results(experiment, results, Size(size), out)
            except OSError as error:
                fail(f"benchmarks.sim: {error}")
            for path in paths:
                stderr.print(f"wrote {path}", markup=False, soft_wrap=True)
    raise typer.Exit(exit_code)


def _list() -> None:
    table = Table("experiment", "shows", title_justify="left")
    for name in experiment_names():
        table.add_row(name, load_experiment(name).claim)
    Console().print(table)


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


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(sim)
    app(prog_name="python -m benchmarks.sim")
