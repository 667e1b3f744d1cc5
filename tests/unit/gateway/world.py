"""A whole gateway in one event loop: real doors, real streams to scripted workers, an in-memory bus."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc.aio
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.unit.gateway.fake_model import MAX_CONTEXT, ByteTokenizer, byte_model
from tests.unit.gateway.fake_scheduler import INSTANCE, OPEN_RULES, FakeScheduler
from tests.unit.gateway.fake_workers import FakePair, FakeWorker

from weir.bus.configuration import AccessRules
from weir.bus.in_memory import InMemoryHub
from weir.bus.messages import Placement
from weir.core.clock import SystemClock
from weir.core.scheduling import SchedulingParams
from weir.rpc.body_budget import BodyBudget
from weir.rpc.port_guard import PortGuard, PortLimits
from weir.rpc.server import ErrorGuard, TraceContextGuard, make_server
from weir.wire.v1 import inference_pb2_grpc
from weir_gateway.driving.driver import DriverSettings
from weir_gateway.frontends.grpc_frontend import InferenceServicer
from weir_gateway.frontends.http_frontend import HttpFrontend, HttpSettings
from weir_gateway.frontends.http_server import HttpServer
from weir_gateway.gateway import Gateway, GatewaySettings
from weir_gateway.lengths.lengths import OutputLengths
from weir_gateway.requests.models import ModelDirectory
from weir_gateway.scheduler_port import ControlSettings
from weir_gateway.workers.connections import ConnectionSettings

GATEWAY_ID = "gateway-0-00000000"

FAST = GatewaySettings(
    control=ControlSettings(outage_s=0.6, ask_timeout_s=0.2, pause_s=0.05, close_wait_s=0.5),
    driver=DriverSettings(max_requests=16, overdue_s=0.15, gap_s=0.8, no_progress_s=5.0, tick_s=0.05),
    connections=ConnectionSettings(lost_after_s=1.5, connect_timeout_s=1.0, first_backoff_s=0.02, max_backoff_s=0.1),
    report_interval_s=0.05,
)


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

    async def until(self, holds: Callable[[], object], what: str, timeout_s: float = 5.0) -> None:
        """Raises TimeoutError naming `what` unless it becomes true in time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not holds():
            if loop.time() > deadline:
                raise TimeoutError(f"not within {timeout_s} s: {what}")
            await asyncio.sleep(0.005)

    async def until_idle(self) -> None:
        """Every request has ended, everybody was told, and the books are in order."""
        await self.until(lambda: self.metric("requests_open") == 0, "all requests are closed")
        described = self.gateway.describe()
        assert described.integrity_errors == ()
        assert described.metrics["link_subscriptions"] == 0
        ends = ("finished", "cancelled", "failed", "refused")
        assert described.metrics["accepted_total"] == sum(described.metrics[f"{end}_total"] for end in ends)


@asynccontextmanager
async def open_world(
    settings: GatewaySettings = FAST,
    *,
    unread_s: float = 60.0,
    max_bodies_bytes: int = 1 << 28,
    port_limits: PortLimits | None = None,
    max_context: int = MAX_CONTEXT,
    rules: AccessRules | None = OPEN_RULES,
    lengths: OutputLengths | None = None,
) -> AsyncIterator[World]:
    """Checks at the end that nothing is left."""
    hub = InMemoryHub()
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    prefill, decode = FakeWorker("prefill-0-aaaaaaaa"), FakeWorker("decode-0-bbbbbbbb")
    await prefill.start()
    await decode.start()
    placement = Placement(
        dispatch=1,
        prefill_worker_id=prefill.worker_id,
        prefill_address=prefill.address,
        decode_worker_id=decode.worker_id,
        decode_address=decode.address,
        num_reserved_pages=4,
        scheduling=SchedulingParams(2, -3.5, 80, 6.25),
    )
    scheduler = FakeScheduler(hub.connect(), placement, rules=rules)
    await scheduler.start()
    tokenizer = ByteTokenizer()
    gateway = Gateway(
        GATEWAY_ID,
        INSTANCE,
        hub.connect(),
        ModelDirectory([byte_model(tokenizer, max_context=max_context)]),
        settings,
        tracer=tracer,
        clock=SystemClock(),
        lengths=lengths,
    )
    await gateway.start()
    bodies = BodyBudget(max_bodies_bytes, wait_s=0.3)
    frontend = HttpFrontend(gateway.processor, HttpSettings(unread_s=unread_s), lambda: gateway.is_ready, bodies)
    failures: list[str] = []
    http = HttpServer(
        frontend.make_app(), "127.0.0.1", 0, max_connections=256, on_failure=failures.append, unread_s=30.0
    )
    await http.start()
    servicer = InferenceServicer(lambda: gateway.processor, unread_s=unread_s)
    gate = PortGuard(port_limits or PortLimits(max_message_bytes=4 << 20, max_calls=96), bodies)
    gate.guard("weir.v1.Inference", servicer.identify)
    server = make_server([gate, TraceContextGuard(tracer), ErrorGuard()], gate.limits)
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address, options=[("grpc.max_send_message_length", 1 << 26)]) as channel:
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
                http_url=f"http://127.0.0.1:{http.port}",
                spans=exporter,
                bodies=bodies,
            )
            yield world
            await world.until_idle()
    finally:
        await gateway.stop()
        await http.stop()
        await server.stop(None)
        await scheduler.stop()
        await prefill.stop()
        await decode.stop()
        provider.shutdown()
        assert failures == []
