"""The parts of a gateway, put together around a bus and a model. The doors stand in front of it."""

import asyncio
import logging
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.trace import Tracer

from weir.bus.endpoint import BusEndpoint
from weir.bus.protocol import Bus
from weir.bus.subjects import Subjects
from weir.core.clock import Clock
from weir.core.tasks import end_tasks
from weir.runtime.service import Description
from weir_gateway.access.access import AccessControl
from weir_gateway.access.access_watch import AccessWatch
from weir_gateway.driving.driver import Driver, DriverSettings
from weir_gateway.driving.inbox import SchedulerInbox
from weir_gateway.intake import InputProcessor
from weir_gateway.lengths.lengths import OutputLengths
from weir_gateway.requests.models import ModelDirectory
from weir_gateway.requests.validation import Limits
from weir_gateway.scheduler_port import ControlSettings, SchedulerPort
from weir_gateway.workers.connections import ConnectionSettings, WorkerConnections

logger = logging.getLogger(__name__)

_TOKENIZER_THREADS = 2


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Bounds and waits of each part."""

    control: ControlSettings = field(default_factory=ControlSettings)
    driver: DriverSettings = field(default_factory=DriverSettings)
    connections: ConnectionSettings = field(default_factory=ConnectionSettings)
    limits: Limits = field(default_factory=Limits)
    report_interval_s: float = 1.0
    access_wait_s: float = 8.0
    """Waited at the start for the rules of access; without them it starts, and lets nobody in."""
    is_lower_priority_first: bool = False


class Gateway:
    """`gateway_id` is new at each start of the process. The bus stays the caller's."""

    def __init__(
        self,
        gateway_id: str,
        instance: str,
        bus: Bus,
        models: ModelDirectory,
        settings: GatewaySettings,
        *,
        tracer: Tracer,
        clock: Clock,
        lengths: OutputLengths | None = None,
    ) -> None:
        self._gateway_id = gateway_id
        self._subjects = Subjects(instance)
        access = AccessControl(is_lower_priority_first=settings.is_lower_priority_first)
        self._executor = ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix="tokenize")
        self._endpoint = BusEndpoint(bus, tracer)
        self._port = SchedulerPort(self._endpoint, self._subjects, gateway_id, settings.control, clock)
        self._connections = WorkerConnections(gateway_id, settings.connections, clock)
        self._driver = Driver(self._port, self._connections, settings.driver, clock)
        self._inbox = SchedulerInbox(self._port, self._driver, report_interval_s=settings.report_interval_s)
        self._access_watch = AccessWatch(access)
        self._access_wait_s = settings.access_wait_s
        self._bus = bus
        self._tasks: list[asyncio.Task[None]] = []
        self._is_ready = False
        self._lengths = lengths or OutputLengths()
        self.processor = InputProcessor(
            models, access, settings.limits, self._driver, tracer, clock, self._executor, self._lengths, gateway_id
        )

    @property
    def is_ready(self) -> bool:
        """Whether new requests are taken."""
        return self._is_ready

    async def start(self) -> None:
        self._spawn(self._access_watch.follow(self._bus, self._subjects), "follow the rules of access")
        await self._inbox.subscribe(self._endpoint, self._subjects, self._gateway_id)
        self._spawn(self._driver.watch(), "watch requests")
        self._spawn(self._inbox.report_for_ever(), "report held requests")
        if not await self._access_watch.wait_known(self._access_wait_s):
            logger.warning("no rules of access after %g s: nobody is let in until they come", self._access_wait_s)
        self._is_ready = True

    async def drain(self, deadline_s: float) -> None:
        """Takes no new request, and waits for those that run."""
        self._is_ready = False
        await self._driver.drain(deadline_s)

    async def stop(self) -> None:
        """Ends what still runs, tells everybody, and closes."""
        self._is_ready = False
        await self._driver.stop()
        await end_tasks(self._tasks)
        await self._connections.close()
        await self._endpoint.close()
        self._executor.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._lengths.close)

    def describe(self) -> Description:
        connections, bus = self._connections.metrics(), self._endpoint.metrics()
        metrics = {
            **self.processor.metrics(),
            **connections,
            **bus,
            **self._port.metrics(),
            **self._access_watch.metrics(),
            "requests_in_flight": float(self._driver.num_in_flight),
            "requests_open": float(self._driver.num_tasks),
            "malformed_messages_total": bus["bus_malformed_total"] + connections["malformed_frames_total"],
        }
        return Description(metrics, (*self.processor.check_integrity(), *self._driver.check_integrity()))

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._tasks.append(asyncio.create_task(work, name=name))
