"""A whole gateway in one event loop: real frontends, real streams to scripted workers, an in-memory bus."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import grpc.aio
import httpx
from grpc_health.v1 import health
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.unit.gateway.fake_model import MAX_CONTEXT, ByteTokenizer, byte_model
from tests.unit.gateway.fake_scheduler import INSTANCE, OPEN_RULES, FakeScheduler
from tests.unit.gateway.fake_workers import FakePair, FakeWorker
from tests.unit.hubs import made_hub

from weir.bus.configuration import AccessRules
from weir.bus.in_memory import InMemoryHub
from weir.bus.messages import Placement
from weir.bus.protocol import Bus
from weir.core.clock import Clock, SystemClock
from weir.core.life import SchedulingParams
from weir.rpc.access import Callers
from weir.rpc.body_budget import BodyBudget
from weir.rpc.port_guard import PortGuard, PortLimits
from weir.rpc.server import ErrorGuard, TraceContextGuard, make_server
from weir.runtime.admin import AdminService, Description, Identity
from weir.runtime.service import add_common_services
from weir.wire.v1 import inference_pb2_grpc
from weir_gateway.batches.jobs import BatchSettings
from weir_gateway.batches.runner import RunnerSettings
from weir_gateway.driving.driver import DriverSettings
from weir_gateway.driving.scheduler_port import SchedulerPortSettings
from weir_gateway.frontends.grpc_frontend import InferenceServicer
from weir_gateway.gateway import Gateway, GatewayProcess
from weir_gateway.output_lengths import OutputLengths
from weir_gateway.requests.models import ServedModel
from weir_gateway.settings import GatewaySettings
from weir_gateway.workers.connection import ConnectionSettings

GATEWAY_ID = "gateway-0-00000000"
INFERENCE = "weir.v1.Inference"

FAST = GatewaySettings(
    instance=INSTANCE,
    port=SchedulerPortSettings(
        outage_s=0.6, accepted_outage_s=1.5, reply_timeout_s=0.2, retry_interval_s=0.05, end_wait_s=0.5
    ),
    driver=DriverSettings(
        max_requests=16, fruitless_wait_s=0.01, overdue_s=0.15, gap_s=0.8, no_progress_s=5.0, tick_s=0.05
    ),
    connections=ConnectionSettings(lost_after_s=1.5, connect_timeout_s=1.0, first_backoff_s=0.02, max_backoff_s=0.1),
    report_interval_s=0.05,
)


def with_batches(folder: Path, **changes: Any) -> GatewaySettings:
    """`FAST` with batch jobs, kept in `folder`. `changes`: to `BatchSettings`."""
    runner = RunnerSettings(max_at_once=4, lease_s=2.0, poll_s=0.02)
    made = BatchSettings(url=f"sqlite:///{folder}/state/batches.sqlite", runner=runner)
    return replace(FAST, batches=replace(made, **changes))


@dataclass
class World:
    """What a test turns and looks at."""

    hub: InMemoryHub
    gateway: Gateway
    scheduler: FakeScheduler
    prefill: FakeWorker
    decode: FakeWorker
    pair: FakePair
    tokenizer: ByteTokenizer
    stub: "inference_pb2_grpc.InferenceAsyncStub"
    grpc_address: str
    http_url: str
    spans: InMemorySpanExporter
    bodies: BodyBudget

    def metric(self, name: str) -> float:
        return self.gateway.describe().metrics[name]

    def http_client(self, **settings: Any) -> httpx.AsyncClient:
        """`settings`: as httpx takes them. Reading certificates would take longer than all else that a test does."""
        return httpx.AsyncClient(base_url=self.http_url, verify=False, **settings)

    async def until(self, holds: Callable[[], object], what: str, timeout_s: float = 20.0) -> None:
        """Raises TimeoutError naming `what` unless it becomes true in time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not holds():
            if loop.time() > deadline:
                raise TimeoutError(f"not within {timeout_s} s: {what}")
            await asyncio.sleep(0.005)

    async def until_idle(self) -> None:
        """Every request has ended, scheduler and workers know it, and the counts agree."""
        await self.until(lambda: self.metric("requests_open") == 0, "all requests are closed")
        described = self.gateway.describe()
        assert described.integrity_errors == ()
        assert described.metrics["worker_subscriptions"] == 0
        ends = ("finished", "cancelled", "failed", "refused")
        assert described.metrics["accepted_total"] == sum(described.metrics[f"{end}_total"] for end in ends)


@asynccontextmanager
async def open_world(
    settings: GatewaySettings = FAST,
    *,
    send_timeout_s: float = 60.0,
    max_bodies_bytes: int = 1 << 28,
    port_limits: PortLimits = PortLimits(max_message_bytes=4 << 20, max_calls=96),  # noqa: B008 - frozen
    max_context: int = MAX_CONTEXT,
    rules: AccessRules | None = OPEN_RULES,
    lengths: OutputLengths | None = None,
    clock: Clock = SystemClock(),  # noqa: B008 - has no state
    connect: Callable[[], Awaitable[Bus]] | None = None,
    model: ServedModel | None = None,
) -> AsyncIterator[World]:
    """Checks at the end that nothing is left. `connect`: to another bus than one in memory. `model`: in place of the
    one of bytes."""
    hub, spans, tokenizer = made_hub(INSTANCE), InMemorySpanExporter(), ByteTokenizer()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    failures: list[str] = []
    bodies = BodyBudget(max_bodies_bytes, sure_bytes=port_limits.max_message_bytes, wait_s=0.3)
    process = GatewayProcess(GATEWAY_ID, provider.get_tracer("test"), bodies, failures.append, clock=clock)
    async with AsyncExitStack() as stack:
        stack.callback(provider.shutdown)
        prefill = await stack.enter_async_context(_running(FakeWorker("prefill-0-aaaaaaaa")))
        decode = await stack.enter_async_context(_running(FakeWorker("decode-0-bbbbbbbb")))
        buses = [hub.connect() if connect is None else await connect() for _ in range(2)]
        scheduler = FakeScheduler(buses[0], _placement(prefill, decode), rules=rules)
        await stack.enter_async_context(_running(scheduler))
        model = model or byte_model(tokenizer, max_context=max_context)
        streams = replace(settings.http.streams, send_timeout_s=send_timeout_s)
        settings = replace(settings, http=replace(settings.http, streams=streams))
        gateway = Gateway(process, settings, buses[1], [model], lengths or OutputLengths())
        servicer = InferenceServicer(lambda: gateway.processor, send_timeout_s=send_timeout_s)
        address = await stack.enter_async_context(_served(servicer, process, port_limits))
        await stack.enter_async_context(_running(gateway))
        channel = grpc.aio.insecure_channel(address, options=[("grpc.max_send_message_length", 1 << 26)])
        await stack.enter_async_context(channel)
        world = World(
            hub=hub,
            gateway=gateway,
            scheduler=scheduler,
            prefill=prefill,
            decode=decode,
            pair=FakePair(prefill, decode),
            tokenizer=tokenizer,
            stub=inference_pb2_grpc.InferenceStub(channel),
            grpc_address=address,
            http_url=f"http://127.0.0.1:{gateway.http_port}",
            spans=spans,
            bodies=bodies,
        )
        yield world
        await world.until_idle()
    assert failures == []


class _Part(Protocol):
    async def start(self) -> None: ...

    async def stop(self) -> None: ...


_PartT = TypeVar("_PartT", bound=_Part)


@asynccontextmanager
async def _running(part: _PartT) -> AsyncIterator[_PartT]:
    await part.start()
    try:
        yield part
    finally:
        await part.stop()


@asynccontextmanager
async def _served(servicer: InferenceServicer, process: GatewayProcess, limits: PortLimits) -> AsyncIterator[str]:
    """Yields the address of the gRPC port."""
    guard = PortGuard(limits, process.bodies)
    guard.access.answer(Callers.TENANT, servicer.identify)
    guard.access.answer(Callers.OPERATOR, servicer.check_operator)
    server = make_server([guard, TraceContextGuard(process.tracer), ErrorGuard()], limits)
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    admin = AdminService(Identity("gateway", process.gateway_id, "bytes"), Description)
    add_common_services(server, admin, health.aio.HealthServicer(), [INFERENCE])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def _placement(prefill: FakeWorker, decode: FakeWorker) -> Placement:
    return Placement(
        dispatch=1,
        prefill_worker_id=prefill.worker_id,
        prefill_address=prefill.address,
        decode_worker_id=decode.worker_id,
        decode_address=decode.address,
        num_reserved_pages=4,
        scheduling=SchedulingParams(2, -3.5, 80, 6.25),
    )
