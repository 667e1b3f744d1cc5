"""Finds experiments by the names of their modules, and runs their cases with every seed, some side by side."""

import importlib
import math
import multiprocessing
import pkgutil
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack

from benchmarks.sim import experiments
from benchmarks.sim.experiment import Experiment, Results, Row, Size
from benchmarks.traces import traces_folder


def experiment_names() -> list[str]:
    """In alphabetical order. Modules whose name begins with an underscore are helpers of others."""
    modules = (module.name for module in pkgutil.iter_modules(experiments.__path__))
    return sorted(name.replace("_", "-") for name in modules if not name.startswith("_"))


def load_experiment(name: str) -> Experiment:
    """Imports only its module. Raises ValueError, with the names that there are."""
    names = experiment_names()
    if name not in names:
        raise ValueError(f"experiment {name!r}: is none of {', '.join(names)}")
    module = importlib.import_module(f"{experiments.__name__}.{name.replace('-', '_')}")
    experiment = module.EXPERIMENT
    if not isinstance(experiment, Experiment) or experiment.name != name:
        raise ValueError(f"{module.__name__}: EXPERIMENT must be an Experiment named {name!r}")
    return experiment


def run_experiment(
    experiment: Experiment, size: Size, *, num_processes: int = 1, on_progress: Callable[[int, int], None] | None = None
) -> Results:
    """Rows in the order of cases, then seeds, whatever order they ended in.

    `on_progress(done, all)` after each run. What a run raises is raised here, with a note of its case and seed. With
    more than one process the experiment must be one that `load_experiment` finds.
    """
    if traces := experiment.traces_of(size):
        traces_folder(*traces)
    tasks = [(number, seed) for number in range(len(experiment.cases(size))) for seed in experiment.seeds(size)]
    rows: dict[tuple[int, int], Row] = {}
    with ExitStack() as stack:
        if num_processes == 1:
            done = ((task, run_case(experiment, size, *task)) for task in tasks)
        else:
            pool = ProcessPoolExecutor(num_processes, multiprocessing.get_context("forkserver"))
            stack.callback(pool.shutdown, wait=False, cancel_futures=True)
            futures = {pool.submit(_run_in_child, experiment.name, size, *task): task for task in tasks}
            done = ((futures[future], future.result()) for future in as_completed(futures))
        for task, row in done:
            rows[task] = row
            if on_progress is not None:
                on_progress(len(rows), len(tasks))
    return Results(tuple(rows[task] for task in tasks))


def _run_in_child(name: str, size: Size, number: int, seed: int) -> Row:
    return run_case(load_experiment(name), size, number, seed)


def run_case(experiment: Experiment, size: Size, number: int, seed: int) -> Row:
    """One case with one seed. Raises ValueError if what it returns lacks a figure of the experiment, or has
    a NaN there."""
    case = experiment.cases(size)[number]
    where = f"{experiment.name}, arm {case.arm!r}, point {case.point!r}, seed {seed}"
    try:
        values = {name: float(value) for name, value in case.run(seed).items()}
    except Exception as error:
        error.add_note(f"in {where}")
        raise
    lacking = [figure.name for figure in experiment.figures if figure.name not in values]
    if lacking:
        raise ValueError(f"{where}: returned no {', '.join(lacking)}")
    unknown = [figure.name for figure in experiment.figures if math.isnan(values[figure.name])]
    if unknown:
        raise ValueError(f"{where}: {', '.join(unknown)} is not a number")
    return Row(case.arm, case.point, case.x, seed, values)
