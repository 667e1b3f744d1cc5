"""`weir bench transfer`: how long a hand-off on one host takes, beside copying the pages that it does not copy.

A real transfer service in a process of its own, two real clients in this one, over a Unix socket. Sequences of 100 and
of 4,000 tokens go back and forth in turn (A B A B), so that whatever else the machine does falls on both alike.
"""

import asyncio
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import uvloop
from numpy.typing import NDArray
from rich.table import Table

from weir.bench.report import run_and_print
from weir.core.errors import Unavailable, WeirError
from weir.core.life import Attempt
from weir.core.sampling import SamplingParams, StopRules
from weir.kv.geometry import ArenaGeometry, PageGeometry, num_pages_for
from weir.kv.layout import layout_of
from weir.kv.records.record import SequenceParams
from weir.rpc.arena.client import ArenaClient, HandedOff, WorkerIdentity

SHORT_TOKENS = 100
LONG_TOKENS = 4000

_PAGES = PageGeometry(num_layers=30, num_kv_heads=3, head_dim=64, dtype_bytes=2)
"""Of the built-in model, SmolLM2-135M, in int8, whose keys and values are bfloat16."""
_NUM_SLOTS = 8
_DIGEST = "bench"
_ATTEMPT = Attempt()
_NUM_WARM_UPS = 20
_MAX_COPIES = 50
_START_TIMEOUT_S = 60.0
_ARRIVAL_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 15.0
_Pages = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Milliseconds."""

    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class SequenceResult:
    """One length: its hand-off, and copying the same pages within memory.

    `hand_off` is the sender's call, to the committed answer; `arrival` ends when the receiver knows of it as well.
    """

    num_tokens: int
    num_pages: int
    num_bytes: int
    num_bytes_copied: int
    hand_off: LatencySummary
    arrival: LatencySummary
    copy: LatencySummary


@dataclass(frozen=True, slots=True)
class TransferBenchmark:
    """`empty_call`: the same gRPC round trip with nothing to do in the service."""

    repeats: int
    empty_call: LatencySummary
    short: SequenceResult
    long: SequenceResult

    @property
    def hand_off_ratio(self) -> float:
        """p50 of the long sequence over p50 of the short one."""
        return self.long.hand_off.p50_ms / self.short.hand_off.p50_ms


def run_transfer_benchmark(repeats: int = 200) -> TransferBenchmark:
    """Starts a transfer service, measures, ends it. Raises Unavailable if the service cannot be started."""
    with tempfile.TemporaryDirectory(prefix="weir-bench-") as directory, _transfer_process(Path(directory)) as socket:
        return uvloop.run(_measure(socket, repeats))


def main(json_output: bool, repeats: int) -> int:
    """Prints a table, or JSON. Returns the exit code: 1 if the transfer service does not start or breaks."""
    return run_and_print(
        "weir bench transfer",
        lambda: run_transfer_benchmark(repeats),
        as_dict=lambda result: {**asdict(result), "hand_off_ratio": result.hand_off_ratio},
        tables=_tables,
        json_output=json_output,
        errors=(WeirError,),
    )


class _Samples:
    """Durations of one kind, in seconds."""

    def __init__(self) -> None:
        self._seconds: list[float] = []

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)

    async def time(self, work: Awaitable[object]) -> None:
        began_s = time.perf_counter()
        await work
        self.add(time.perf_counter() - began_s)

    def forget(self) -> None:
        """What was measured so far was for warming up."""
        self._seconds.clear()

    @property
    def timing(self) -> LatencySummary:
        p50_s, p99_s = np.percentile(self._seconds, (50, 99))
        return LatencySummary(round(float(p50_s) * 1e3, 4), round(float(p99_s) * 1e3, 4))


class _Worker:
    """One client with the sequences that were handed to it."""

    def __init__(self, socket: Path, worker_id: str) -> None:
        self.worker_id = worker_id
        self.arrived: asyncio.Queue[HandedOff] = asyncio.Queue()
        self.client = ArenaClient(
            socket,
            WorkerIdentity(worker_id, "decode", _PAGES.page_bytes, _DIGEST),
            on_handed_off=self.arrived.put_nowait,
        )

    async def begin_sequence(self, num_tokens: int) -> "_Sequence":
        """A published sequence whose prompt fills its pages with something."""
        acquired = await self.client.acquire(num_pages_for(num_tokens), 1)
        request_id = uuid.uuid4().hex
        prompt = tuple(range(num_tokens))
        params = SequenceParams(
            request_id, _ATTEMPT, "bench", prompt, SamplingParams(), StopRules(1), len(acquired.page_ids), ""
        )
        record = self.client.segment.record(acquired.slots[0])
        record.begin(params)
        record.set_block_table(acquired.page_ids)
        record.publish(num_tokens)
        pages = self.client.segment.pages
        pages[list(acquired.page_ids)] = 1
        return _Sequence(num_tokens, acquired.slots[0], request_id, acquired.page_ids, pages)


class _Sequence:
    """A sequence that is handed back and forth, and what was measured with it."""

    def __init__(self, num_tokens: int, slot: int, request_id: str, page_ids: tuple[int, ...], pages: _Pages) -> None:
        self._num_tokens = num_tokens
        self._slot = slot
        self._request_id = request_id
        self._page_ids = list(page_ids)
        self._pages = pages
        self._copy_target = np.ones((len(page_ids), pages.shape[1]), np.uint8)  # touched: as fast as it can be
        self._num_bytes_copied = 0
        self._hand_off, self._arrival, self._copy = _Samples(), _Samples(), _Samples()

    @property
    def samples(self) -> tuple[_Samples, ...]:
        return self._hand_off, self._arrival, self._copy

    async def pass_on(self, sender: _Worker, receiver: _Worker) -> None:
        """One hand-off."""
        began_s = time.perf_counter()
        receipt = await sender.client.hand_off(self._slot, self._request_id, _ATTEMPT, receiver.worker_id)
        self._hand_off.add(time.perf_counter() - began_s)
        await asyncio.wait_for(receiver.arrived.get(), _ARRIVAL_TIMEOUT_S)
        self._arrival.add(time.perf_counter() - began_s)
        self._num_bytes_copied += receipt.num_bytes_copied

    async def copy(self) -> None:
        """Copies the pages, in a thread: the clients' heartbeats must not wait for it."""
        self._copy.add(await asyncio.to_thread(self._time_copy))

    def result(self) -> SequenceResult:
        return SequenceResult(
            num_tokens=self._num_tokens,
            num_pages=len(self._page_ids),
            num_bytes=len(self._page_ids) * self._pages.shape[1],
            num_bytes_copied=self._num_bytes_copied,
            hand_off=self._hand_off.timing,
            arrival=self._arrival.timing,
            copy=self._copy.timing,
        )

    def _time_copy(self) -> float:
        began_s = time.perf_counter()
        np.take(self._pages, self._page_ids, axis=0, out=self._copy_target, mode="clip")
        return time.perf_counter() - began_s


async def _measure(socket: Path, repeats: int) -> TransferBenchmark:
    left, right = _Worker(socket, "left"), _Worker(socket, "right")
    await left.client.start()
    await right.client.start()
    try:
        short, long = await left.begin_sequence(SHORT_TOKENS), await left.begin_sequence(LONG_TOKENS)
        empty_call = _Samples()
        sender, receiver = left, right
        for repeat in range(_NUM_WARM_UPS + repeats):
            if repeat == _NUM_WARM_UPS:
                for samples in (empty_call, *short.samples, *long.samples):
                    samples.forget()
            await short.pass_on(sender, receiver)
            await empty_call.time(sender.client.acquire(0, 0))
            await long.pass_on(sender, receiver)
            await empty_call.time(sender.client.acquire(0, 0))
            sender, receiver = receiver, sender
        # On their own: a large copy leaves cold caches to whatever is measured next.
        for _ in range(min(repeats, _MAX_COPIES)):
            await short.copy()
            await long.copy()
    finally:
        await left.client.close()
        await right.client.close()
    return TransferBenchmark(repeats, empty_call.timing, short.result(), long.result())


@contextmanager
def _transfer_process(directory: Path) -> Iterator[Path]:
    """A transfer service with room for both sequences; yields its socket."""
    socket, ready_file = directory / "arena.sock", directory / "ready.json"
    num_pages = num_pages_for(SHORT_TOKENS) + num_pages_for(LONG_TOKENS)
    geometry = ArenaGeometry(_PAGES.page_bytes, num_pages + 1, _NUM_SLOTS, LONG_TOKENS)
    flags = {
        "instance": f"bench-{uuid.uuid4().hex[:8]}",
        "listen": f"unix:{socket}",
        "runtime-dir": directory,
        "ready-file": ready_file,
        "log-level": "warning",
        "page-bytes": geometry.page_bytes,
        "max-context-tokens": geometry.max_context_tokens,
        "model-digest": _DIGEST,
        "arena-bytes": layout_of(geometry).memory_bytes + geometry.page_bytes,
        "num-slots": _NUM_SLOTS,
        # The clients are this very process: a machine that stalls for seconds must not have it killed.
        "lease-ttl-ms": 60_000,
        "grace-s": 2,
    }
    arguments = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    process = subprocess.Popen([sys.executable, "-m", "weir_transfer", *arguments])
    try:
        _wait_ready(process, ready_file)
        yield socket
    finally:
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_ready(process: "subprocess.Popen[bytes]", ready_file: Path) -> None:
    ends_at_s = time.monotonic() + _START_TIMEOUT_S
    while not ready_file.exists():
        if process.poll() is not None or time.monotonic() > ends_at_s:
            raise Unavailable("the transfer service did not start; its log is above")
        time.sleep(0.02)


def _tables(result: TransferBenchmark) -> Iterator[Table | str]:
    lengths = (result.short, result.long)
    table = Table(title=f"Hand-off on one host, {result.repeats} of each length in turn (p50 / p99, ms)")
    table.add_column("")
    for sequence in lengths:
        table.add_column(f"{sequence.num_tokens:,} tokens", justify="right")
    table.add_row("pages", *(f"{one.num_pages} ({one.num_bytes / 2**20:.1f} MiB)" for one in lengths))
    table.add_row("hand-off", *(_shown(one.hand_off) for one in lengths))
    table.add_row("until the receiver knows of it", *(_shown(one.arrival) for one in lengths))
    table.add_row("bytes copied", *(str(one.num_bytes_copied) for one in lengths))
    table.add_row("an empty call to the service", *(_shown(result.empty_call) for _ in lengths))
    table.add_row("copying the same pages", *(_shown(one.copy) for one in lengths))
    yield table
    yield (f"{LONG_TOKENS:,} tokens take {result.hand_off_ratio:.2f} times as long as {SHORT_TOKENS:,}.")


def _shown(timing: LatencySummary) -> str:
    return f"{timing.p50_ms:.3f} / {timing.p99_ms:.3f}"
