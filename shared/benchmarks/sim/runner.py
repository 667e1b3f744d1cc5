"""Runs every case of an experiment with every seed, a few processes side by side."""

import math
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from benchmarks.sim.experiment import Experiment, Size, check_traces
from benchmarks.sim.registry import load_experiment
from benchmarks.sim.results import Results, Row


def run_experiment(
    experiment: Experiment, size: Size, *, num_processes: int = 1, on_progress: Callable[[int, int], None] | None = None
) -> Results:
    """Rows in the order of cases, then seeds, whatever order they ended in.

    `on_progress(done, all)` after each run. What a run raises is raised here, with a note of its case and seed. With
    more than one process the experiment must be one that `load_experiment` finds.
    """
    check_traces(experiment)
    tasks = [(number, seed) for number in range(len(experiment.cases(size))) for seed in experiment.seeds(size)]
    rows: dict[tuple[int, int], Row] = {}
    run = _run_here if num_processes == 1 else _run_in_children
    for task, row in run(experiment, size, tasks, num_processes):
        rows[task] = row
        if on_progress is not None:
            on_progress(len(rows), len(tasks))
    return Results(tuple(rows[task] for task in tasks))


_Task = tuple[int, int]


def _run_here(
    experiment: Experiment, size: Size, tasks: Sequence[_Task], _num_processes: int
) -> Iterator[tuple[_Task, Row]]:
    for number, seed in tasks:
        yield (number, seed), run_case(experiment, size, number, seed)


def _run_in_children(
    experiment: Experiment, size: Size, tasks: Sequence[_Task], num_processes: int
) -> Iterator[tuple[_Task, Row]]:
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(num_processes, context) as pool:
        futures = {pool.submit(_run_in_child, experiment.name, size, *task): task for task in tasks}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


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
