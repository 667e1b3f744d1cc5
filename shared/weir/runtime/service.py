"""The life of every process.

    bind ─> build component ─> serve, publish (alive) ─> start component ─> SERVING, ready file (ready)
                                                                                 │ SIGTERM, SIGINT, request_shutdown
    exit <─ flush traces <─ close resources <─ withdraw <─ stop server <─ stop component <─ drain <─ NOT_SERVING

A second signal ends the process at once, and so does a shutdown that takes longer than all its parts may.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import grpc.aio
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from opentelemetry.trace import Tracer

from weir.core.clock import Clock, SystemClock
from weir.core.errors import WeirError
from weir.core.trusted_folder import UntrustedFolder
from weir.model.errors import ModelError
from weir.rpc.access import Port, RpcAccess, RpcCaller
from weir.rpc.channel import Dialer, PlainDialer
from weir.rpc.port_guard import PortGuard
from weir.rpc.reflection import REFLECTION_NAMES, add_reflection
from weir.rpc.server import AccessGuard, ErrorGuard, ReadinessGuard, TraceContextGuard, make_server
from weir.rpc.tls.certificates import CertificateError
from weir.runtime.address import Listening, bind
from weir.runtime.admin import AdminService, Description, Identity, LoopErrors
from weir.runtime.change_log import Change, ChangeLog, shown_name
from weir.runtime.config import ConfigError, ServiceConfig
from weir.runtime.ending import Ending, exit_hard_after
from weir.runtime.logs import setup_logging
from weir.runtime.metrics_port import MetricsPort
from weir.runtime.otlp_metrics import MetricsExport, metrics_endpoint
from weir.runtime.process_tuning import find_shortage, raise_descriptor_limit, spare_what_is_there
from weir.runtime.telemetry import setup_tracing, shutdown_tracing
from weir.runtime.tls import ProcessTls
from weir.telemetry.described import families_of
from weir.wire.v1 import admin_pb2, admin_pb2_grpc

__all__ = ["Component", "Description", "ServiceContext", "run_service"]

_log = logging.getLogger(__name__)
_STOP_S = 5.0
_SERVER_STOP_S = 1.0
_TRACE_FLUSH_S = 2.0
_METRICS_FLUSH_S = 3.0
_EXIT_MARGIN_S = 3.0
_EXIT_USAGE = 2
_ADMIN_NAME = admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name
COMMON_SERVICES = (_ADMIN_NAME, health.SERVICE_NAME, *REFLECTION_NAMES)
"""What every process serves."""
_ConfigT = TypeVar("_ConfigT", bound=ServiceConfig)
_OtherConfigT = TypeVar("_OtherConfigT", bound=ServiceConfig)


class Component(Protocol):
    """What a service is beside its spine."""

    async def start(self) -> None:
        """Returns when ready: connected and warmed up. Calls of its services are refused until then."""
        ...

    async def drain(self, deadline_s: float) -> None:
        """Takes no new work and lets running work end, for at most `deadline_s` from now."""
        ...

    async def stop(self) -> None:
        """Ends everything. Called once, after `drain`, also when `start` failed or was broken off."""
        ...

    def describe(self) -> Description:
        """Counters, gauges and integrity; called at any time after the component was built."""
        ...


@dataclass(frozen=True)
class ServiceContext(Generic[_ConfigT]):
    """What a component is built from. `grpc_server` is bound but not started: add servicers to it.

    `access` is told who is whom of those that the methods are for; until then those methods are refused.
    `admin` is served already; what a role can do beside describing itself is given to it.
    `request_shutdown(reason)` ends the process in order, with exit code 1: for a component that cannot go on.
    `notes`: lines for whoever started the process, who gets them when it is ready.
    `resources` is closed at the very end, when nothing is served any more: for what keeps another process from serving
    the same.
    """

    config: _ConfigT
    role: str
    process_id: str
    address: str
    grpc_server: grpc.aio.Server
    tracer: Tracer
    request_shutdown: Callable[[str], None]
    admin: AdminService
    resources: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    notes: list[str] = field(default_factory=list)
    access: RpcAccess = field(default_factory=lambda: RpcAccess(Port.INNER))
    clock: Clock = field(default_factory=SystemClock)
    changes: ChangeLog = field(default_factory=lambda: ChangeLog(None, ""))
    tls: ProcessTls | None = None

    @property
    def dialer(self) -> Dialer:
        """How it reaches others of the stack."""
        return PlainDialer() if self.tls is None else self.tls.dialer

    def in_role(self, role: str, process_id: str, config: _OtherConfigT) -> "ServiceContext[_OtherConfigT]":
        """For a part of the process that is known under a role and an id of its own."""
        return replace(self, config=config, role=role, process_id=process_id)  # type: ignore[arg-type,return-value]


def run_service(
    role: str,
    config: _ConfigT,
    build: Callable[[ServiceContext[_ConfigT]], Awaitable[Component]],
    service_names: Sequence[str],
    gate: PortGuard | None = None,
) -> int:
    """Runs one process from start to end and returns its exit code: 0 after a signal, 1 when it could not go on, 2 for
    a setting, a model or a folder of kernels that cannot be used, which another start would meet again.

    `service_names` are the full gRPC names that the component serves; health reports each of them. `gate`: of a
    process whose port clients reach.
    """
    process_id = f"{role}-{config.index}-{uuid.uuid4().hex[:8]}"
    try:
        tls, problem = ProcessTls(config, role), ""
    except CertificateError as error:
        tls, problem = None, error.message
    if tls is not None and tls.identity is not None:
        process_id += tls.identity.mark
    setup_logging(role, process_id, level=config.log_level, log_format=config.log_format)
    if tls is None:
        _log.error("could not start: %s", problem)
        return _EXIT_USAGE
    shortage = find_shortage(raise_descriptor_limit(), config.num_descriptors)
    if shortage is not None:
        _log.warning("%s", shortage)

    async def run() -> int:
        # Made inside the loop: grpc.aio ties a server to the loop that is running then.
        return await _Service(role, process_id, config, service_names, gate, tls).run(build)

    return uvloop.run(run())


class _Service(Generic[_ConfigT]):
    """The server of one process and the state that its phases share."""

    def __init__(
        self,
        role: str,
        process_id: str,
        config: _ConfigT,
        service_names: Sequence[str],
        gate: PortGuard | None,
        tls: ProcessTls,
    ) -> None:
        self._role = role
        self._process_id = process_id
        self._config = config
        self._service_names = tuple(service_names)
        self._component: Component | None = None
        self._listening: Listening | None = None
        self._resources = contextlib.ExitStack()
        self._notes: list[str] = []
        self._has_ready_file = False
        self._errors = ErrorGuard()
        self._loop_errors = LoopErrors()
        self._admin = AdminService(Identity(role, process_id, config.model_reference), self._describe)
        self._metrics_port: MetricsPort | None = None
        self._metrics_export: MetricsExport | None = None
        self._ending = Ending()
        self._readiness = ReadinessGuard(service_names)
        self._health = health.aio.HealthServicer()
        self._tracing = setup_tracing(role, config.instance, process_id, config.otlp_endpoint)
        self._tracer = self._tracing.get_tracer(f"weir.{role}")
        self._access = RpcAccess(Port.INNER) if gate is None else gate.access
        self._tls = tls
        self._changes = ChangeLog(config.changes_path, process_id)
        if tls.identity is not None:
            self._access.require_identities(tls.identity, self._log_denial)
        guards = [TraceContextGuard(self._tracer), self._readiness, self._errors]
        self._server = (
            make_server([AccessGuard(self._access), *guards])
            if gate is None
            else make_server([gate, *guards], gate.limits)
        )

    async def run(self, build: Callable[[ServiceContext[_ConfigT]], Awaitable[Component]]) -> int:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._loop_errors.handle)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ending.on_signal, number)
        asked = asyncio.create_task(self._ending.asked.wait())
        starting = asyncio.create_task(self._start(build))
        await asyncio.wait({asked, starting}, return_when=asyncio.FIRST_COMPLETED)
        failure = await self._try_find_failure(starting) if starting.done() else None
        if failure is not None:
            self._ending.ask("could not start", failure)
        await asked
        await self._shut_down(starting)
        return self._ending.exit_code

    async def _start(self, build: Callable[[ServiceContext[_ConfigT]], Awaitable[Component]]) -> None:
        self._listening = bind(self._server, self._config.listen, self._config.advertise_host, self._tls.credentials)
        self._tls.start()
        address = self._listening.address
        await self._add_common_services()
        self._component = await build(
            ServiceContext(
                config=self._config,
                role=self._role,
                process_id=self._process_id,
                address=address,
                grpc_server=self._server,
                tracer=self._tracer,
                request_shutdown=lambda reason: self._ending.ask(reason, 1),
                admin=self._admin,
                resources=self._resources,
                notes=self._notes,
                access=self._access,
                changes=self._changes,
                tls=self._tls,
            )
        )
        self._log_missing_callers()
        await self._open_metrics()
        await self._server.start()
        self._listening.publish()
        _log.info("alive on %s", address)
        await self._component.start()
        spare_what_is_there()
        self._readiness.open()
        for name in self._service_names:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._write_ready_file(address, self._tls.told)
        self._tls.on_told(partial(self._write_ready_file, address))
        _log.info("ready")

    async def _open_metrics(self) -> None:
        """Raises Unavailable, ConfigError."""
        if self._config.metrics_port:
            port = MetricsPort(
                self._config.metrics_host,
                self._config.metrics_port,
                lambda: families_of(self._admin.figures()),
                is_ready=self._is_serving,
            )
            await port.start()
            self._metrics_port = port
        endpoint = metrics_endpoint(self._config, os.environ)
        if endpoint:
            self._metrics_export = MetricsExport(self._config, endpoint, self._admin.figures)
            await self._metrics_export.start()

    def _is_serving(self) -> bool:
        return self._readiness.is_open and not self._ending.asked.is_set()

    async def _add_common_services(self) -> None:
        for name in self._service_names:
            await self._health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
        add_common_services(self._server, self._admin, self._health, self._service_names)

    def _log_missing_callers(self) -> None:
        missing = self._access.find_missing((*self._service_names, *COMMON_SERVICES))
        if missing:
            _log.error(
                "%s: not in the table of who may call what at %s (weir.rpc.access); nobody may",
                ", ".join(missing),
                self._access.port.value,
            )

    def _log_denial(self, caller: RpcCaller) -> None:
        actor = "nobody" if caller.identity is None else f"peer:{caller.identity.uri}"
        denied = Change(actor, "call", shown_name(caller.method), "denied", reason="PermissionDenied")
        if self._changes.write(denied):
            _log.warning("%s at %s may not call %s", actor, caller.peer, denied.object)

    async def _try_find_failure(self, starting: "asyncio.Task[None]") -> int | None:
        """The exit code of a start-up that failed: one clear line in the log, a traceback only if it is a defect."""
        try:
            await starting
        except (ConfigError, ModelError, UntrustedFolder) as error:
            _log.error("could not start: %s", error)
            return _EXIT_USAGE
        except (WeirError, OSError) as error:
            _log.error("could not start: %s", error)
        except Exception:  # noqa: BLE001 - the boundary of the process
            _log.exception("could not start: unexpected error")
        else:
            return None
        return 1

    def _describe(self) -> Description:
        own = {
            "rpc_internal_errors_total": float(self._errors.num_internal_errors),
            "uncollected_errors_total": float(self._loop_errors.num_errors),
            **self._tls.metrics(),
        }
        if self._component is None:
            return Description(own)
        described = self._component.describe()
        return replace(described, metrics={**described.metrics, **own})

    def _write_ready_file(self, address: str, told: dict[str, str]) -> None:
        if not self._config.ready_file or self._ending.asked.is_set():
            return
        path = Path(self._config.ready_file)
        fields = {
            "pid": os.getpid(),
            "address": address,
            "role": self._role,
            "process_id": self._process_id,
            "notes": self._notes,
            **told,
        }
        unfinished = path.with_name(f"{path.name}.{os.getpid()}.new")
        unfinished.write_text(json.dumps(fields))
        unfinished.replace(path)
        self._has_ready_file = True

    def _remove_ready_file(self) -> None:
        if self._has_ready_file:
            Path(self._config.ready_file).unlink(missing_ok=True)

    async def _shut_down(self, starting: "asyncio.Task[None]") -> None:
        grace_s = self._config.grace_s
        flush_s = _TRACE_FLUSH_S if self._metrics_export is None else _TRACE_FLUSH_S + _METRICS_FLUSH_S
        exit_hard_after(grace_s + _STOP_S + _SERVER_STOP_S + flush_s + _EXIT_MARGIN_S)
        await self._health.enter_graceful_shutdown()
        self._remove_ready_file()
        if not starting.done():
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._try_find_failure(starting)
        if self._component is not None:
            await self._bounded("drain", self._component.drain(grace_s), grace_s + 1.0)
        if self._metrics_export is not None:  # the last figures, while there is somebody whose they are
            await self._bounded("metrics export", self._metrics_export.stop(), _METRICS_FLUSH_S)
        if self._component is not None:
            await self._bounded("stop", self._component.stop(), _STOP_S)
        if self._metrics_port is not None:
            await self._bounded("metrics port", self._metrics_port.stop(), _SERVER_STOP_S)
        await self._bounded("server stop", self._server.stop(_SERVER_STOP_S), _SERVER_STOP_S + 1.0)
        await self._bounded("watching certificates", self._tls.stop(), _STOP_S)
        await self._bounded("release", self._release(), _STOP_S)
        if not await asyncio.to_thread(shutdown_tracing, self._tracing, _TRACE_FLUSH_S):
            _log.warning("some traces were not sent within %.0f s", _TRACE_FLUSH_S)
        _log.info("stopped")

    async def _release(self) -> None:
        with self._resources:
            if self._listening is not None:
                self._listening.withdraw()

    async def _bounded(self, what: str, work: Coroutine[Any, Any, None], limit_s: float) -> None:
        """A part of the shutdown that fails or hangs is logged, and does not keep the others from happening."""
        try:
            await asyncio.wait_for(work, limit_s)
        except TimeoutError:
            _log.error("%s took longer than %.1f s; going on", what, limit_s)
        except Exception:  # noqa: BLE001 - the boundary of the process
            _log.exception("%s failed; going on", what)


def add_common_services(
    server: grpc.aio.Server, admin: AdminService, servicer: health.aio.HealthServicer, service_names: Sequence[str]
) -> None:
    """What every process serves beside `service_names`."""
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    admin_pb2_grpc.add_AdminServicer_to_server(admin, server)
    add_reflection((*service_names, _ADMIN_NAME, health.SERVICE_NAME), server)
