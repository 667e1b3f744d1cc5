"""`weir profile`: what steps cost, measured."""

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from weir.cli import options
from weir.cli.console import error_line, fail, need_extra, stdout
from weir.core.device import PRECISION_HELP, Precision
from weir.core.errors import WeirError
from weir.core.roles import WORKER_ROLES
from weir.runtime.config import default_runtime_dir
from weir.runtime.stack.instances import choose_instance
from weir.runtime.stack.observe import try_observe


def profile(
    model: Annotated[str, typer.Option(help="Known name, GGUF file or Hugging Face folder.")] = "smollm2-135m",
    precision: Annotated[Precision, typer.Option(help=PRECISION_HELP)] = "auto",
    num_threads: Annotated[int | None, typer.Option(min=1, help="Threads of the forward pass. Default: cores.")] = None,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Times that each shape of a step is measured.")] = 3,
    num_pages: Annotated[int, typer.Option(min=1, help="Pages of memory to write into the profile.")] = 4096,
    out: Annotated[Path | None, typer.Option(help="Write a profile for `weir simulate` and `weir plan` here.")] = None,
    live: Annotated[bool, typer.Option("--live", help="Ask the workers of a running stack instead.")] = False,
    instance: options.Instance = "",
    grpc_port: options.InstancePort = None,
    runtime_dir: options.RuntimeDir = None,
) -> None:
    """Fit the cost of steps, by least squares, to steps of many shapes that this machine computes; about a minute.

    With --live: print what running workers have fitted to the steps that they served, as JSON.

    \b
    weir profile --out measured.yaml
    weir simulate trace.csv --profile measured.yaml
    weir profile --live
    """
    if live:
        _print_live(runtime_dir or default_runtime_dir(), instance, grpc_port)
        return
    need_extra("worker", "weir profile without --live")
    from weir.bench.profile import main as measure_profile

    raise typer.Exit(measure_profile(model, precision, num_threads, rounds, num_pages, out))


def _print_live(runtime_dir: Path, instance: str, grpc_port: int | None) -> None:
    from weir.bench.profile import try_cost_of

    try:
        paths = choose_instance(runtime_dir, instance, grpc_port)
    except WeirError as error:
        fail(error_line(error))
    report = asyncio.run(try_observe(paths))
    if report is None:
        fail(f"{paths.folder.name} is not running")
    costs = {
        process.name: cost
        for process in report.processes
        if process.role in WORKER_ROLES and (cost := try_cost_of(process.metrics)) is not None
    }
    stdout.out(json.dumps({name: asdict(cost) for name, cost in costs.items()}, indent=1), highlight=False)
    if not costs:
        fail("no worker has served steps that are various enough to tell their cost")
