"""The scheduler as a component of a process: leads, or stands by until it can."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from opentelemetry.trace import Tracer

from weir.bus.protocol import Bus, BusError
from weir.bus.subjects import Subjects
from weir.core.clock import Clock
from weir.core.errors import Unavailable
from weir.core.tasks import end_tasks
from weir.runtime.service import Description
from weir.scheduling.core import SchedulerCore
from weir.scheduling.limits.core_limits import CoreLimits
from weir_scheduler.effective_limits import EffectiveLimits
from weir_scheduler.leadership import Leadership
from weir_scheduler.limits_keeper import LimitsKeeper
from weir_scheduler.limits_source import LimitsSource
from weir_scheduler.operators import Operators
from weir_scheduler.scheduling_admin import SchedulingAdmin
from weir_scheduler.shell import SchedulerShell

logger = logging.getLogger(__name__)

_STANDBY_LOOK_S = 0.5
_RENEW_S = 1.0


class SchedulerComponent:
    """Ready when it leads or knows that another does. A leader that is deposed asks for the process to be ended."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[Bus]],
        instance: str,
        scheduler_id: str,
        limits: CoreLimits,
        *,
        limits_file: str = "",
        admin_key_file: str = "",
        policy: str = "fcfs",
        tracer: Tracer,
        clock: Clock,
        request_shutdown: Callable[[str], None],
    ) -> None:
        self._connect = connect
        self._subjects = Subjects(instance)
        self._scheduler_id = scheduler_id
        self._limits = limits
        self._limits_file = limits_file
        self._admin_key_file = admin_key_file
        self._operators = Operators()
        self._policy = policy
        self._tracer = tracer
        self._clock = clock
        self._request_shutdown = request_shutdown
        self._bus: Bus | None = None
        self._shell: SchedulerShell | None = None
        self._leadership: Leadership | None = None
        self._rules: LimitsKeeper | None = None
        self._rules_task: asyncio.Task[None] | None = None
        self._admin: SchedulingAdmin | None = None
        self._has_role = asyncio.Event()
        self._role_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises Unavailable when there is no bus, InvalidRequest for a limits file or a key that cannot be used."""
        if self._admin_key_file:
            self._operators = await asyncio.to_thread(Operators.from_file, Path(self._admin_key_file))
        try:
            self._bus = await self._connect()
            bucket = await self._bus.bucket(self._subjects.leader_bucket, durable=True)
            await self._load_rules(self._bus, 0)
        except BusError as error:
            raise Unavailable(str(error)) from error
        leadership = Leadership(bucket, self._scheduler_id, self._clock)
        self._role_task = asyncio.create_task(self._guarded(self._bus, leadership))
        await self._has_role.wait()

    async def drain(self, deadline_s: float) -> None:
        """Nothing to wait for: whatever is queued or granted is held by gateways, and told to the next leader."""
        del deadline_s

    def try_admin(self) -> SchedulingAdmin | None:
        """None while another scheduler leads, or may."""
        return self._admin if self._leadership is not None else None

    async def stop(self) -> None:
        tasks = [task for task in (self._rules_task, self._role_task) if task is not None]
        if tasks:
            await end_tasks(tasks)
        if self._shell is not None:
            await self._shell.stop()
        if self._leadership is not None:
            await self._leadership.release()
        if self._bus is not None:
            await self._bus.close()

    def describe(self) -> Description:
        """A standby has nothing but `is_leader` 0."""
        if self._shell is None:
            return Description({"is_leader": 0.0}, ())
        rules = self._rules.metrics() if self._rules is not None else {}
        own = {"is_leader": 1.0, "operators_refused_total": float(self._operators.num_refused)}
        return Description({**self._shell.metrics(), **rules, **own}, self._shell.check_integrity())

    async def _guarded(self, bus: Bus, leadership: Leadership) -> None:
        try:
            await self._lead(bus, leadership)
        except Exception:  # the boundary of a task that nobody awaits
            logger.exception("leading failed")
            self._request_shutdown("leading failed")
        finally:
            self._has_role.set()

    async def _lead(self, bus: Bus, leadership: Leadership) -> None:
        epoch = await self._wait_for_leadership(leadership)
        self._leadership = leadership
        rules = await self._load_rules(bus, epoch)
        effective_limits = rules.effective_limits
        core = SchedulerCore(effective_limits.limits, self._clock, epoch, effective_limits.policy.make())
        self._shell = SchedulerShell(
            bus, self._subjects, core, tracer=self._tracer, clock=self._clock, on_failure=self._request_shutdown
        )
        await self._shell.start()
        await self._follow_rules(rules, core, self._shell)
        self._has_role.set()
        logger.info("leading in epoch %d", epoch)
        while await leadership.keep():  # noqa: ASYNC110  renewing is what it does, not waiting
            await asyncio.sleep(_RENEW_S)
        self._leadership = None
        self._request_shutdown(f"another scheduler leads after epoch {epoch}")

    async def _follow_rules(self, rules: LimitsKeeper, core: SchedulerCore, shell: SchedulerShell) -> None:
        """Returns when gateways and workers can know them."""

        def limits_changed() -> None:
            core.set_limits(rules.effective_limits.limits)
            shell.act()

        def policy_changed() -> None:
            core.set_policy(rules.effective_limits.policy.make())
            shell.act()

        rules.attach(limits_changed, policy_changed)
        await rules.publish()
        self._rules = rules
        self._admin = SchedulingAdmin(rules, self._operators, core, core.epoch)
        self._rules_task = asyncio.create_task(self._guarded_keep(rules))

    async def _guarded_keep(self, rules: LimitsKeeper) -> None:
        try:
            await rules.keep()
        except Exception:  # the boundary of a task that nobody awaits
            logger.exception("following the rules failed")
            self._request_shutdown("following the rules failed")

    async def _load_rules(self, bus: Bus, epoch: int) -> LimitsKeeper:
        """What is in force now. Raises BusError, and InvalidRequest."""
        bucket = await bus.bucket(self._subjects.configuration_bucket, durable=True)
        source = LimitsSource(Path(self._limits_file)) if self._limits_file else None
        effective_limits = EffectiveLimits(self._limits, self._policy, has_admin_key=self._operators.has_own_key)
        rules = LimitsKeeper(effective_limits, source, bucket, epoch)
        await rules.load()
        return rules

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
