"""Experiments on the simulator."""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.sim.experiment import Size
from benchmarks.sim.main import list_experiments
from benchmarks.sim.main import main as run_experiments
from benchmarks.sim.registry import experiment_names
from weir.cli.console import fail
from weir.cli.exit_codes import EXIT_USAGE


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
        list_experiments()
        return
    if unknown := set(names or ()).difference(experiment_names()):
        fail(f"experiment {', '.join(sorted(unknown))}: there are {', '.join(experiment_names())}", code=EXIT_USAGE)
    try:
        raise typer.Exit(run_experiments(names or (), Size(size), out, processes))
    except OSError as error:
        fail(f"benchmarks.sim: {error}")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(sim)
    app(prog_name="python -m benchmarks.sim")
