"""The gateway as a component of a process: connects, loads, opens the HTTP port."""

import asyncio
from collections.abc import Awaitable, Callable

from opentelemetry.trace import Tracer

from weir.bus.protocol import Bus, BusError
from weir.core.clock import Clock
from weir.core.errors import Unavailable
from weir.rpc.body_budget import BodyBudget
from weir.runtime.service import Description
from weir_gateway.config import GatewayConfig
from weir_gateway.driving.driver import DriverSettings
from weir_gateway.frontends.http_frontend import HttpFrontend, HttpSettings
from weir_gateway.frontends.http_server import HttpServer
from weir_gateway.gateway import Gateway, GatewaySettings
from weir_gateway.intake import InputProcessor
from weir_gateway.lengths.lengths import OutputLengths
from weir_gateway.requests.models import ModelDirectory, ServedModel
from weir_gateway.requests.validation import Limits
from weir_gateway.scheduler_port import ControlSettings
from weir_gateway.workers.connections import ConnectionSettings


class GatewayComponent:
    """Ready when the bus is connected, the model's tokenizer is loaded and the HTTP port is open."""

    def __init__(
        self,
        config: GatewayConfig,
        gateway_id: str,
        *,
        connect: Callable[[], Awaitable[Bus]],
        load_model: Callable[[], ServedModel],
        load_lengths: Callable[[], OutputLengths] = OutputLengths,
        bodies: BodyBudget | None = None,
        request_shutdown: Callable[[str], None],
        tracer: Tracer,
        clock: Clock,
    ) -> None:
        self._config = config
        self._gateway_id = gateway_id
        self._connect = connect
        self._load_model = load_model
        self._load_lengths = load_lengths
        self._bodies = bodies or BodyBudget(config.max_bodies_bytes)
        self._request_shutdown = request_shutdown
        self._tracer = tracer
        self._clock = clock
        self._bus: Bus | None = None
        self._gateway: Gateway | None = None
        self._http_frontend: HttpFrontend | None = None
        self._http: HttpServer | None = None

    @property
    def http_port(self) -> int:
        """0 before the start."""
        return 0 if self._http is None else self._http.port

    def processor(self) -> InputProcessor:
        """Where requests go. Raises Unavailable before the start is complete."""
        if self._gateway is None:
            raise Unavailable("starting: not ready yet", retry_after_s=1.0)
        return self._gateway.processor

    async def start(self) -> None:
        """Raises Unavailable without a bus or a free HTTP port, ModelError without the model's files."""
        config = self._config
        model = await asyncio.to_thread(self._load_model)
        lengths = await asyncio.to_thread(self._load_lengths)
        try:
            self._bus = await self._connect()
        except BusError as error:
            raise Unavailable(str(error)) from error
        self._gateway = Gateway(
            self._gateway_id,
            config.instance,
            self._bus,
            ModelDirectory([model]),
            gateway_settings(config),
            tracer=self._tracer,
            clock=self._clock,
            lengths=lengths,
        )
        await self._gateway.start()
        gateway = self._gateway
        http_settings = HttpSettings(unread_s=config.unread_s)
        self._http_frontend = HttpFrontend(gateway.processor, http_settings, lambda: gateway.is_ready, self._bodies)
        app = self._http_frontend.make_app()
        self._http = HttpServer(
            app,
            config.http_host,
            config.http_port,
            max_connections=config.max_calls,
            on_failure=self._request_shutdown,
            unread_s=config.unread_s,
        )
        await self._http.start()

    async def drain(self, deadline_s: float) -> None:
        if self._gateway is not None:
            await self._gateway.drain(deadline_s)

    async def stop(self) -> None:
        if self._gateway is not None:
            await self._gateway.stop()
        if self._http is not None:
            await self._http.stop()
        if self._bus is not None:
            await self._bus.close()

    def describe(self) -> Description:
        if self._gateway is None or self._http_frontend is None:
            return Description()
        described = self._gateway.describe()
        http = {"http_internal_errors_total": float(self._http_frontend.num_internal_errors)}
        return Description({**described.metrics, **http}, described.integrity_errors)


def gateway_settings(config: GatewayConfig) -> GatewaySettings:
    """The bounds and waits that the configuration names."""
    return GatewaySettings(
        control=ControlSettings(outage_s=config.scheduler_wait_s),
        driver=DriverSettings(
            max_requests=config.max_requests, max_queue_s=config.max_queue_s, no_progress_s=config.no_progress_s
        ),
        is_lower_priority_first=config.openai_priority == "lower-first",
        access_wait_s=config.scheduler_wait_s,
        connections=ConnectionSettings(lost_after_s=config.worker_lost_s),
        limits=Limits(
            default_max_tokens=config.default_max_tokens,
            max_prompt_bytes=config.max_prompt_bytes,
            max_prompt_logprobs=config.max_prompt_logprobs,
        ),
    )
