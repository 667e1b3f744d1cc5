"""The processes of a stack as their programs make them, with the world's network, bus, engine and time around them."""

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from opentelemetry.trace import NoOpTracer

from tests.simulation.arenas import ARENA_SETTINGS, PAGE_BYTES, Host
from tests.simulation.engine import TurnedInLoop
from tests.simulation.exchange import PAGES_PORT, CountedFetches, PagesDialer
from tests.simulation.grpc_client import SimChannel
from tests.simulation.grpc_server import SimServer
from tests.simulation.loop import PROCESS, SimProcess
from tests.simulation.network import SimDialer
from tests.simulation.page_streams import SimPageStreams
from tests.unit.gateway.fake_model import VOCAB_SIZE, byte_model
from weir.bus.protocol import Bus
from weir.bus.subjects import Subjects
from weir.core.errors import WeirError
from weir.engine.memory.swapping import HostPages
from weir.kv.geometry import PAGE_TOKENS
from weir.kv.memory.device import ArenaMemory
from weir.kv.messages import HandedOff
from weir.kv.prefixes import PrefixIndex
from weir.rpc.arena.client import ArenaAccess, ArenaClient, WorkerIdentity
from weir.rpc.body_budget import BodyBudget
from weir.rpc.server import ErrorGuard, ReadinessGuard
from weir.runtime.admin import AdminService, Description, Identity
from weir.runtime.service import ServiceContext
from weir.scheduling.limits import CoreLimits, LaneLimits
from weir.testing.runner import HashRunner, LaunchingHashRunner
from weir.wire.v1 import inference_pb2_grpc
from weir.worker.arena.arena import Arena
from weir.worker.config import WorkerConfig
from weir.worker.engine.model_loading import LoadedModel, ModelSpec
from weir.worker.process import WorkerProcess
from weir.worker.role import RoleParts
from weir.worker.roles.config import DecodeConfig, PrefillConfig
from weir.worker.roles.kinds import KINDS
from weir.worker.shell import ShellOutside, WorkerShell
from weir_gateway.batches.jobs import BatchSettings
from weir_gateway.driving.adoption import AdoptionSettings
from weir_gateway.driving.driver import DriverSettings
from weir_gateway.driving.scheduler_port import SchedulerPortSettings
from weir_gateway.frontends.grpc_frontend import InferenceServicer
from weir_gateway.gateway import GatewayComponent, GatewayLoaders, GatewayProcess
from weir_gateway.keys.keyed_requests import KeySettings
from weir_gateway.output_lengths import OutputLengths
from weir_gateway.settings import GatewaySettings
from weir_scheduler.component import SchedulerComponent, SchedulerSettings
from weir_transfer.exchange.page_exchange import PagesPort
from weir_transfer.prefix_events import PrefixEventPublisher
from weir_transfer.service import TransferService

if TYPE_CHECKING:
    from tests.simulation.world import World

INSTANCE = "sim"
MODEL = "bytes"
DIGEST = "digest"
MAX_CONTEXT = 256
GRACE_S = 2.0
_WORKER_SERVICE, _INFERENCE, _ARENA = "weir.v1.Worker", "weir.v1.Inference", "weir.v1.Arena"

GATEWAY_SETTINGS = GatewaySettings(
    instance=INSTANCE,
    port=SchedulerPortSettings(outage_s=6.0, accepted_outage_s=15.0),
    driver=DriverSettings(max_requests=64, max_queue_s=40.0, no_progress_s=12.0),
    adoption=AdoptionSettings(wait_s=2.0, successor_wait_s=6.0),
    keys=KeySettings(resume_s=8.0, end_wait_s=10.0),
    batches=BatchSettings(url=""),
    keeps_responses=False,
)
LIMITS = CoreLimits(
    lanes=(LaneLimits("interactive", 100, 30.0), LaneLimits("standard", 100, 30.0)),
    default_lane="standard",
    gather_s=1.0,
)


class Component(Protocol):
    async def start(self) -> None: ...

    async def drain(self, deadline_s: float) -> None: ...

    async def stop(self) -> None: ...

    def describe(self) -> Description: ...


@dataclass
class Place:
    """One process of the stack, over all its starts."""

    role: str
    index: int
    host: Host
    address: str
    process: SimProcess | None = None
    component: Component | None = None
    ask_to_end: Callable[[str], None] | None = None
    is_ready: bool = False
    num_starts: int = 0
    fetches: CountedFetches | None = None
    """Of the newest transfer service that exchanges pages."""

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"


class _NoHttp:
    """Sockets are not simulated."""

    port = 0

    def __init__(self, *_: object) -> None:
        """As `HttpServer` is made."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {}


async def run_process(world: "World", place: Place, process_id: str) -> None:
    """As `weir.runtime.service` does it, from the start to the exit."""
    asked: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def ask(reason: str) -> None:
        if not asked.done():
            world.note(f"{place.name} ends: {reason}")
            asked.set_result(reason)
            place.ask_to_end = None

    place.ask_to_end = ask
    service = {"gateway": _INFERENCE, "transfer": _ARENA}.get(place.role, _WORKER_SERVICE)
    readiness = ReadinessGuard([service])
    server = SimServer(world.network, [readiness, ErrorGuard()])
    server.add_insecure_port(place.address)
    context = _context_of(world, place, process_id, server, ask)
    component = place.component = await _BUILDERS[place.role](world, place, context)
    await server.start()
    starting = asyncio.create_task(component.start())
    either: list[asyncio.Future[Any]] = [starting, asked]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if starting.done():
        try:
            starting.result()
            readiness.open()
            place.is_ready = True
            world.note(f"{place.name} is ready as {process_id}")
        except WeirError as error:
            ask(f"could not start: {error}")
    await asked
    starting.cancel()
    await _bounded(component.drain(GRACE_S), GRACE_S + 1.0)
    await _bounded(component.stop(), 5.0)
    await _bounded(server.stop(1.0), 2.0)
    context.resources.close()
    world.on_exit(place)


async def _bounded(work: Awaitable[None], limit_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(work, limit_s)


def _context_of(
    world: "World", place: Place, process_id: str, server: SimServer, ask: Callable[[str], None]
) -> ServiceContext[Any]:
    config: Any = _config_of(world, place, place.role) if place.role in KINDS else None
    admin = AdminService(Identity(place.role, process_id, ""), Description)
    return ServiceContext(config, place.role, process_id, place.address, server, NoOpTracer(), ask, admin)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _PrefillAhead(PrefillConfig):
    """Launches a step while one runs, as only a GPU's worker does."""

    @property
    def is_async_scheduling(self) -> bool:
        return True


@dataclass(frozen=True)
class _DecodeAhead(DecodeConfig):
    """As above."""

    @property
    def is_async_scheduling(self) -> bool:
        return True


def _config_of(world: "World", place: Place, role: str) -> WorkerConfig:
    """Of a worker at that place, in whichever role."""
    common: dict[str, Any] = {
        "instance": INSTANCE,
        "arena_socket": place.host.socket,
        "index": place.index,
        "max_num_seqs": 6,
        "target_step_ms": 0,
    }
    if role == "prefill":
        return (_PrefillAhead if world.plans_ahead else PrefillConfig)(chunk_tokens=32, **common)
    make = _DecodeAhead if world.plans_ahead else DecodeConfig
    return make(chunk_tokens=64, swap_bytes=world.swap_bytes, swap_dir=place.host.path.parent, **common)


async def _build_gateway(world: "World", place: Place, context: ServiceContext[Any]) -> Component:
    process = GatewayProcess(
        context.process_id,
        context.tracer,
        BodyBudget(1 << 28, sure_bytes=1 << 20),
        context.request_shutdown,
        clock=world.clock,
        dialer=SimDialer(world.network, SimChannel),
        make_http_server=_NoHttp,  # type: ignore[arg-type]
    )
    loaders = GatewayLoaders(world.connect_bus, lambda: [replace(byte_model(), digest=DIGEST)], OutputLengths)
    component = GatewayComponent(process, GATEWAY_SETTINGS, loaders)
    servicer = InferenceServicer(lambda: component.gateway.processor, send_timeout_s=5.0)
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, context.grpc_server)
    return component


async def _build_scheduler(world: "World", place: Place, context: ServiceContext[Any]) -> Component:
    limits = replace(LIMITS, page_overcommit=world.page_overcommit, placing=world.placing)
    return SchedulerComponent(
        world.connect_bus,
        context.process_id,
        SchedulerSettings(INSTANCE, limits, address=place.address),
        tracer=context.tracer,
        clock=world.clock,
        request_shutdown=context.request_shutdown,
    )


async def _build_transfer(world: "World", place: Place, context: ServiceContext[Any]) -> Component:
    arena = place.host.claim(PROCESS.get())

    def make_publisher(index: PrefixIndex) -> PrefixEventPublisher:
        incarnation = arena.segment.begin_incarnation()
        return PrefixEventPublisher(
            world.connect_bus,
            Subjects(INSTANCE),
            arena.segment.arena_id,
            incarnation,
            index,
            context.tracer,
            world.clock,
        )

    service = TransferService(
        arena,
        ARENA_SETTINGS,
        functools.partial(world.try_open_process, PROCESS.get()),
        context.tracer,
        context.request_shutdown,
        make_publisher,
        world.clock,
    )
    context.resources.callback(service.release)
    if world.exchange is not None:
        host = f"10.0.{place.host.index}.1"
        address = f"{host}:{PAGES_PORT}"
        context.grpc_server.add_insecure_port(address)
        open_streams = functools.partial(SimPageStreams, world.exchange.traffic, host)
        service.exchange_pages(PagesPort(address, PagesDialer(world.exchange), open_streams))
        place.fetches = CountedFetches(world.exchange, service)
    service.add_to(context.grpc_server)
    return service


async def _build_worker(world: "World", place: Place, context: ServiceContext[Any]) -> Component:
    process = PROCESS.get()
    spec = ModelSpec(MODEL, VOCAB_SIZE, MAX_CONTEXT, DIGEST, PAGE_BYTES)
    step_s = world.step_s

    def load(memory: ArenaMemory) -> LoadedModel:
        pages = memory.segment.pages
        make = LaunchingHashRunner if world.plans_ahead else HashRunner
        runner = make(len(pages), VOCAB_SIZE, memory=pages.view(np.int64)[:, :PAGE_TOKENS])
        return LoadedModel(runner, lambda: None, HostPages(pages))

    def prepare(role: str, worker_id: str) -> Callable[[], WorkerShell]:
        config = _config_of(world, place, role)

        def make_arena(on_handed_off: Callable[[HandedOff], None]) -> Arena:
            access = ArenaAccess(dialer=SimDialer(world.network, SimChannel), identity=world.identity_of(process))
            worker = WorkerIdentity(worker_id, role, PAGE_BYTES, DIGEST)
            return ArenaClient(Path(place.host.socket), worker, on_handed_off, access)

        def make_role(parts: RoleParts) -> Any:
            return KINDS[role].make_role(parts, config, context.tracer)

        outside = ShellOutside(
            make_arena,
            load,
            world.connect_bus,
            world.clock,
            functools.partial(TurnedInLoop, rng=world.rng, step_s=step_s),
        )
        return lambda: WorkerShell(
            context.in_role(role, worker_id, config), spec, KINDS[role].limits_of(config), make_role, outside
        )

    async def connect(name: str) -> Bus:
        del name
        return await world.connect_bus()

    return WorkerProcess(context, prepare, connect)


_BUILDERS: dict[str, Callable[..., Awaitable[Component]]] = {
    "gateway": _build_gateway,
    "scheduler": _build_scheduler,
    "transfer": _build_transfer,
    "prefill": _build_worker,
    "decode": _build_worker,
}
ROLES = tuple(_BUILDERS)
