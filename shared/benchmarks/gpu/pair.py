"""A prefill and a decode process on one device, end to end: prompts in, tokens out, pages changing owner in between.

this process: ownership of the pages     ── commands ──> prefill    both map the same page memory,
                                         <── reports ──  decode     which came by a socket

Pipes stand in for the network: commands come in, reports go out. Everything else is what a worker runs.
"""

import contextlib
import multiprocessing
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol

from weir.core.clock import SystemClock
from weir.core.life import Attempt
from weir.core.sampling import SamplingParams, StopRules
from weir.engine.batching.batcher import Batcher, BatchLimits
from weir.engine.batching.prefill import PrefillBatcher
from weir.engine.batching.running import RunningBatcher
from weir.engine.loop import EngineLoop, LoopSettings
from weir.engine.memory.pages import PagePool
from weir.engine.messages import (
    AddSequence,
    Arrival,
    Command,
    EngineReport,
    ForgetSequence,
    GivePages,
    HandOffReady,
    PageBundle,
    PagesWanted,
    SequenceEnded,
    TokenSampled,
)
from weir.engine.plan import ModelRunner
from weir.kv.arena.ownership import Move, OwnershipTable
from weir.kv.arena.segment import Segment
from weir.kv.geometry import ArenaGeometry, num_pages_for
from weir.kv.layout import PageState
from weir.kv.memory.device import DeviceMemory, send_memory
from weir.kv.messages import HandedOff, PageChain
from weir.kv.records.record import SequenceParams
from weir.worker.arena.arena import read_arrival

_READY_TIMEOUT_S = 120.0
_ROLES = ("prefill", "decode")
_LEASES = {"prefill": 1, "decode": 2}
_WATERMARK_PAGES = 64
_WATERMARK_SLOTS = 4
_STOP_TIMEOUT_S = 10.0


class PairFailed(Exception):
    """A worker died, was silent for too long, or gave a request up."""


@dataclass(frozen=True, slots=True)
class PairLoad:
    """What is asked of the pair: every prompt at once, greedy, `num_output_tokens` each."""

    prompts: tuple[tuple[int, ...], ...]
    num_output_tokens: int
    num_pages: int
    chunk_tokens: int = 512
    max_running: int = 256
    """Sequences in one worker's step. With 1 each runs alone, in both workers."""
    timeout_s: float = 60.0


@dataclass(slots=True)
class PairResult:
    """`hand_off_s` is the change of owner alone; times are seconds from the first prompt's start."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    token_s: dict[int, list[float]] = field(default_factory=dict)
    """When each token was reported."""
    hand_off_s: list[float] = field(default_factory=list)
    num_handed_off_pages: int = 0
    duration_s: float = 0.0
    num_free_pages_at_end: int = 0

    @property
    def first_token_s(self) -> list[float]:
        return [times[0] for times in self.token_s.values()]

    def inter_token_s(self, *, while_prefilling: bool) -> list[float]:
        """Times between two tokens of a request, but for that of the hand-off: those before the last prompt's first
        token, while both workers use the device, or those after it."""
        prefilled_s = max(self.first_token_s)
        return [
            later - earlier
            for times in self.token_s.values()
            for earlier, later in pairwise(times[1:])
            if (later <= prefilled_s) == while_prefilling
        ]


class RunnerKind(Protocol):
    """What of a pair depends on the device. Sent to the workers, so it must be picklable."""

    @property
    def page_bytes(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def create_memory(self, num_bytes: int) -> DeviceMemory: ...

    def receive_memory(self, connection: socket.socket) -> DeviceMemory: ...

    def make_runner(self, memory: DeviceMemory, num_pages: int) -> tuple[ModelRunner, Callable[[], None]]:
        """A runner over the first `num_pages` pages of the memory, and its warm-up."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker. `role` is prefill or decode."""

    role: str
    kind: RunnerKind
    segment_path: Path
    num_pages: int
    limits: BatchLimits


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker is warm."""


FromWorker = Ready | EngineReport
ToWorker = Command | HandedOff | None


def run_pair(kind: RunnerKind, load: PairLoad) -> PairResult:
    """Raises PairFailed."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weir-pair-")))
        longest = max(len(prompt) for prompt in load.prompts) + load.num_output_tokens
        geometry = ArenaGeometry(
            kind.page_bytes, load.num_pages, len(load.prompts) + 8, longest + 1, pages_on_device=True
        )
        segment = Segment.create(folder / "arena", geometry, "pair")
        stack.callback(segment.close)
        memory = kind.create_memory(geometry.page_memory_bytes)
        stack.callback(memory.close)
        limits = BatchLimits(
            max_num_seqs=load.max_running,
            max_num_batched_tokens=max(load.chunk_tokens, load.max_running),
            chunk_tokens=load.chunk_tokens,
            max_context_tokens=longest + 1,
            vocab_size=kind.vocab_size,
        )
        pipes = {}
        for role in _ROLES:
            spec = WorkerSpec(role, kind, segment.path, load.num_pages, limits)
            ours, theirs = socket.socketpair()
            pipe, process = _start(spec, theirs)
            stack.callback(_end, pipe, process)
            with ours:
                send_memory(ours, memory)
            pipes[role] = pipe
        pair = _Pair(segment, pipes, load)
        pair.wait_ready(time.monotonic() + _READY_TIMEOUT_S)
        return pair.run()


class _Pair:
    """Who holds which sequences and pages in one run."""

    def __init__(self, segment: Segment, pipes: dict[str, Connection], load: PairLoad) -> None:
        self._segment = segment
        self._table = OwnershipTable(segment.page_rows, segment.slot_rows)
        self._pipes = pipes
        self._load = load
        numbers = range(len(load.prompts))
        self._result = PairResult({number: [] for number in numbers}, {number: [] for number in numbers})
        self._open = set(self._result.token_ids)
        self._started_s = 0.0
        self._wanted: dict[str, PagesWanted] = {}
        self._num_given = dict.fromkeys(_ROLES, 0)

    def wait_ready(self, ends_at_s: float) -> None:
        for role in _ROLES:
            while not isinstance(self._receive(role, ends_at_s), Ready):
                pass

    def run(self) -> PairResult:
        self._started_s = time.monotonic()
        ends_at_s = self._started_s + self._load.timeout_s
        for number, prompt in enumerate(self._load.prompts):
            self._pipes["prefill"].send(AddSequence(Arrival(self._params(number, prompt))))
        while self._open:
            for role in self._ready_roles(ends_at_s):
                message = self._receive(role, ends_at_s)
                if isinstance(message, EngineReport):
                    self._on_report(role, message)
        self._result.duration_s = time.monotonic() - self._started_s
        self._wait_until_all_pages_are_back(ends_at_s)
        return self._result

    def _params(self, number: int, prompt: Sequence[int]) -> SequenceParams:
        num_tokens = len(prompt) + self._load.num_output_tokens
        return SequenceParams(
            request_id=f"{number:032x}",
            attempt=Attempt(1, 0),
            gateway_id="pair",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(temperature=0.0),
            stop=StopRules(self._load.num_output_tokens),
            num_reserved_pages=num_pages_for(num_tokens),
            traceparent="",
        )

    def _on_report(self, role: str, report: EngineReport) -> None:
        if report.fatal:
            raise PairFailed(f"{role}: {report.fatal}")
        for event in report.events:
            if isinstance(event, TokenSampled):
                number = int(event.key.request_id, 16)
                self._result.token_ids[number].append(event.token_id)
                self._result.token_s[number].append(time.monotonic() - self._started_s)
            elif isinstance(event, HandOffReady):
                self._hand_off(event)
            elif isinstance(event, SequenceEnded):
                if event.failure is not None:
                    raise PairFailed(f"{role}: {event.failure.message}")
                self._open.discard(int(event.key.request_id, 16))
        self._trade_pages(role, report)

    def _hand_off(self, ready: HandOffReady) -> None:
        pages = self._segment.record(ready.slot).summarize()
        if pages is None:
            raise PairFailed(f"slot {ready.slot} has no record")
        move = Move(ready.key.request_id, ready.key.attempt, _LEASES["prefill"], _LEASES["decode"])
        began_s = time.monotonic()
        self._table.hand_off(ready.slot, pages.page_ids, move)
        self._result.hand_off_s.append(time.monotonic() - began_s)
        self._result.num_handed_off_pages += len(pages.page_ids)
        self._pipes["prefill"].send(ForgetSequence(ready.key))
        generation = self._table.slot_generation(ready.slot)
        self._pipes["decode"].send(HandedOff(ready.slot, generation, ready.key.request_id, ready.key.attempt))

    def _trade_pages(self, role: str, report: EngineReport) -> None:
        if report.surplus:
            self._release(role, report.surplus)
        if report.num_gives == self._num_given[role]:  # else sent before the worker had seen the last bundle
            self._wanted.pop(role, None)
            if report.wanted is not None:
                self._wanted[role] = report.wanted
        for waiting in list(self._wanted):
            self._try_give(waiting, self._wanted[waiting])

    def _try_give(self, role: str, wanted: PagesWanted) -> None:
        acquired = self._table.try_acquire(_LEASES[role], wanted.num_pages, wanted.num_slots)
        if acquired is None and (wanted.least_pages or wanted.least_slots):
            acquired = self._table.try_acquire(_LEASES[role], wanted.least_pages, wanted.least_slots)
        if acquired is not None:
            del self._wanted[role]
            self._num_given[role] += 1
            self._pipes[role].send(GivePages(PageBundle(acquired.page_ids, acquired.slots)))

    def _release(self, role: str, bundle: PageBundle) -> None:
        for slot in bundle.slots:
            self._segment.record(slot).clear()
        chains = [PageChain(bundle.page_ids), *(PageChain(used.page_ids) for used in bundle.used)]
        self._table.release(_LEASES[role], chains, bundle.slots)

    def _wait_until_all_pages_are_back(self, ends_at_s: float) -> None:
        while any(self._table.pages_of(lease).size for lease in _LEASES.values()):
            for role in self._ready_roles(ends_at_s):
                message = self._receive(role, ends_at_s)
                if isinstance(message, EngineReport):
                    self._on_report(role, message)
        self._result.num_free_pages_at_end = self._table.num_pages(PageState.FREE)

    def _ready_roles(self, ends_at_s: float) -> list[str]:
        ready = wait(self._pipes.values(), timeout=max(0.0, ends_at_s - time.monotonic()))
        if not ready:
            raise PairFailed(f"silent: {len(self._open)} of {len(self._load.prompts)} requests are open")
        return [role for role, pipe in self._pipes.items() if pipe in ready]

    def _receive(self, role: str, ends_at_s: float) -> object:
        pipe = self._pipes[role]
        if not pipe.poll(max(0.0, ends_at_s - time.monotonic())):
            raise PairFailed(f"the {role} worker is silent")
        try:
            message: object = pipe.recv()
        except EOFError:
            raise PairFailed(f"the {role} worker has died; its error is above") from None
        return message


def _start(spec: WorkerSpec, memory_socket: socket.socket) -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_worker, args=(spec, theirs, memory_socket), name=spec.role, daemon=True)
    process.start()
    theirs.close()
    memory_socket.close()
    return ours, process


def _end(pipe: Connection, process: BaseProcess) -> None:
    with contextlib.suppress(OSError):  # it has died already
        pipe.send(None)
    process.join(10.0)
    if process.is_alive():
        process.kill()
        process.join()
    pipe.close()


def run_worker(spec: WorkerSpec, connection: Connection, memory_socket: socket.socket) -> None:
    """The process: until None comes, or the pipe ends."""
    with memory_socket:
        memory = spec.kind.receive_memory(memory_socket)
    segment = Segment.open(spec.segment_path)
    runner, warm_up = spec.kind.make_runner(memory, spec.num_pages)
    lock = threading.Lock()  # the engine's thread and this one both send

    def send(message: FromWorker) -> None:
        with lock:
            connection.send(message)

    loop = EngineLoop(_batcher(spec, segment), runner, send, LoopSettings(inbox_size=4096), SystemClock())
    loop.start(warm_up).result()
    send(Ready())
    try:
        while (message := _receive(connection)) is not None:
            loop.post(AddSequence(read_arrival(segment, message)) if isinstance(message, HandedOff) else message)
    finally:
        loop.stop(_STOP_TIMEOUT_S)
        connection.close()


def _receive(connection: Connection) -> ToWorker:
    try:
        message: ToWorker = connection.recv()
    except EOFError:
        return None
    return message


def _batcher(spec: WorkerSpec, segment: Segment) -> Batcher:
    if spec.role == "decode":
        return RunningBatcher(
            spec.limits, PagePool(watermark_pages=_WATERMARK_PAGES, watermark_slots=0), segment.record
        )
    pool = PagePool(watermark_pages=_WATERMARK_PAGES, watermark_slots=_WATERMARK_SLOTS)
    return PrefillBatcher(spec.limits, pool, segment.record)
