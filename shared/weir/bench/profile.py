"""`weir profile`: what steps cost on this machine, or in a running worker, as coefficients of the cost model."""

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress

from weir.bench.step_shapes import shapes, time_grid
from weir.core.cost import StepCost
from weir.core.cost_fit import CostFit, CostSample, fit_cost
from weir.core.device import Precision
from weir.core.errors import WeirError
from weir.kv.geometry import PAGE_TOKENS
from weir.model.cpu.core_share import FixedShare
from weir.model.errors import ModelError
from weir.model.files.source import resolve_model
from weir.model.load import load_model
from weir.sim.profile import CostProfile, save_profile
from weir.worker.engine.cost_meter import METRIC_PREFIX


def main(
    model: str,
    precision: Precision,
    num_threads: int | None,
    rounds: int,
    num_pages: int,
    out: Path | None,
) -> int:
    """Measures on this machine. Returns the exit code: 1 if the model cannot be loaded or the file not written."""
    threads = num_threads or len(os.sched_getaffinity(0))
    try:
        profile, fit = measure(model, precision, threads, rounds, num_pages)
        print_fit(fit, profile.name)
        if out is not None:
            comment = f"Measured by `weir profile`: {threads} threads, {_quality(fit)}."
            save_profile(profile, out, comment)
    except (ModelError, WeirError, OSError) as error:
        Console(stderr=True).print(f"weir profile: {error}", markup=False, highlight=False)
        return 1
    return 0


def measure(
    model: str, precision: Precision, num_threads: int, rounds: int, num_pages: int
) -> tuple[CostProfile, CostFit]:
    """A profile whose memory has `num_pages` pages. Raises ModelError, WeirError.

    Takes about a minute with the built-in model."""
    import torch  # noqa: PLC0415 - of a worker; what a running one has fitted is read without

    source = resolve_model(model)
    torch.set_num_threads(num_threads)
    weights = load_model(source, precision, FixedShare(num_threads))
    config = weights.config
    grid = shapes(config.max_context_tokens, max_num_seqs=32, max_chunk_tokens=512)
    geometry = weights.page_geometry
    pages = np.zeros((max(shape.num_pages for shape in grid), geometry.page_bytes), np.uint8)
    runner = weights.runner_over(pages)
    runner.warm_up()
    samples: list[CostSample] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("steps", total=len(grid) * rounds)
        for sample in time_grid(grid, runner, config.vocab_size, rounds):
            samples.append(sample)
            progress.advance(task)
    fit = fit_cost(samples)
    profile = CostProfile(
        name=f"measured-{source.name}-{weights.arithmetic}",
        step=fit.cost,
        num_pages=num_pages,
        kv_bytes_per_token=geometry.page_bytes // PAGE_TOKENS,
        max_context_tokens=config.max_context_tokens,
    )
    return profile, fit


def print_fit(fit: CostFit, name: str) -> None:
    console = Console()
    console.print(f"{name}: {_quality(fit)}", markup=False, highlight=False)
    for entry in fields(StepCost):
        console.print(f"  {entry.name:<20} {getattr(fit.cost, entry.name):.6g}", markup=False, highlight=False)


def try_cost_of(metrics: Mapping[str, float], prefix: str = METRIC_PREFIX) -> StepCost | None:
    """What a worker has fitted to its own steps, as its metrics have it; None: nothing yet."""
    values = [metrics.get(prefix + entry.name) for entry in fields(StepCost)]
    known = [value for value in values if value is not None]
    return StepCost(*known) if len(known) == len(values) else None


def _quality(fit: CostFit) -> str:
    return (
        f"{fit.num_samples} steps ({fit.num_left_out} left out), R2 {fit.r2:.4f}, measured against fitted "
        f"{fit.error_p05:+.1%} / {fit.error_p50:+.1%} / {fit.error_p95:+.1%} (p5 / p50 / p95)"
    )
