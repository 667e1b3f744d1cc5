"""`python -m benchmarks.wire.tls_cost`: what TLS costs, printed as Markdown. With and without it in turns.

streams    a stack around a worker that computes nothing, whose steps come as fast as they are taken, or
               each --step-ms, so that both variants send the same: tokens/s, and
           processor time a token of gateway, worker and clients
bytes      messages over one stream of grpc.aio, both ends in one process: processor seconds a GB
calls      one call on a new channel each, handshake and all: milliseconds, and processor time
"""

import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import grpc
import grpc.aio
import typer
import uvloop

from benchmarks.wire.clients import Frontend, StreamLoad
from benchmarks.wire.measure import MeasuredStack, WireRound, measure, null_target
from weir.cli.console import fail
from weir.core.addresses import LOOPBACK
from weir.rpc.channel import Dialer, PlainDialer
from weir.rpc.identities import CertifiedIdentity
from weir.rpc.server import make_server
from weir.rpc.tls.certificates import CertificateFiles
from weir.rpc.tls.credentials import TlsDialer, server_credentials
from weir.rpc.tls.watch import CertificateWatch
from weir.runtime.authority import authority_pair, issue_member, make_authority

_FRONTENDS: tuple[Frontend, ...] = ("grpc", "http")
_VARIANTS = ("plain", "TLS")
_SEED_STRIDE = 1000
_MESSAGE_BYTES = (400, 65_536)
"""A step of a few sequences, and what is large."""
_NUM_CALLS = 200
_INSTANCE = "cost"
Figures = dict[str, dict[str, list[float]]]
"""Row -> variant -> one of each round."""


class Ends:
    """Of one variant: a server in this process, and how it is reached."""

    def __init__(self, watch: CertificateWatch | None) -> None:
        self._dialer: Dialer = PlainDialer() if watch is None else TlsDialer(watch, _INSTANCE)
        self._server = make_server()
        handlers: dict[str, Any] = {
            "Take": grpc.stream_unary_rpc_method_handler(self._take),
            "Ask": grpc.unary_unary_rpc_method_handler(self._ask),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("cost.Cost", handlers),))
        where = f"{LOOPBACK}:0"
        port = (
            self._server.add_insecure_port(where)
            if watch is None
            else self._server.add_secure_port(where, server_credentials(watch))
        )
        self._address = f"{LOOPBACK}:{port}"

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(None)

    async def cpu_s_a_gb(self, message_bytes: int, num_bytes: int) -> float:
        message = os.urandom(message_bytes)
        num = num_bytes // message_bytes

        async def messages() -> AsyncIterator[bytes]:
            for _ in range(num):
                yield message

        async with self._dialer.open(self._address, "worker") as channel:
            await self._call(channel)
            began_s = time.process_time()
            method: Any = channel.stream_unary("/cost.Cost/Take")
            await method(messages())
            return (time.process_time() - began_s) / (num * message_bytes / 1e9)

    async def call_ms(self) -> tuple[float, float]:
        """Of a call on a channel of its own: on the clock, and of processors."""
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        for _ in range(_NUM_CALLS):
            async with self._dialer.open(self._address, "worker") as channel:
                await self._call(channel)
        clock_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        return 1e3 * clock_s / _NUM_CALLS, 1e3 * cpu_s / _NUM_CALLS

    async def _call(self, channel: grpc.aio.Channel) -> None:
        method: Any = channel.unary_unary("/cost.Cost/Ask")
        await method(b"", timeout=30)

    async def _take(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        del context
        async for _ in requests:
            pass
        return b""

    async def _ask(self, request: bytes, context: Any) -> bytes:
        del request, context
        return b""


async def wire_figures(folder: Path, rounds: int, num_mb: int) -> Figures:
    """Of bytes and calls."""
    make_authority(folder)
    made = issue_member(folder, CertifiedIdentity(_INSTANCE, "decode", "here"))
    files = CertificateFiles(str(made.cert), str(made.key), str(authority_pair(folder).cert))
    ends = dict(zip(_VARIANTS, (Ends(None), Ends(CertificateWatch(files))), strict=True))
    found: Figures = {}
    for one in ends.values():
        await one.start()
    for _ in range(rounds):
        for message_bytes in _MESSAGE_BYTES:
            # Small messages cost so much each that fewer bytes of them say as much.
            num_bytes = num_mb * 1_000_000 // (1 if message_bytes > 1000 else 40)
            for variant, one in ends.items():
                cost = await one.cpu_s_a_gb(message_bytes, num_bytes)
                _add(found, f"CPU s a GB, messages of {message_bytes} bytes", variant, cost)
        for variant, one in ends.items():
            clock_ms, cpu_ms = await one.call_ms()
            _add(found, "new channel and first call, ms", variant, clock_ms)
            _add(found, "new channel and first call, CPU ms", variant, cpu_ms)
    for one in ends.values():
        await one.stop()
    return found


@contextmanager
def both_stacks(model: str, step_ms: float) -> Iterator[Mapping[str, MeasuredStack]]:
    with ExitStack() as held:
        yield {
            variant: held.enter_context(null_target(model, step_ms, with_traces=False, with_tls=variant == "TLS"))
            for variant in _VARIANTS
        }


def stream_figures(targets: Mapping[str, MeasuredStack], rounds: int, load: StreamLoad) -> Figures:
    found: Figures = {}
    for number in range(rounds):
        for frontend in _FRONTENDS:
            # The other way round each time: what a round leaves behind meets both alike.
            for variant in _VARIANTS[:: 1 if number % 2 == 0 else -1]:
                seeded = replace(load, seed=_SEED_STRIDE * (number + 1))
                _add_round(found, frontend, variant, measure(targets[variant], frontend, seeded))
    return found


def _add_round(found: Figures, frontend: Frontend, variant: str, of: WireRound) -> None:
    _add(found, f"{frontend}: tokens/s", variant, of.received.num_tokens / of.received.duration_s)
    for name in ("gateway", "null worker", "clients"):
        _add(found, f"{frontend}: {name}, CPU µs a token", variant, of.us_a_token[name])


def _add(found: Figures, row: str, variant: str, value: float) -> None:
    found.setdefault(row, {}).setdefault(variant, []).append(value)


def table(found: Figures) -> str:
    """Medians with lowest and highest, and the ratio of the medians."""
    lines = ["| | without | with TLS | ratio |", "|---|---|---|---|"]
    for row, by_variant in found.items():
        plain, tls = (by_variant[variant] for variant in _VARIANTS)
        ratio = statistics.median(tls) / statistics.median(plain)
        lines.append(f"| {row} | {_cell(plain)} | {_cell(tls)} | {ratio:.2f} |")
    return "\n".join(lines)


def _cell(values: Sequence[float]) -> str:
    digits = 0 if statistics.median(values) >= 100 else 2
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def cost(
    model: Annotated[str, typer.Option(help="Known name, GGUF file or folder, for its tokenizer.")] = "smollm2-135m",
    rounds: Annotated[int, typer.Option(min=1, help="Each of both variants, in turns.")] = 5,
    num_requests: Annotated[int, typer.Option(min=1, help="Of one round of streams.")] = 256,
    concurrency: Annotated[int, typer.Option(min=1, help="Streams at a time.")] = 64,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 256,
    step_ms: Annotated[float, typer.Option(min=0, help="Of the worker's steps. 0: as fast as they are taken.")] = 0.0,
    num_mb: Annotated[int, typer.Option(min=1, help="MB of one round of bytes.")] = 512,
) -> None:
    """What TLS costs, on stacks of its own that this starts."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the stacks are ended
    load = StreamLoad(model, num_requests, concurrency, 16, output_len)
    try:
        with tempfile.TemporaryDirectory(prefix="weir-tls-") as folder:
            print(table(uvloop.run(wire_figures(Path(folder), rounds, num_mb))), flush=True)
        with both_stacks(model, step_ms) as targets:
            print(f"\n{table(stream_figures(targets, rounds, load))}")
    except (RuntimeError, OSError, ExceptionGroup) as error:
        fail(f"python -m benchmarks.wire.tls_cost: {error}")
    print(f"\nload of the machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(cost)
    app(prog_name="python -m benchmarks.wire.tls_cost")
