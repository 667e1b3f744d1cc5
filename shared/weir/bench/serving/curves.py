"""Latency over throughput, of one server or several, as PNG and as a page of HTML that loads nothing.

A point is what a server did at one rate or concurrency. Where a curve turns upward it is full; where it turns back it
does less the more is asked of it.
"""

import html
import io
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from weir.bench.serving.records import Point, ServerCurve

_SIZE_IN = (11.0, 8.0)
_DOTS_PER_INCH = 110
_LATENCIES = {"ttft": "time to first token", "tpot": "time per output token", "e2el": "end to end"}
_AXIS_TITLES = {"request_rate": "offered requests/s", "max_concurrency": "requests in flight"}
_COLUMNS = {
    "request_throughput": "requests/s",
    "request_goodput": "good requests/s",
    "output_throughput": "output tokens/s",
    "median_ttft_ms": "TTFT p50, ms",
    "p99_ttft_ms": "TTFT p99, ms",
    "median_tpot_ms": "TPOT p50, ms",
    "p99_tpot_ms": "TPOT p99, ms",
    "median_itl_ms": "ITL p50, ms",
    "p99_itl_ms": "ITL p99, ms",
    "median_e2el_ms": "E2EL p50, ms",
    "p99_e2el_ms": "E2EL p99, ms",
    "p99_client_lateness_ms": "client late p99, ms",
    "completed": "completed",
    "failed": "failed",
}
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: #1b1b1b }
svg { width: 100%; height: auto }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .6rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left }
.failed { color: #b00020; font-weight: 600 }
"""


@dataclass(frozen=True, slots=True)
class Pictures:
    """The same drawing twice."""

    png: bytes
    svg: str


def pictures(curves: Sequence[ServerCurve], axis: str) -> Pictures:
    """Median (dashed) and p99 of each latency over output tokens a second, and what was served of what was offered."""
    figure = Figure(figsize=_SIZE_IN, layout="constrained")
    panels = figure.subplots(2, 2).flat
    for panel, (key, title) in zip(panels, _LATENCIES.items(), strict=False):
        for curve in curves:
            _latency(panel, curve, key)
        _label(panel, "output tokens/s", f"{title}, ms (p99; dashed: median)")
        if any(point.figures[f"p99_{key}_ms"] for curve in curves for point in curve.points):
            panel.set_yscale("log")
    last = figure.axes[-1]
    for curve in curves:
        _served(last, curve)
    _label(last, _AXIS_TITLES[axis], "served requests/s (dotted: good)")
    png, svg = io.BytesIO(), io.BytesIO()
    FigureCanvasAgg(figure).print_figure(png, format="png", dpi=_DOTS_PER_INCH)
    FigureCanvasSVG(figure).print_figure(svg, format="svg", metadata={"Date": None})
    text = svg.getvalue().decode()
    return Pictures(png.getvalue(), text[text.index("<svg") :])


def page(curves: Sequence[ServerCurve], axis: str, svg: str) -> str:
    """HTML: the drawing, and a row a point."""
    heads = "".join(f"<th>{title}</th>" for title in ("server", _AXIS_TITLES[axis], *_COLUMNS.values()))
    rows = "".join(_row(curve.name, point) for curve in curves for point in curve.points)
    names = html.escape(", ".join(curve.name for curve in curves))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Latency and throughput: {names}</title>'
        f"<style>{_STYLE}</style></head><body><h1>Latency and throughput</h1><p>{names}</p>\n{svg}\n"
        f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div></body></html>\n'
    )


def _row(name: str, point: Point) -> str:
    cells = [f"<td>{html.escape(name)}</td>", f"<td>{point.value:g}</td>"]
    for key in _COLUMNS:
        value = point.figures.get(key)
        text = "-" if value is None else f"{value:,.0f}" if key in ("completed", "failed") else f"{value:,.2f}"
        cells.append(f'<td class="failed">{text}</td>' if key == "failed" and value else f"<td>{text}</td>")
    return f"<tr>{''.join(cells)}</tr>\n"


def _latency(axes: Axes, curve: ServerCurve, key: str) -> None:
    points = [point for point in curve.points if point.figures["completed"]]
    x = [_number(point, "output_throughput") for point in points]
    (line,) = axes.plot(x, [_number(point, f"p99_{key}_ms") for point in points], marker="o", label=curve.name)
    medians = [_number(point, f"median_{key}_ms") for point in points]
    axes.plot(x, medians, marker=".", linestyle="--", color=line.get_color(), alpha=0.7)
    for point, at in zip(points, x, strict=True):
        place = (at, _number(point, f"p99_{key}_ms"))
        axes.annotate(f"{point.value:g}", place, textcoords="offset points", xytext=(4, 4), fontsize=7)


def _served(axes: Axes, curve: ServerCurve) -> None:
    x = [point.value for point in curve.points]
    served = [_number(point, "request_throughput") for point in curve.points]
    (line,) = axes.plot(x, served, marker="o", label=curve.name)
    if any(point.figures.get("request_goodput") is not None for point in curve.points):
        good = [_number(point, "request_goodput") for point in curve.points]
        axes.plot(x, good, marker=".", linestyle=":", color=line.get_color())


def _number(point: Point, key: str) -> float:
    return float(point.figures.get(key) or 0.0)


def _label(axes: Axes, x_label: str, y_label: str) -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(visible=True, alpha=0.3)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8)
