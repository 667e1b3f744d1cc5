"""Rounds of a load on a stack, and what they cost each process."""

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop

from benchmarks.wire.clients import Frontend, StreamLoad, StreamsReceived, run_streams
from benchmarks.wire.null_stack import NullStack
from weir.bench.serving.figures import p99
from weir.testing.otlp import OtlpReceiver
from weir.testing.stack import Stack

_OF_ALL_THREADS = 2  # CPUCLOCK_SCHED of clock_getcpuclockid(3), which Python offers for its own process alone


@dataclass(frozen=True, slots=True)
class MeasuredStack:
    """A stack that runs: its ports, and the processes that are measured."""

    ports: dict[Frontend, int]
    pids: dict[str, int]
    ca: str = ""
    """That signed its certificate; empty: no TLS."""


@dataclass(frozen=True, slots=True)
class WireRound:
    """One run of the load. `us_a_token` by process."""

    us_a_token: dict[str, float]
    received: StreamsReceived


@contextmanager
def null_target(
    model: str, step_ms: float, with_traces: bool, gateway_module: str = "weir_gateway", *, with_tls: bool = False
) -> Iterator[MeasuredStack]:
    """Traces go to a receiver in this process, which waits meanwhile and is not measured."""
    with ExitStack() as held:
        folder = held.enter_context(tempfile.TemporaryDirectory(prefix="weir-wire-"))
        flags = ("--otlp-endpoint", held.enter_context(OtlpReceiver()).endpoint) if with_traces else ()
        stack = held.enter_context(NullStack(Path(folder), model, step_ms, (gateway_module, *flags), with_tls=with_tls))
        yield MeasuredStack({"http": stack.http_port, "grpc": stack.grpc_port}, stack.pids, stack.ca)


@contextmanager
def served_target(model: str) -> Iterator[MeasuredStack]:
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="weir-wire-")))
        stack = held.enter_context(Stack(folder, flags=("--model", model)))
        pids = {view.name: view.pid for view in stack.processes()}
        yield MeasuredStack({"http": stack.http_port, "grpc": stack.grpc_port}, pids)


def measure(target: MeasuredStack, frontend: Frontend, load: StreamLoad) -> WireRound:
    """The clients are in a process of their own, which is measured too."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as clients:
        client_pid = clients.submit(os.getpid).result()
        pids = {**target.pids, "clients": client_pid}
        load = replace(load, ca=target.ca)
        warm_up = replace(load, num_requests=load.concurrency, output_len=min(8, load.output_len), seed=load.seed + 1)
        clients.submit(_run, frontend, target.ports[frontend], warm_up).result()
        before_s = cpu_times_s(pids)
        received = clients.submit(_run, frontend, target.ports[frontend], load).result()
        after_s = cpu_times_s(pids)
    us = {name: 1e6 * (after_s[name] - before_s[name]) / received.num_tokens for name in pids}
    return WireRound(us, received)


def _run(frontend: Frontend, port: int, load: StreamLoad) -> StreamsReceived:
    return uvloop.run(run_streams(frontend, port, load))


def table(frontend: Frontend, rounds: Sequence[WireRound]) -> str:
    """Medians, and lowest to highest."""
    received = [one.received for one in rounds]
    rows = [(f"{name}, µs a token", [one.us_a_token[name] for one in rounds]) for name in rounds[0].us_a_token]
    rows += [
        ("tokens/s", [one.num_tokens / one.duration_s for one in received]),
        ("tokens a piece", [one.num_tokens / one.num_pieces for one in received]),
        ("gap p50, ms", [1e3 * statistics.median(one.gaps_s) for one in received]),
        ("gap p99, ms", [1e3 * p99(one.gaps_s) for one in received]),
    ]
    if all(one.ages_s for one in received):
        rows += [
            ("age of a token p50, ms", [1e3 * statistics.median(one.ages_s) for one in received]),
            ("age of a token p99, ms", [1e3 * p99(one.ages_s) for one in received]),
        ]
    lines = [f"| {frontend} | median | of {len(rounds)} |", "|---|---|---|"]
    lines += [
        f"| {name} | {statistics.median(values):.1f} | {min(values):.1f} to {max(values):.1f} |"
        for name, values in rows
    ]
    return "\n".join(lines)


def cpu_times_s(pids: Mapping[str, int]) -> dict[str, float]:
    """User and system time of each process so far, all of its threads.

    Raises RuntimeError for a process that is gone: figures of the others would say nothing.
    """
    return {name: _cpu_time_s(name, pid) for name, pid in pids.items()}


def _cpu_time_s(name: str, pid: int) -> float:
    try:
        return time.clock_gettime(~pid << 3 | _OF_ALL_THREADS)
    except OSError as error:
        raise RuntimeError(f"{name} (pid {pid}) has ended while it was measured") from error
