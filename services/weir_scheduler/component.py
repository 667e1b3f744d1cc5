"""The scheduler as a component of a process: leads, or stands by until it can."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opentelemetry.trace import Tracer

from weir.bus.protocol import Bus, BusError, KvBucket
from weir.bus.subjects import Subjects
from weir.core.clock import Clock
from weir.core.errors import Unavailable
from weir.core.tasks import end_tasks
from weir.runtime.change_log import ChangeLog
from weir.runtime.service import Description
from weir.scheduling.core import SchedulerCore
from weir.scheduling.limits import CoreLimits
from weir_scheduler.effective_limits import EffectiveLimits
from weir_scheduler.leadership import Leadership
from weir_scheduler.limits_keeper import LimitsKeeper, LimitsSource
from weir_scheduler.operator_calls import LeaderAdmins
from weir_scheduler.scheduling_admin import Operators, SchedulingAdmin
from weir_scheduler.shell import SchedulerShell
from weir_scheduler.store_maker import StoreMaker
from weir_scheduler.worker_admin import WorkerAdmin

logger = logging.getLogger(__name__)

_STANDBY_LOOK_S = 0.25
_RENEW_S = 0.5
_RENEW_AGAIN_S = 0.1
"""Until it knows that it leads, nothing is granted."""
_BEGIN_TIMEOUT_S = 20.0
_BEGIN_AGAIN_S = 0.5
_STANDBY_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """What a scheduler goes by until a file or an operator says otherwise. Empty paths: no such file."""

    instance: str
    limits: CoreLimits
    limits_file: str = ""
    admin_key_file: str = ""
    policy: str = "fcfs"
    address: str = ""
    """Of this process, for who wants to know how it does."""


@dataclass(frozen=True, slots=True)
class _Leader:
    leadership: Leadership
    shell: SchedulerShell
    keeper: LimitsKeeper
    admins: LeaderAdmins


class SchedulerComponent:
    """Ready when it leads or knows that another does. A leader that is deposed stands by again."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[Bus]],
        scheduler_id: str,
        settings: SchedulerSettings,
        *,
        tracer: Tracer,
        clock: Clock,
        request_shutdown: Callable[[str], None],
        changes: ChangeLog | None = None,
    ) -> None:
        self.changes = changes or ChangeLog(None, scheduler_id)
        self._connect = connect
        self._scheduler_id = scheduler_id
        self._settings = settings
        self._subjects = Subjects(settings.instance)
        self._operators = Operators()
        self._tracer = tracer
        self._clock = clock
        self._request_shutdown = request_shutdown
        self._resources = AsyncExitStack()
        self._term = AsyncExitStack()
        """What there is only while it leads: the leadership, the shell, the keeper's task."""
        self._tasks: list[asyncio.Task[None]] = []
        self._beginning: list[asyncio.Task[None]] = []
        self._leader: _Leader | None = None
        self._num_depositions = 0
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
        self._tasks.append(self._run("leading", self._lead_for_ever(bus, bucket)))
        await self._has_role.wait()

    async def drain(self, deadline_s: float) -> None:
        """Nothing to wait for: gateways hold whatever is queued or granted, and report it to the next leader."""
        del deadline_s

    def leader_admins(self) -> LeaderAdmins:
        """Raises Unavailable while another scheduler leads, or may, and while nobody can."""
        if self._leader is None:
            raise Unavailable("this scheduler stands by; ask the one that leads", retry_after_s=_STANDBY_RETRY_S)
        if self._leader.leadership.stuck_reason:
            raise Unavailable(self._leader.leadership.stuck_reason, retry_after_s=_STANDBY_RETRY_S)
        return self._leader.admins

    async def stop(self) -> None:
        await end_tasks(self._tasks)
        await self._end_term()
        await self._resources.aclose()

    def describe(self) -> Description:
        """A standby has nothing but `is_leader` 0 and how often it was deposed. One that leads and cannot write the
        leader key has `is_leader` 0 too, beside its numbers."""
        deposed = {"depositions_total": float(self._num_depositions)}
        if self._leader is None:
            return Description({"is_leader": 0.0, **deposed})
        shell, is_stuck = self._leader.shell, bool(self._leader.leadership.stuck_reason)
        standing = {"is_leader": float(not is_stuck), "leader_key_is_stuck": float(is_stuck)}
        refused = {"operators_refused_total": float(self._operators.num_refused)}
        own = {**standing, **refused, **self.changes.metrics(), **deposed}
        return Description({**shell.metrics(), **self._leader.keeper.metrics(), **own}, shell.check_integrity)

    async def _lead_for_ever(self, bus: Bus, bucket: KvBucket) -> None:
        """Whenever nobody else does."""
        while True:
            leadership = Leadership(
                bucket,
                self._scheduler_id,
                self._clock,
                is_connected=lambda: bus.is_connected,
                address=self._settings.address,
            )
            epoch = await self._wait_for_leadership(leadership)
            # Beside renewing: on a slow machine it takes longer than the key lives.
            self._beginning = [self._run("beginning to lead", self._begin_term(bus, leadership, epoch))]
            while await leadership.keep():  # noqa: ASYNC110  renewing is what it does, not waiting
                await asyncio.sleep(_RENEW_S if leadership.is_certain else _RENEW_AGAIN_S)
            logger.warning("another scheduler leads after epoch %d: standing by", epoch)
            self._num_depositions += 1
            await self._end_term()

    async def _end_term(self) -> None:
        self._leader = None
        await end_tasks(self._beginning)
        await self._term.aclose()
        self._term = AsyncExitStack()

    async def _begin_term(self, bus: Bus, leadership: Leadership, epoch: int) -> None:
        """Tries until it has begun, or `_end_term` ends it: a bus that fails now may be well in a moment."""
        self._term.push_async_callback(leadership.release)
        while True:
            try:
                async with asyncio.timeout(_BEGIN_TIMEOUT_S):
                    await self._try_begin(bus, leadership, epoch)
            except (BusError, TimeoutError) as error:
                problem = str(error) or f"not done within {_BEGIN_TIMEOUT_S:g} s"
                logger.warning("could not begin to lead in epoch %d: %s; again", epoch, problem)
                await asyncio.sleep(_BEGIN_AGAIN_S)
            else:
                logger.info("leading in epoch %d", epoch)
                return

    async def _try_begin(self, bus: Bus, leadership: Leadership, epoch: int) -> None:
        """Raises BusError, and leaves nothing behind then."""
        async with AsyncExitStack() as begun:
            keeper = await self._load_limits(bus, epoch)
            effective_limits = keeper.effective_limits
            core = SchedulerCore(effective_limits.limits, self._clock, epoch, effective_limits.policy.make())
            shell = SchedulerShell(
                bus,
                self._subjects,
                core,
                tracer=self._tracer,
                clock=self._clock,
                on_failure=self._request_shutdown,
                authority=leadership,
            )
            begun.push_async_callback(shell.stop)
            stores = StoreMaker(bus, self._subjects, keeper.knows_tenant)
            await stores.make_registry()
            await shell.start()
            await stores.serve(shell.endpoint)
            keeper.attach(
                lambda: shell.set_limits(keeper.effective_limits.limits),
                lambda: shell.set_policy(keeper.effective_limits.policy.make()),
            )
            await keeper.publish()  # before it is ready: gateways and workers go by it
            scheduling = SchedulingAdmin(keeper, self._operators, core)
            admins = LeaderAdmins(scheduling, WorkerAdmin(core, shell.endpoint, self._subjects))
            self._leader = _Leader(leadership, shell, keeper, admins)
            keeping = self._run("following the limits file", keeper.keep())
            making = self._run("keeping buckets", stores.keep())
            begun.push_async_callback(end_tasks, [keeping, making])
            self._term.push_async_callback(begun.pop_all().aclose)

    async def _load_limits(self, bus: Bus, epoch: int) -> LimitsKeeper:
        """With the limits and the policy that are in force now. Raises BusError, and InvalidRequest."""
        settings = self._settings
        bucket = await bus.bucket(self._subjects.configuration_bucket, durable=True)
        source = LimitsSource(Path(settings.limits_file)) if settings.limits_file else None
        own_digests = self._operators.own_digests
        effective_limits = EffectiveLimits(settings.limits, settings.policy, own_admin_digests=own_digests)
        keeper = LimitsKeeper(effective_limits, source, bucket, epoch, changes=self.changes)
        await keeper.load()
        return keeper

    def _run(self, what: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.create_task(self._guarded(what, work), name=what)

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
