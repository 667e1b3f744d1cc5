"""`python -m benchmarks.wire`: processor time a token, of each process, printed as a table."""

import signal
import sys
from dataclasses import replace
from typing import Annotated

import typer

from benchmarks.wire.clients import Frontend, StreamLoad
from benchmarks.wire.measure import WireRound, measure, null_target, served_target, table
from weir.cli.console import fail

_SEED_STRIDE = 1000
_FRONTENDS: tuple[Frontend, ...] = ("http", "grpc")


def wire(
    model: Annotated[str, typer.Option(help="Known name, GGUF file or Hugging Face folder.")] = "smollm2-135m",
    null: Annotated[
        bool, typer.Option(help="A worker that computes nothing, and neither prefill nor transfer.")
    ] = False,
    step_ms: Annotated[float, typer.Option(min=0, help="Of that worker's steps. 0: as fast as they are taken.")] = 20.0,
    traces: Annotated[bool, typer.Option(help="The gateway before that worker sends its spans.")] = False,
    frontend: Annotated[str, typer.Option(help="http, grpc, or both in turns.")] = "both",
    num_requests: Annotated[int, typer.Option(min=1, help="Of one round.")] = 128,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 32,
    input_len: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 16,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="With prompts of their own.")] = 3,
) -> None:
    """Processor time a token, on a stack of its own that this starts.

    \b
    python -m benchmarks.wire
    python -m benchmarks.wire --null --concurrency 256 --num-requests 1024
    """
    chosen = _FRONTENDS if frontend == "both" else tuple(one for one in _FRONTENDS if one == frontend)
    if not chosen:
        fail(f"--frontend {frontend!r}: must be http, grpc or both")
    if traces and not null:
        fail("--traces: only with --null")
    step_s = step_ms / 1e3 if null else 0.0
    load = StreamLoad(model, num_requests, concurrency, input_len, output_len, step_s=step_s)
    found: dict[Frontend, list[WireRound]] = {one: [] for one in chosen}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the stack is ended
    try:
        with null_target(model, step_ms, traces) if null else served_target(model) as target:
            for number in range(rounds):
                for one in chosen:
                    found[one].append(measure(target, one, replace(load, seed=_SEED_STRIDE * (number + 1))))
    except (RuntimeError, OSError, ExceptionGroup) as error:
        fail(f"python -m benchmarks.wire: {error}")
    print("\n\n".join(table(one, of_one) for one, of_one in found.items()))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(wire)
    app(prog_name="python -m benchmarks.wire")
