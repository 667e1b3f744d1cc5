"""An experiment's results as files: Markdown to read, JSON to compute with, PNG where it sweeps something.

Simulated time has no spread of its own and files carry no date: run again, they come out the same to the byte.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.sim.experiment import Check, Experiment, Figure, Results, Size
from weir.sim.results.metrics import Estimate
from weir.sim.results.report import finite


def write_results(experiment: Experiment, results: Results, size: Size, folder: Path) -> list[Path]:
    """The files that were written; the folder is made if need be. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    markdown = folder / f"{experiment.name}.md"
    data = folder / f"{experiment.name}.json"
    markdown.write_text(as_markdown(experiment, results, size), encoding="utf-8")
    data.write_text(json.dumps(as_dict(experiment, results, size), indent=1) + "\n", encoding="utf-8")
    return [markdown, data, *_write_pictures(experiment, results, folder)]


def command(experiment: Experiment, size: Size) -> str:
    """What repeats it."""
    data = "WEIR_TEST_DATA=DIR " if experiment.traces_of(size) else ""
    return f"{data}python -m benchmarks.sim {experiment.name} --size {size.value}"


def as_markdown(experiment: Experiment, results: Results, size: Size) -> str:
    """The claim, what was asked and what came, findings, and all figures with their intervals."""
    seeds = experiment.seeds(size)
    parts = [
        f"# {experiment.title}",
        f"{experiment.claim}\n\n{experiment.compared}",
        f"Simulated: `{command(experiment, size)}`. Seeds {seeds[0]} to {seeds[-1]}, the same arrivals and lengths for "
        f"every arm; mean and 95 % interval over the seeds (Student's t).",
    ]
    if traces := experiment.traces_of(size):
        parts.append(f"Traces: {', '.join(traces)}.")
    if checks := _check_rows(experiment, results, size):
        parts.append("## Asked and measured\n\n" + _table(("asked", "bound", "measured", "met"), checks))
    if findings := list(experiment.findings(results)):
        parts.append("## What it shows\n\n" + "\n".join(f"- {sentence}" for sentence in findings))
    headings = ("point", "arm", *(figure.label for figure in experiment.figures))
    parts.append("## All figures\n\n" + _table(headings, figure_rows(experiment, results)))
    return "\n\n".join(parts) + "\n"


def as_dict(experiment: Experiment, results: Results, size: Size) -> dict[str, Any]:
    """Every row of every seed; what is not finite is null."""
    return {
        "name": experiment.name,
        "claim": experiment.claim,
        "command": command(experiment, size),
        "seeds": list(experiment.seeds(size)),
        "checks": [
            {
                "claim": check.claim,
                "at_least": check.at_least,
                "at_most": check.at_most,
                "measured": finite({"mean": estimate.mean, "low": estimate.low, "high": estimate.high}),
                "is_met": check.is_met(estimate),
            }
            for check, estimate in measured_checks(experiment, results, size)
        ],
        "rows": [
            {"arm": row.arm, "point": row.point, "x": row.x, "seed": row.seed, **finite(row.values)}
            for row in results.rows
        ],
    }


def measured_checks(experiment: Experiment, results: Results, size: Size) -> list[tuple[Check, Estimate]]:
    """Those that hold for this size, in their order."""
    return [(check, check.measure(results)) for check in experiment.checks if size in check.sizes]


def figure_rows(experiment: Experiment, results: Results) -> list[tuple[str, ...]]:
    """A row for each point and arm."""
    return [
        (point, arm, *(_cell(results.estimate(figure.name, arm, point), figure) for figure in experiment.figures))
        for point in results.points()
        for arm in results.arms()
        if point in results.points(arm)
    ]


def show(estimate: Estimate, digits: int = 3) -> str:
    """Mean and half the width of its interval, to `digits` significant digits of the mean."""
    if not math.isfinite(estimate.mean):
        return str(estimate.mean)
    magnitude = math.floor(math.log10(abs(estimate.mean))) if estimate.mean else 0
    places = max(0, digits - 1 - magnitude)
    half = estimate.high - estimate.mean
    spread = f" ± {half:,.{places}f}" if math.isfinite(half) else ""
    return f"{estimate.mean:,.{places}f}{spread}"


def _cell(estimate: Estimate, figure: Figure) -> str:
    return show(estimate, figure.digits)


def _check_rows(experiment: Experiment, results: Results, size: Size) -> list[tuple[str, ...]]:
    return [
        (check.claim, bound(check), show(estimate), "yes" if check.is_met(estimate) else "**no**")
        for check, estimate in measured_checks(experiment, results, size)
    ]


def bound(check: Check) -> str:
    """As in `≥ 2`, `≤ 1.2`."""
    low = f"≥ {check.at_least:g}" if check.at_least is not None else ""
    high = f"≤ {check.at_most:g}" if check.at_most is not None else ""
    return ", ".join(part for part in (low, high) if part)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def _write_pictures(experiment: Experiment, results: Results, folder: Path) -> list[Path]:
    if not experiment.plots:
        return []
    from weir.sim.results.plots import Curve, sweep_picture, write_pictures  # noqa: PLC0415 - matplotlib only where needed

    labels = {figure.name: figure.label for figure in experiment.figures}
    x_of = {(row.arm, row.point): row.x for row in results.rows if row.x is not None}
    pictures = {}
    for plot in experiment.plots:
        curves = []
        for arm in results.arms():
            points = sorted((x, point) for (of_arm, point), x in x_of.items() if of_arm == arm)
            estimates = [results.estimate(plot.figure, arm, point) for _, point in points]
            if points:
                curves.append(Curve(arm, [x for x, _ in points], estimates))
        pictures[plot.figure] = sweep_picture(
            curves, x_label=plot.x_label, y_label=labels[plot.figure], is_log=plot.is_log
        )
    return write_pictures(pictures, folder, prefix=f"{experiment.name}-")
