"""`python -m benchmarks.wire.gateway_cost`: what a token costs the gateway alone, by the number of streams, and how old
it is when its client has it. Printed as Markdown.

A worker that computes nothing gives each stream a token a step. In each round come first requests of two tokens, which
say what a request costs; what the answers cost beyond that is their tokens'. Only processor time of the gateway counts,
all of its threads: on a machine that others use ages are worth little, it is worth something. One after the other in
each round, so that what others do meets all alike:

    plain    as it is served: metrics are counted, and nobody scrapes them
    bare     nothing is counted of tokens and stages
    scraped  plain, and each second somebody reads /metrics
    traces   plain, and spans are sent
"""

import signal
import statistics
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Literal, get_args

import httpx
import typer

from benchmarks.wire.clients import Frontend, StreamLoad
from benchmarks.wire.measure import MeasuredStack, WireRound, measure, null_target
from weir.bench.serving.figures import p99
from weir.cli.console import fail

Variant = Literal["plain", "bare", "scraped", "traces"]

_FRONTENDS: tuple[Frontend, ...] = ("grpc", "http")
_SEED_STRIDE = 1000
_MIN_REQUESTS = 128
"""Of two tokens: enough of them for a figure."""
_SHORT = 2
_SCRAPE_INTERVAL_S = 1.0
_HEAD = (
    "| gateway | streams | µs a token | tokens a CPU-second | ms a request | tokens a message | age p50, p99, ms "
    "| gap p99, ms |\n|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True, slots=True)
class CostRound:
    """`us_a_token` without what the requests cost."""

    us_a_token: float
    ms_a_request: float
    answers: WireRound


def cost_round(target: MeasuredStack, frontend: Frontend, load: StreamLoad) -> CostRound:
    num_short = max(_MIN_REQUESTS, load.concurrency)
    short = replace(load, num_requests=num_short, output_len=_SHORT, seed=load.seed + 1, step_s=0.0)
    return cost_of(measure(target, frontend, short), num_short, measure(target, frontend, load), load.num_requests)


def cost_of(short: WireRound, num_short: int, answers: WireRound, num_answers: int) -> CostRound:
    """Of requests of two tokens, and of others."""
    s_a_request = _gateway_s(short) / num_short
    num_tokens = answers.received.num_tokens - _SHORT * num_answers
    spent_s = _gateway_s(answers) - s_a_request * num_answers
    return CostRound(1e6 * spent_s / num_tokens, 1e3 * s_a_request, answers)


def _gateway_s(answers: WireRound) -> float:
    return answers.us_a_token["gateway"] * answers.received.num_tokens / 1e6


def row(name: str, num_streams: int, rounds: Sequence[CostRound]) -> str:
    """Medians of the rounds; lowest to highest where more than one was made."""
    received = [one.answers.received for one in rounds]
    us = [one.us_a_token for one in rounds]
    ages = (
        _spread([1e3 * statistics.median(one.ages_s) for one in received], ".0f"),
        _spread([1e3 * p99(one.ages_s) for one in received], ".0f"),
    )
    cells = (
        name,
        str(num_streams),
        _spread(us, ".1f"),
        f"{1e6 / statistics.median(us):,.0f}",
        _spread([one.ms_a_request for one in rounds], ".2f"),
        f"{statistics.median(one.num_tokens / one.num_pieces for one in received):.1f}",
        ", ".join(ages),
        _spread([1e3 * p99(one.gaps_s) for one in received], ".0f"),
    )
    return "| " + " | ".join(cells) + " |"


def _spread(values: Sequence[float], form: str) -> str:
    middle, low, high = (format(one, form) for one in (statistics.median(values), min(values), max(values)))
    return middle if len(values) == 1 else f"{middle} ({low} to {high})"


@contextmanager
def _target(variant: Variant, model: str, step_ms: float) -> Iterator[MeasuredStack]:
    module = "benchmarks.wire.bare_gateway" if variant == "bare" else "weir_gateway"
    with ExitStack() as held:
        target = held.enter_context(null_target(model, step_ms, variant == "traces", module))
        if variant == "scraped":
            held.enter_context(_scraping(f"http://127.0.0.1:{target.ports['http']}/metrics"))
        yield target


@contextmanager
def _scraping(url: str) -> Iterator[None]:
    ended = threading.Event()
    errors: list[Exception] = []

    def scrape() -> None:
        try:
            with httpx.Client(timeout=60.0) as client:
                while not ended.wait(_SCRAPE_INTERVAL_S):
                    client.get(url).raise_for_status()
        except httpx.HTTPError as error:
            errors.append(error)

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if errors:
        raise RuntimeError(f"{url} could not be scraped: {errors[0]}")


def gateway_cost(
    model: Annotated[str, typer.Option(help="Known name, GGUF file or Hugging Face folder.")] = "smollm2-135m",
    streams: Annotated[str, typer.Option(help="Numbers of streams at a time, by commas.")] = "1,64,256,1024",
    frontend: Annotated[str, typer.Option(help="grpc, http, or both in turns.")] = "both",
    variants: Annotated[str, typer.Option(help="Of plain, bare, scraped, traces, by commas; in turns.")] = "plain",
    step_ms: Annotated[float, typer.Option(min=0.1, help="Of the worker's steps: a token for each stream.")] = 5.0,
    output_len: Annotated[int, typer.Option(min=3, help="Tokens of an answer.")] = 512,
    rounds: Annotated[int, typer.Option(min=1, help="With prompts of their own.")] = 3,
) -> None:
    """Processor time of the gateway a token, on stacks of its own that this starts.

    \b
    python -m benchmarks.wire.gateway_cost
    python -m benchmarks.wire.gateway_cost --variants plain,bare,traces --streams 256
    """
    chosen = _FRONTENDS if frontend == "both" else tuple(one for one in _FRONTENDS if one == frontend)
    if not chosen:
        fail(f"--frontend {frontend!r}: must be grpc, http or both")
    if unknown := [one for one in variants.split(",") if one not in get_args(Variant)]:
        fail(f"--variants {unknown[0]!r}: must be of {', '.join(get_args(Variant))}")
    if not all(one.isdigit() and int(one) for one in streams.split(",")):
        fail(f"--streams {streams!r}: must be numbers from 1 on, by commas")
    kinds: list[Variant] = [one for one in get_args(Variant) if one in variants.split(",")]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the stacks are ended
    print(_HEAD, flush=True)
    try:
        with ExitStack() as held:
            targets = {kind: held.enter_context(_target(kind, model, step_ms)) for kind in kinds}
            for one in chosen:
                for num_streams in map(int, streams.split(",")):
                    load = StreamLoad(model, num_streams, num_streams, 16, output_len, step_s=step_ms / 1e3)
                    print(_rows(targets, one, load, rounds), flush=True)
    except ExceptionGroup as group:
        fail(f"python -m benchmarks.wire.gateway_cost: {group.exceptions[0]!r}")
    except (RuntimeError, OSError) as error:
        fail(f"python -m benchmarks.wire.gateway_cost: {error}")


def _rows(targets: dict[Variant, MeasuredStack], frontend: Frontend, load: StreamLoad, num_rounds: int) -> str:
    found: dict[Variant, list[CostRound]] = {kind: [] for kind in targets}
    for number in range(num_rounds):
        seeded = replace(load, seed=_SEED_STRIDE * (number + 1))
        for kind, target in targets.items():
            found[kind].append(cost_round(target, frontend, seeded))
    return "\n".join(row(f"{frontend}, {kind}", load.concurrency, of_kind) for kind, of_kind in found.items())


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(gateway_cost)
    app(prog_name="python -m benchmarks.wire.gateway_cost")
