"""The service, wired: the parts of a gateway around its bus and its model, and their start and end."""

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.trace import Tracer
from starlette.types import ASGIApp

from weir.bus.endpoint import BusEndpoint
from weir.bus.keys import AskHolder
from weir.bus.protocol import Bus, BusError
from weir.bus.subjects import Subjects
from weir.core.clock import Clock, SystemClock
from weir.core.errors import Unavailable
from weir.core.life import Attempt
from weir.core.tasks import end_tasks
from weir.rpc.body_budget import BodyBudget
from weir.rpc.channel import Dialer, PlainDialer
from weir.runtime.service import Description
from weir.telemetry.described import Described
from weir_gateway.access import AccessControl, AccessWatch
from weir_gateway.audit import AuditWriter
from weir_gateway.batches.jobs import BatchJobs
from weir_gateway.driving.adoption import AdopterSearch
from weir_gateway.driving.driver import Driver
from weir_gateway.driving.migrator import Migrator
from weir_gateway.driving.request_span import RequestSpans
from weir_gateway.driving.scheduler_port import SchedulerInbox, SchedulerPort
from weir_gateway.entry.entry import Entry
from weir_gateway.frontends.batches.answerer import LineAnswerer
from weir_gateway.frontends.console.api import ConsoleApi
from weir_gateway.frontends.console.feed import StackFeed
from weir_gateway.frontends.http_frontend import HttpFrontend
from weir_gateway.frontends.http_server import HttpServer, HttpSettings
from weir_gateway.frontends.responses.store import ResponseStore
from weir_gateway.input_processor import InputProcessor
from weir_gateway.keys.key_store import KeyStore
from weir_gateway.keys.keyed_requests import KeyedRequests
from weir_gateway.metrics.metrics_page import MetricsPage, VllmMetrics
from weir_gateway.metrics.neighbours import NeighbourWatch
from weir_gateway.output_lengths import OutputLengths
from weir_gateway.recent.store import RecentRequests
from weir_gateway.requests.model_follower import PrepareModels, open_requests
from weir_gateway.requests.models import ModelDirectory, ServedModel
from weir_gateway.settings import GatewaySettings
from weir_gateway.workers.connection import Dialing
from weir_gateway.workers.connections import WorkerConnections
from weir_gateway.workers.decode_workers import DecodeWorkers

logger = logging.getLogger(__name__)


MakeHttpServer = Callable[[ASGIApp, HttpSettings, Callable[[str], None], ssl.SSLContext | None], HttpServer]


@dataclass(frozen=True, slots=True)
class GatewayProcess:
    """What the gateway has from the process that it runs in. `gateway_id` is new at each start of the process."""

    gateway_id: str
    tracer: Tracer
    bodies: BodyBudget
    """Shared with the gRPC port."""
    request_shutdown: Callable[[str], None]
    figures: Callable[[], Described] | None = None
    """All that the process says of itself; None: what the gateway in it does."""
    clock: Clock = field(default_factory=SystemClock)
    dialer: Dialer = field(default_factory=PlainDialer)
    http_tls: ssl.SSLContext | None = None
    make_http_server: MakeHttpServer = HttpServer


FollowModels = Callable[[ModelDirectory, PrepareModels], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class GatewayLoaders:
    """What the gateway needs at its start. The two that load block, and are called in a thread."""

    connect: Callable[[], Awaitable[Bus]]
    load_models: Callable[[], Sequence[ServedModel]]
    load_lengths: Callable[[], OutputLengths] = OutputLengths
    follow_models: FollowModels | None = None
    """Runs as long as the gateway; None: it serves the same models all the time."""


class Gateway:
    """The parts, from the bus to the HTTP port. Closes the bus and `lengths` at its end."""

    def __init__(
        self,
        process: GatewayProcess,
        settings: GatewaySettings,
        bus: Bus,
        models: Sequence[ServedModel],
        lengths: OutputLengths,
    ) -> None:
        clock = process.clock
        self._settings = settings
        self._gateway_id = process.gateway_id
        self._subjects = Subjects(settings.instance)
        self._bus = bus
        self._lengths = lengths
        access = AccessControl(is_lower_priority_first=settings.is_lower_priority_first)
        self._access_watch = AccessWatch(access)
        self._endpoint = BusEndpoint(bus, process.tracer)
        self._port = SchedulerPort(self._endpoint, self._subjects, self._gateway_id, settings.port, clock)
        self._decode_workers = DecodeWorkers(clock)
        self._connections = WorkerConnections(
            Dialing(self._gateway_id, process.dialer, settings.connections),
            clock,
            peers_of=self._decode_workers.peers_of,
            is_wanted=self._is_wanted,
        )
        adopters = AdopterSearch(self._connections, self._decode_workers, settings.adoption, clock)
        self._migrator = Migrator(self._connections, settings.migration, clock, self._report_soon)
        self._driver = Driver(self._port, self._connections, adopters, self._migrator, settings.driver, clock)
        self._entry = Entry(access, settings.driver.max_requests, clock)
        self._inbox = SchedulerInbox(
            self._port, self._driver.requests, self._migrator, report_interval_s=settings.report_interval_s
        )
        self._key_store = KeyStore(bus, self._endpoint, self._subjects)
        self._keys = KeyedRequests(self._gateway_id, self._key_store, settings.keys)
        directory, spans = (
            ModelDirectory(models, self._decode_workers.longest_context),
            RequestSpans(process.tracer, clock, RecentRequests(process.gateway_id, settings.recent, clock)),
        )
        self._audit = self._try_make_audit()
        self.processor = InputProcessor(
            directory, self._entry, settings.limits, lengths, self._driver, self._keys, spans
        )
        self.processor.audit = self._audit
        self._responses = ResponseStore(bus, self._endpoint, self._subjects) if settings.keeps_responses else None
        answerer = LineAnswerer(self.processor, self._keys, access.caller_of, settings.http.unknown_fields)
        self._jobs = BatchJobs.try_make(process.gateway_id, settings.batches, answerer)
        self._frontend = self._make_frontend(process.bodies)
        self._neighbours = NeighbourWatch(bus, self._subjects, process.dialer, clock)
        vllm_metrics = VllmMetrics(self._driver.requests, self.processor.figures, directory)
        page = MetricsPage(
            process.figures or self._figures, self._neighbours, vllm_metrics if settings.has_vllm_metrics else None
        )
        self._feed = self._make_feed(process, access, clock)
        self.console = ConsoleApi(self._feed, self._neighbours, settings.http.streams)
        self._http = self._make_http(process, page)
        self._tasks: list[asyncio.Task[None]] = []
        self._is_ready = False

    @property
    def http_port(self) -> int:
        """0 before the start."""
        return self._http.port

    async def start(self) -> None:
        """Raises Unavailable without a free HTTP port."""
        self._spawn(self._access_watch.follow(self._bus, self._subjects), "follow the rules of access")
        self._spawn(self._decode_workers.follow(self._bus, self._subjects), "follow the registry")
        await self._inbox.subscribe(self._endpoint, self._subjects, self._gateway_id)
        await self._entry.follow(self._endpoint, self._subjects)
        await self._endpoint.serve(self._subjects.key(self._gateway_id), AskHolder, self._keys.on_ask)
        self._spawn(self._driver.watch(), "watch requests")
        if self._audit is not None:
            self._spawn(self._audit.run(), "write life events")
        self._spawn(self._inbox.report_for_ever(), "report held requests")
        await self.processor.prepare(self.processor.models.list_models())
        if not await self._access_watch.wait_known(self._settings.access_wait_s):
            wait_s = self._settings.access_wait_s
            logger.warning("no rules of access after %g s: nobody is let in until they come", wait_s)
        self._is_ready = True
        if self._jobs is not None:
            self._jobs.runner.start()
        await self._http.start()

    def follow_models(self, follow: FollowModels) -> None:
        """`follow` changes which models there are, until the gateway stops."""
        self._spawn(follow(self.processor.models, self.processor.prepare), "follow the models")

    async def drain(self, deadline_s: float) -> None:
        """Takes no new request, and waits for those that run."""
        self._is_ready = False
        if self._jobs is not None:
            await self._jobs.runner.drain()
        self._keys.drain()
        await self._driver.drain(deadline_s)

    async def stop(self) -> None:
        """Ends what still runs, here and at scheduler and workers, and closes."""
        self._is_ready = False
        if self._jobs is not None:
            await self._jobs.stop()
        await self._driver.stop()
        await self._migrator.stop()
        await self._keys.stop()
        await end_tasks(self._tasks)
        if self._audit is not None:
            await self._audit.close()
        await self._connections.close()
        self._feed.close()
        self.processor.refusals.close()
        await self._http.stop()  # before what answers are made of
        await self._neighbours.close()
        await self._endpoint.close()
        self.processor.close()
        await asyncio.to_thread(self._lengths.close)
        await self._bus.close()

    def _is_wanted(self, request_id: str, attempt: Attempt) -> bool:
        return self._driver.wants(request_id, attempt)

    def _report_soon(self) -> None:
        self._inbox.report_soon()  # which is made after what it reports

    def _try_make_audit(self) -> AuditWriter | None:
        settings = self._settings.audit
        if settings is None:
            return None
        return AuditWriter(self._bus, self._endpoint, self._subjects, self._gateway_id, settings)

    def _make_frontend(self, bodies: BodyBudget) -> HttpFrontend:
        settings, quotas = self._settings.http, self._port.quotas
        return HttpFrontend(
            self.processor, settings, lambda: self._is_ready, bodies, self._responses, self._jobs, quotas
        )

    def _make_http(self, process: GatewayProcess, page: MetricsPage) -> HttpServer:
        app = self._frontend.make_app(page, self.console)
        return process.make_http_server(app, self._settings.http, process.request_shutdown, process.http_tls)

    def _make_feed(self, process: GatewayProcess, access: AccessControl, clock: Clock) -> StackFeed:
        describe, max_watchers = process.figures or self._figures, self._settings.max_console_watchers
        return StackFeed(describe, self._neighbours, lambda: access.lanes, clock, max_watchers)

    def _figures(self) -> Described:
        described = self.describe()
        return Described("gateway", self._gateway_id, described.metrics, described.histograms)

    def describe(self) -> Description:
        connections, bus = self._connections.metrics(), self._endpoint.metrics()
        metrics = {
            **self.processor.metrics(),
            **connections,
            **bus,
            **self._port.metrics(),
            **self._access_watch.metrics(),
            **self._driver.metrics(),
            **self._keys.metrics(),
            **self._key_store.metrics(),
            **(self._responses.metrics() if self._responses is not None else {}),
            **(self._jobs.runner.metrics() if self._jobs is not None else {}),
            **(self._audit.metrics() if self._audit is not None else {}),
            **self._http.metrics(),
            **open_requests(self.processor.models, self._open_models()),
            **self.processor.spans.recent.metrics(),
            "console_watchers": float(self._feed.num_watchers),
            "registry_malformed_total": float(self._decode_workers.num_malformed),
            "malformed_messages_total": bus["bus_malformed_total"] + connections["malformed_frames_total"],
            "http_internal_errors_total": float(self._frontend.num_internal_errors),
        }
        histograms = [*self.processor.figures.histograms(), *self._migrator.histograms()]
        return Description(metrics, self._check_integrity, histograms=histograms)

    def _open_models(self) -> Iterator[str]:
        """Of each request that has not ended."""
        return (one.checked.model.name for one in self._driver.requests.values() if not one.phase.is_terminal)

    def _check_integrity(self) -> list[str]:
        parts = (self.processor, self._driver, self._keys, self.processor.spans.recent)
        return [error for part in parts for error in part.check_integrity()]

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._tasks.append(asyncio.create_task(work, name=name))


class GatewayComponent:
    """The gateway as a component of its process: ready when the model's tokenizer is loaded, the bus is connected and
    the HTTP port is open."""

    def __init__(self, process: GatewayProcess, settings: GatewaySettings, loaders: GatewayLoaders) -> None:
        self._process = process
        self._settings = settings
        self._loaders = loaders
        self._gateway: Gateway | None = None

    @property
    def gateway(self) -> Gateway:
        """Raises Unavailable before it is loaded."""
        if self._gateway is None:
            raise Unavailable("starting: not ready yet", retry_after_s=1.0)
        return self._gateway

    async def start(self) -> None:
        """Raises Unavailable without a bus or a free HTTP port, ModelError without the model's files."""
        models = await asyncio.to_thread(self._loaders.load_models)
        lengths = await asyncio.to_thread(self._loaders.load_lengths)
        try:
            bus = await self._loaders.connect()
        except BusError as error:
            await asyncio.to_thread(lengths.close)
            raise Unavailable(str(error)) from error
        self._gateway = Gateway(self._process, self._settings, bus, models, lengths)
        if self._loaders.follow_models is not None:
            self._gateway.follow_models(self._loaders.follow_models)
        await self._gateway.start()

    async def drain(self, deadline_s: float) -> None:
        if self._gateway is not None:
            await self._gateway.drain(deadline_s)

    async def stop(self) -> None:
        if self._gateway is not None:
            await self._gateway.stop()

    def describe(self) -> Description:
        return Description() if self._gateway is None else self._gateway.describe()
