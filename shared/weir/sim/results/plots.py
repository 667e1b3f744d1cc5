"""Runs as pictures: latency distributions, the queue, what tenants got, and curves over load. PNG.

Drawn on canvases of their own (matplotlib's Agg): no display, no state that two drawings share.
"""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from weir.sim.results.metrics import Estimate, SimResult, after_warmup, ttft_s

_SIZE_IN = (7.0, 4.2)
_DOTS_PER_INCH = 110
_MAX_LINES = 12
"""Tenants drawn by themselves: those that had most."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Estimates along x, drawn with their intervals."""

    label: str
    x: Sequence[float]
    estimates: Sequence[Estimate]


def run_pictures(results: Mapping[str, SimResult]) -> dict[str, bytes]:
    """name -> PNG of one or several runs: `ttft`, `itl`, `queue`, and `tenants` of the first run that has several."""
    pictures = {
        "ttft": _png(lambda axes: _ttft(axes, results)),
        "itl": _png(lambda axes: _itl(axes, results)),
        "queue": _png(lambda axes: _queue(axes, results)),
    }
    shared = next(((name, result) for name, result in results.items() if len(result.tenant_service) > 1), None)
    if shared is not None:
        pictures["tenants"] = _png(lambda axes: _tenants(axes, *shared))
    return pictures


def sweep_picture(
    curves: Sequence[Curve], *, x_label: str, y_label: str, is_log: bool = False, target: float | None = None
) -> bytes:
    """PNG of one figure over load. `target`: a line to stay on one side of."""

    def draw(axes: Axes) -> None:
        for curve in curves:
            means = [estimate.mean for estimate in curve.estimates]
            (line,) = axes.plot(curve.x, means, marker="o", markersize=3, label=curve.label)
            low = [e.low if math.isfinite(e.low) else e.mean for e in curve.estimates]
            high = [e.high if math.isfinite(e.high) else e.mean for e in curve.estimates]
            axes.fill_between(curve.x, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
        if target is not None:
            axes.axhline(target, color="grey", linestyle=":", linewidth=1)
        if is_log:
            axes.set_yscale("log")
        _label(axes, x_label, y_label)

    return _png(draw)


def write_pictures(pictures: Mapping[str, bytes], folder: Path, prefix: str = "") -> list[Path]:
    """A PNG file each; the folder is made if need be. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, png in pictures.items():
        paths.append(folder / f"{prefix}{name}.png")
        paths[-1].write_bytes(png)
    return paths


def _ttft(axes: Axes, results: Mapping[str, SimResult]) -> None:
    for name, result in results.items():
        values = sorted(ttft_s(outcome) for outcome in after_warmup(result.outcomes) if outcome.is_finished)
        # Over all that were offered: a line that ends below 1 is a share that was never served.
        num_offered = len(after_warmup(result.outcomes))
        axes.step(values, [(i + 1) / num_offered for i in range(len(values))], where="post", label=name)
    axes.set_xscale("log")
    axes.set_ylim(0, 1)
    _label(axes, "time to first token (s)", "share of offered requests")


def _itl(axes: Axes, results: Mapping[str, SimResult]) -> None:
    for name, result in results.items():
        milliseconds = sorted(result.gap_counts_by_ms)
        counts = np.cumsum([result.gap_counts_by_ms[ms] for ms in milliseconds], dtype=np.float64)
        if len(counts):
            axes.step([ms + 1 for ms in milliseconds], counts / counts[-1], where="post", label=name)
    axes.set_xscale("log")
    axes.set_ylim(0, 1)
    _label(axes, "gap between two tokens (ms)", "share of gaps")


def _queue(axes: Axes, results: Mapping[str, SimResult]) -> None:
    for name, result in results.items():
        axes.step([t for t, _ in result.queue_lengths], [n for _, n in result.queue_lengths], where="post", label=name)
    _label(axes, "simulated time (s)", "requests queued")


def _tenants(axes: Axes, name: str, result: SimResult) -> None:
    most_first = sorted(result.tenant_service.items(), key=lambda item: (-item[1][-1][1] if item[1] else 0.0, item[0]))
    for tenant, service in most_first[:_MAX_LINES]:
        axes.step([t for t, _ in service], [amount for _, amount in service], where="post", label=tenant or "(default)")
    axes.set_title(name, fontsize=10)
    _label(axes, "simulated time (s)", "service (VTC units)")


def _label(axes: Axes, x_label: str, y_label: str) -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(visible=True, alpha=0.3)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8)


def _png(draw: Callable[[Axes], None]) -> bytes:
    figure = Figure(figsize=_SIZE_IN, dpi=_DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    draw(figure.add_subplot())
    buffer = io.BytesIO()
    # The program's version in the file would make equal pictures differ.
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
