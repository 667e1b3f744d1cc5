"""One worker process of a pair on one device: its engine, over page memory that came by a socket.

Pipes stand in for the network: commands come in, reports go out. Everything else is what a worker runs.
"""

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from weir.core.clock import SystemClock
from weir.engine.batching.batcher import Batcher, BatchLimits
from weir.engine.batching.prefill import PrefillBatcher
from weir.engine.batching.running import RunningBatcher
from weir.engine.loop import EngineLoop, LoopSettings
from weir.engine.memory.pages import PagePool
from weir.engine.messages import AddSequence, Command, EngineReport
from weir.engine.plan import ModelRunner
from weir.kv.arena.segment import Segment
from weir.kv.memory.device import DeviceMemory
from weir.kv.messages import HandedOff
from weir.worker.arena.arrivals import read_arrival

_RESERVE_PAGES = 64
_RESERVE_SLOTS = 4
_STOP_TIMEOUT_S = 10.0


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
        return RunningBatcher(spec.limits, PagePool(reserve_pages=_RESERVE_PAGES, reserve_slots=0), segment.record)
    pool = PagePool(reserve_pages=_RESERVE_PAGES, reserve_slots=_RESERVE_SLOTS)
    return PrefillBatcher(spec.limits, pool, segment.record)
