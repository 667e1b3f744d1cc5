"""Rounds of a load on a stack, and what they cost each process."""

import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop

from benchmarks.wire.clients import Frontend, Received, StreamLoad, run_streams
from benchmarks.wire.cpu_time import cpu_times_s
from benchmarks.wire.null_stack import NullStack
from weir.bench.serving.serve import p99
from weir.testing.stack import Stack


@dataclass(frozen=True, slots=True)
class Target:
    """A stack that runs: its ports, and the processes that are measured."""

    ports: dict[Frontend, int]
    pids: dict[str, int]


@dataclass(frozen=True, slots=True)
class Round:
    """One run of the load. `us_a_token` by process."""

    us_a_token: dict[str, float]
    received: Received


@contextmanager
def null_target(model: str, step_ms: float) -> Iterator[Target]:
    with tempfile.TemporaryDirectory(prefix="weir-wire-") as folder, NullStack(Path(folder), model, step_ms) as stack:
        yield Target({"http": stack.http_port, "grpc": stack.grpc_port}, stack.pids)


@contextmanager
def served_target(model: str) -> Iterator[Target]:
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="weir-wire-")))
        stack = held.enter_context(Stack(folder, flags=("--model", model)))
        pids = {view.name: view.pid for view in stack.processes()}
        yield Target({"http": stack.http_port, "grpc": stack.grpc_port}, pids)


def measure(target: Target, frontend: Frontend, load: StreamLoad) -> Round:
    """The clients are in a process of their own, which is measured too."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as clients:
        client_pid = clients.submit(os.getpid).result()
        pids = {**target.pids, "clients": client_pid}
        warm_up = replace(load, num_requests=load.concurrency, output_len=min(8, load.output_len), seed=load.seed + 1)
        clients.submit(_run, frontend, target.ports[frontend], warm_up).result()
        before_s = cpu_times_s(pids)
        received = clients.submit(_run, frontend, target.ports[frontend], load).result()
        after_s = cpu_times_s(pids)
    us = {name: 1e6 * (after_s[name] - before_s[name]) / received.num_tokens for name in pids}
    return Round(us, received)


def _run(frontend: Frontend, port: int, load: StreamLoad) -> Received:
    return uvloop.run(run_streams(frontend, port, load))


def table(frontend: Frontend, rounds: Sequence[Round]) -> str:
    """Medians, and lowest to highest."""
    received = [one.received for one in rounds]
    rows = [(f"{name}, µs a token", [one.us_a_token[name] for one in rounds]) for name in rounds[0].us_a_token]
    rows += [
        ("tokens/s", [one.num_tokens / one.duration_s for one in received]),
        ("tokens a piece", [one.num_tokens / one.num_pieces for one in received]),
        ("gap p50, ms", [1e3 * statistics.median(one.gaps_s) for one in received]),
        ("gap p99, ms", [1e3 * p99(one.gaps_s) for one in received]),
    ]
    lines = [f"| {frontend} | median | of {len(rounds)} |", "|---|---|---|"]
    lines += [
        f"| {name} | {statistics.median(values):.1f} | {min(values):.1f} to {max(values):.1f} |"
        for name, values in rows
    ]
    return "\n".join(lines)
