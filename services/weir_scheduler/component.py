"""The scheduler as a component of a process: leads, or stands by until it can."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opentelemetry.trace import Tracer

from weir.bus.protocol import Bus, BusError
from weir.bus.subjects import Subjects
from weir.core.clock import Clock
from weir.core.errors import Unavailable
from weir.core.tasks import end_tasks
from weir.runtime.service import Description
from weir.scheduling.core import SchedulerCore
from weir.scheduling.limits import CoreLimits
from weir_scheduler.effective_limits import EffectiveLimits
from weir_scheduler.leadership import Leadership
from weir_scheduler.limits_keeper import LimitsKeeper, LimitsSource
from weir_scheduler.scheduling_admin import Operators, SchedulingAdmin
from weir_scheduler.shell import SchedulerShell
from weir_scheduler.worker_admin import WorkerAdmin

logger = logging.getLogger(__name__)

_STANDBY_LOOK_S = 0.25
_RENEW_S = 0.5


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """What a scheduler goes by until a file or an operator says otherwise. Empty paths: no such file."""

    instance: str
    limits: CoreLimits
    limits_file: str = ""
    admin_key_file: str = ""
    policy: str = "fcfs"


@dataclass(frozen=True, slots=True)
class _Leader:
    shell: SchedulerShell
    keeper: LimitsKeeper
    admin: SchedulingAdmin
    worker_admin: WorkerAdmin


class SchedulerComponent:
    """Ready when it leads or knows that another does. A leader that is deposed asks for the process to be ended."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[Bus]],
        scheduler_id: str,
        settings: SchedulerSettings,
        *,
        tracer: Tracer,
        clock: Clock,
        request_shutdown: Callable[[str], None],
    ) -> None:
        self._connect = connect
        self._scheduler_id = scheduler_id
        self._settings = settings
        self._subjects = Subjects(settings.instance)
        self._operators = Operators()
        self._tracer = tracer
        self._clock = clock
        self._request_shutdown = request_shutdown
        self._resources = AsyncExitStack()
        """The bus, the leadership and the shell, as far as there are any."""
        self._tasks: list[asyncio.Task[None]] = []
        self._leader: _Leader | None = None
        self._is_deposed = False
        self._has_role = asyncio.Event()

    async def start(self) -> None:
        """Raises Unavailable when there is no bus, InvalidRequest for a limits file or a key that cannot be used."""
        if self._settings.admin_key_file:
            self._operators = await asyncio.to_thread(Operators.from_file, Path(self._settings.admin_key_file))
        try:
            bus = await self._connect()
            self._resources.push_async_callback(bus.close)
            bucket = await bus.bucket(self._subjects.leader_bucket, durable=True)
            await self._load_limits(bus, 0)
        except BusError as error:
            raise Unavailable(str(error)) from error
        leadership = Leadership(bucket, self._scheduler_id, self._clock)
        self._run("leading", self._lead(bus, leadership))
        await self._has_role.wait()

    async def drain(self, deadline_s: float) -> None:
        """Nothing to wait for: gateways hold whatever is queued or granted, and report it to the next leader."""
        del deadline_s

    def try_admin(self) -> SchedulingAdmin | None:
        """None while another scheduler leads, or may."""
        return self._leader.admin if self._leader is not None and not self._is_deposed else None

    def try_admins(self) -> tuple[SchedulingAdmin, WorkerAdmin] | None:
        """As `try_admin`, with what operators ask of workers."""
        leader = self._leader
        return (leader.admin, leader.worker_admin) if leader is not None and not self._is_deposed else None

    async def stop(self) -> None:
        await end_tasks(self._tasks)
        await self._resources.aclose()

    def describe(self) -> Description:
        """A standby has nothing but `is_leader` 0."""
        if self._leader is None:
            return Description({"is_leader": 0.0}, ())
        shell = self._leader.shell
        own = {"is_leader": 1.0, "operators_refused_total": float(self._operators.num_refused)}
        return Description({**shell.metrics(), **self._leader.keeper.metrics(), **own}, shell.check_integrity())

    async def _lead(self, bus: Bus, leadership: Leadership) -> None:
        epoch = await self._wait_for_leadership(leadership)
        self._resources.push_async_callback(leadership.release)
        keeper = await self._load_limits(bus, epoch)
        effective_limits = keeper.effective_limits
        core = SchedulerCore(effective_limits.limits, self._clock, epoch, effective_limits.policy.make())
        shell = SchedulerShell(
            bus, self._subjects, core, tracer=self._tracer, clock=self._clock, on_failure=self._request_shutdown
        )
        self._resources.push_async_callback(shell.stop)
        await shell.start()
        keeper.attach(
            lambda: shell.set_limits(keeper.effective_limits.limits),
            lambda: shell.set_policy(keeper.effective_limits.policy.make()),
        )
        await keeper.publish()  # before it is ready: gateways and workers go by it
        worker_admin = WorkerAdmin(core, shell.endpoint, self._subjects)
        self._leader = _Leader(shell, keeper, SchedulingAdmin(keeper, self._operators, core), worker_admin)
        self._run("following the limits file", keeper.keep())
        self._has_role.set()
        logger.info("leading in epoch %d", epoch)
        while await leadership.keep():  # noqa: ASYNC110  renewing is what it does, not waiting
            await asyncio.sleep(_RENEW_S)
        self._is_deposed = True
        self._request_shutdown(f"another scheduler leads after epoch {epoch}")

    async def _load_limits(self, bus: Bus, epoch: int) -> LimitsKeeper:
        """With the limits and the policy that are in force now. Raises BusError, and InvalidRequest."""
        settings = self._settings
        bucket = await bus.bucket(self._subjects.configuration_bucket, durable=True)
        source = LimitsSource(Path(settings.limits_file)) if settings.limits_file else None
        has_admin_key = self._operators.has_own_key
        effective_limits = EffectiveLimits(settings.limits, settings.policy, has_admin_key=has_admin_key)
        keeper = LimitsKeeper(effective_limits, source, bucket, epoch)
        await keeper.load()
        return keeper

    def _run(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(self._guarded(what, work)))

    async def _guarded(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:  # the boundary of a task that nobody awaits
            logger.exception("%s failed", what)
            self._request_shutdown(f"{what} failed")
        finally:
            self._has_role.set()

    async def _wait_for_leadership(self, leadership: Leadership) -> int:
        while True:
            try:
                epoch = await leadership.try_take()
            except BusError as error:
                logger.debug("looking at the leader key: %s", error)
                epoch = None
            if epoch is not None:
                return epoch
            if not self._has_role.is_set():
                logger.info("another scheduler leads, or did a moment ago: standing by")
                self._has_role.set()
            await asyncio.sleep(_STANDBY_LOOK_S)
