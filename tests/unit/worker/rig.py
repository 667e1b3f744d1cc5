"""One prefill and one decode worker in this process: real gRPC servers, a hash for a model, the arena in memory."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import grpc.aio
from opentelemetry.trace import NoOpTracer, Tracer
from tests.unit.hubs import made_hub
from tests.unit.worker.in_memory_arena import InMemoryArena, InMemoryArenaClient

from weir.bus.in_memory import InMemoryBus, InMemoryHub
from weir.bus.protocol import Bus
from weir.core.sampling import SamplingParams
from weir.engine.memory.swapping import HostPages
from weir.engine.plan import ModelRunner, StepPlan, StepResult
from weir.kv.geometry import ArenaGeometry
from weir.kv.memory.device import ArenaMemory
from weir.kv.messages import HandedOff
from weir.rpc.channel import make_channel
from weir.rpc.conversions import sampling_to_pb
from weir.rpc.server import ErrorGuard, make_server
from weir.runtime.admin import AdminService, Description, Identity
from weir.runtime.service import ServiceContext
from weir.testing.runner import HashRunner, reference_tokens
from weir.wire.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from weir.worker.arena.arena import Arena
from weir.worker.config import WorkerConfig
from weir.worker.engine.model_loading import LoadedModel, ModelSpec
from weir.worker.requests.request_manager import RequestLimits
from weir.worker.role import Role, RoleParts
from weir.worker.roles.config import DecodeConfig
from weir.worker.roles.decode import DecodeRole
from weir.worker.roles.prefill import PrefillRole
from weir.worker.shell import ShellOutside, WorkerShell

TIMEOUT_S = 30.0
VOCAB_SIZE = 500
MAX_CONTEXT_TOKENS = 400
NUM_PAGES = 128
NUM_SLOTS = 32
INSTANCE = "rig"
GATEWAY = "gateway-0-11111111"


@dataclass
class RunningWorker:
    """A worker, the arena client and the buses that it uses, and why it asked its process to shut down."""

    worker_id: str
    address: str
    shell: WorkerShell
    arena: InMemoryArenaClient
    buses: list[InMemoryBus]
    server: grpc.aio.Server
    shutdowns: list[str]

    def metrics(self) -> dict[str, float]:
        description = self.shell.describe()
        assert description.integrity_errors == ()
        return dict(description.metrics)

    def is_idle(self) -> bool:
        metrics = self.metrics()
        return not any(metrics[name] for name in ("num_live", "num_running", "num_waiting", "num_held_pages"))


@dataclass
class Rig:
    """Both workers and everything around them. `on_run` of a role may slow its steps down or make them fail."""

    arena: InMemoryArena
    hub: InMemoryHub
    workers: list[RunningWorker] = field(default_factory=list)
    on_run: dict[str, Callable[[StepPlan], None]] = field(default_factory=dict)

    @property
    def prefill(self) -> RunningWorker:
        return self.workers[0]

    @property
    def decode(self) -> RunningWorker:
        return self.workers[1]

    async def kill(self, worker: RunningWorker) -> None:
        """As kill -9 between two steps: nothing more comes from it, and the arena sees its process exit."""
        self.workers.remove(worker)
        await worker.shell._host.stop(TIMEOUT_S)
        self.arena.end_process(worker.worker_id)
        await worker.server.stop(None)
        await worker.shell.stop()

    async def wait_idle(self) -> None:
        """Until every page is free again, with everything in order."""
        geometry = self.arena.segment.geometry
        await eventually(lambda: self.arena.num_free_pages == geometry.num_pages)
        await eventually(lambda: self.arena.num_free_slots == geometry.num_slots)
        for worker in self.workers:
            # The arena gets freed pages before the engine's next report counts them.
            await eventually(worker.is_idle)


class Stream:
    """One `Serve` stream, and what came over it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(channel)
        self.call = stub.Serve()
        self.frames: list[worker_pb2.StepFrame] = []

    async def open(self, gateway_id: str) -> str:
        await self.send(hello=worker_pb2.Hello(gateway_id=gateway_id))
        response = await asyncio.wait_for(self.call.read(), TIMEOUT_S)
        assert isinstance(response, worker_pb2.ServeResponse)
        return response.welcome.worker_id

    async def send(self, **command: Any) -> None:
        await self.call.write(worker_pb2.ServeRequest(**command))

    async def next_update(self, request_id: str = "") -> worker_pb2.SequenceUpdate:
        """The next update (of this request); others of the same frames are skipped."""
        while True:
            response = await asyncio.wait_for(self.call.read(), TIMEOUT_S)
            assert isinstance(response, worker_pb2.ServeResponse), "the stream has ended"
            self.frames.append(response.step_frame)
            for update in response.step_frame.updates:
                if request_id in ("", update.request_id):
                    return update

    async def wait_taken(self) -> None:
        """Until the worker has taken all that was sent here, which it does in order. Updates meanwhile are skipped."""
        unknown = worker_pb2.Resume(request_id=uuid4().hex, attempt=types_pb2.Attempt(dispatch=1))
        await self.send(resume=unknown)
        update = await self.next_update(unknown.request_id)
        assert update.error.reason == worker_pb2.WORKER_ERROR_REASON_UNKNOWN_REQUEST

    async def next_frame(self) -> worker_pb2.StepFrame:
        response = await asyncio.wait_for(self.call.read(), TIMEOUT_S)
        assert isinstance(response, worker_pb2.ServeResponse), "the stream has ended"
        return response.step_frame

    async def receive_all(self, request_id: str) -> "Received":
        """All tokens of a request until its sequence has ended on this worker."""
        received = Received()
        while True:
            response = await asyncio.wait_for(self.call.read(), TIMEOUT_S)
            assert isinstance(response, worker_pb2.ServeResponse), "the stream has ended"
            self.frames.append(response.step_frame)
            for update in response.step_frame.updates:
                if update.request_id == request_id:
                    received.add(update)
            if received.last.finish_reason or received.last.handed_off or received.last.HasField("error"):
                return received


@dataclass
class Received:
    """The tokens of one request by index, and its last update."""

    tokens: dict[int, int] = field(default_factory=dict)
    last: worker_pb2.SequenceUpdate = field(default_factory=worker_pb2.SequenceUpdate)

    def add(self, update: worker_pb2.SequenceUpdate) -> None:
        for index, token_id in enumerate(update.token_ids, update.first_index):
            assert self.tokens.setdefault(index, token_id) == token_id
        self.last = update

    @property
    def token_ids(self) -> list[int]:
        assert sorted(self.tokens) == list(range(len(self.tokens)))
        return [self.tokens[index] for index in range(len(self.tokens))]


def start_command(decode_worker_id: str, **changes: Any) -> worker_pb2.Start:
    values: dict[str, Any] = {
        "request_id": uuid4().hex,
        "attempt": types_pb2.Attempt(dispatch=1),
        "prompt_token_ids": range(40),
        "sampling": sampling_to_pb(SamplingParams(temperature=0.0, seed=1)),
        "max_tokens": 12,
        "decode_worker_id": decode_worker_id,
        "num_reserved_pages": 25,
    }
    return worker_pb2.Start(**(values | changes))


def resume_command(start: worker_pb2.Start, next_index: int = 0, *, awaits_hand_off: bool = True) -> worker_pb2.Resume:
    return worker_pb2.Resume(
        request_id=start.request_id, attempt=start.attempt, next_index=next_index, awaits_hand_off=awaits_hand_off
    )


def cancel_command(start: worker_pb2.Start) -> worker_pb2.Cancel:
    return worker_pb2.Cancel(request_id=start.request_id, attempt=start.attempt)


def expected_tokens(start: worker_pb2.Start) -> list[int]:
    params = SamplingParams(temperature=0.0, seed=start.sampling.seed)
    return reference_tokens(tuple(start.prompt_token_ids), params, start.max_tokens, VOCAB_SIZE)


def hold(release: threading.Event) -> None:
    """Keeps a step from ending."""
    assert release.wait(TIMEOUT_S)


async def begin(streams: tuple[Stream, Stream], start: worker_pb2.Start) -> None:
    """As a gateway does: the decode worker is asked first."""
    await streams[1].send(resume=resume_command(start))
    await streams[0].send(start=start)


async def begin_together(rig: Rig, streams: tuple[Stream, Stream], starts: list[worker_pb2.Start]) -> None:
    """No decode step ends before all are handed over, and then each takes a while."""
    num_hand_offs, are_there = rig.arena.num_hand_offs, threading.Event()

    def step(plan: StepPlan) -> None:
        hold(are_there)
        time.sleep(0.02)

    rig.on_run["decode"] = step
    for start in starts:
        await begin(streams, start)
    await eventually(lambda: rig.arena.num_hand_offs == num_hand_offs + len(starts))
    are_there.set()


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 - what it waits for lies in other threads and processes
            await asyncio.sleep(0.01)


@asynccontextmanager
async def connected(worker: RunningWorker, gateway_id: str) -> AsyncIterator[Stream]:
    async with make_channel(worker.address) as channel:
        stream = Stream(channel)
        assert await stream.open(gateway_id) == worker.worker_id
        yield stream
        stream.call.cancel()


@asynccontextmanager
async def running_rig(
    tracer: Tracer | None = None,
    gateway_gone_s: float = 5.0,
    runner: ModelRunner | None = None,
    num_decode: int = 1,
    window: int | None = None,
) -> AsyncIterator[Rig]:
    """`window`: of all layers of the model."""
    arena = InMemoryArena(ArenaGeometry(64, NUM_PAGES, NUM_SLOTS, MAX_CONTEXT_TOKENS), is_alone=num_decode == 1)
    # Both workers compute in the same pages, as they would in one segment.
    runner = runner or HashRunner(NUM_PAGES, VOCAB_SIZE, window=window)
    spec = ModelSpec("hash", VOCAB_SIZE, MAX_CONTEXT_TOKENS, digest="", page_bytes=64, window=window)
    rig = Rig(arena, made_hub(INSTANCE))
    bounds = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_stall_s": 1.0, "target_step_ms": 0.0}

    def make_prefill(parts: RoleParts) -> Role:
        return PrefillRole(parts, tracer or NoOpTracer())

    def make_decode(parts: RoleParts) -> Role:
        return DecodeRole(parts, DecodeConfig(swap_bytes=0), tracer or NoOpTracer())

    try:
        decoders = [("decode", 64, make_decode)] * num_decode
        for role, chunk_tokens, make_role in (("prefill", 32, make_prefill), *decoders):
            config = WorkerConfig(instance=INSTANCE, chunk_tokens=chunk_tokens, **bounds)  # type: ignore[arg-type]
            await _start_worker(role, config, rig, spec, runner, make_role, gateway_gone_s)
        yield rig
    finally:
        rig.on_run.clear()
        for worker in rig.workers:
            await worker.shell.drain(0.5)
            await worker.shell.stop()
            await worker.server.stop(0.5)
        assert arena.num_free_pages == NUM_PAGES
        rig.hub.stop()


async def _start_worker(
    role: str,
    config: WorkerConfig,
    rig: Rig,
    spec: ModelSpec,
    runner: ModelRunner,
    make_role: Callable[[RoleParts], Role],
    gateway_gone_s: float,
) -> None:
    """The worker is the rig's from the start, so that one whose start fails is stopped too."""
    worker_id = f"{role}-0-{uuid4().hex[:8]}"
    server = make_server([ErrorGuard()])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    shutdowns: list[str] = []
    admin = AdminService(Identity(role, worker_id, ""), Description)
    context = ServiceContext(config, role, worker_id, address, server, NoOpTracer(), shutdowns.append, admin)
    arenas: list[InMemoryArenaClient] = []
    buses: list[InMemoryBus] = []

    def make_arena(on_handed_off: Callable[[HandedOff], None]) -> Arena:
        arenas.append(InMemoryArenaClient(rig.arena, worker_id, on_handed_off))
        return arenas[0]

    def load_model(memory: ArenaMemory) -> LoadedModel:
        return LoadedModel(_Hooked(runner, role, rig.on_run), _warm_up, HostPages(memory.segment.pages))

    async def connect_bus() -> Bus:
        buses.append(rig.hub.connect())
        return buses[-1]

    shell = WorkerShell(
        context,
        spec,
        RequestLimits(max_live=16, takes_hand_offs=role == "decode", retained_s=2.0, gateway_gone_s=gateway_gone_s),
        make_role,
        ShellOutside(make_arena, load_model, connect_bus),
    )
    worker_pb2_grpc.add_WorkerServicer_to_server(shell.servicer, server)
    rig.workers.append(RunningWorker(worker_id, address, shell, arenas[0], buses, server, shutdowns))
    await server.start()
    await shell.start()


def _warm_up() -> None:
    """As a real model does: what the first sampled token imports takes seconds on a busy machine."""
    reference_tokens((1,), SamplingParams(temperature=0.9, top_p=0.9), 1, VOCAB_SIZE)


@dataclass
class _Hooked:
    """The shared runner with a hook for each role's steps."""

    runner: ModelRunner
    role: str
    on_run: dict[str, Callable[[StepPlan], None]]

    def run(self, plan: StepPlan) -> StepResult:
        if self.role in self.on_run:
            self.on_run[self.role](plan)
        return self.runner.run(plan)
