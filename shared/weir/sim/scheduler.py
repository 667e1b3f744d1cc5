"""The scheduler of a simulated system: the core itself, its clock, its delays, and the registry of workers."""

from collections.abc import Callable
from dataclasses import replace

from weir.bus.messages import (
    Cancel,
    Finish,
    Grant,
    Held,
    HeldRequest,
    Placement,
    Prefilled,
    Revoke,
    Submit,
    SubmitReply,
    WorkerRecord,
)
from weir.bus.migration import Migrate
from weir.bus.prefix_news import PrefixChanged
from weir.policy.seams import Policy
from weir.scheduling.commands import SendGrant, SendMigrate, SendRevoke
from weir.scheduling.core import SchedulerCore
from weir.scheduling.limits import CoreLimits
from weir.sim.profile import CostProfile
from weir.sim.timeline import Timeline, ns_of_ms, ns_of_s

TICK_S = 0.1
RECORD_EVERY_S = 1.0
"""As the scheduler's shell and the workers do it."""


class SimScheduler:
    """`on_grant`, `on_revoke`, `on_migrate` are called when the message is at the gateway, not before."""

    def __init__(
        self,
        limits: CoreLimits,
        policy: Policy,
        profile: CostProfile,
        timeline: Timeline,
        on_grant: Callable[[Grant], None],
        on_revoke: Callable[[Revoke], None],
        on_migrate: Callable[[Migrate], None],
    ) -> None:
        self._timeline = timeline
        self._bus_ns = ns_of_ms(profile.bus_ms)
        self._decision_ns = round(profile.decision_us * 1000)
        # There is one gateway, which lives as long as the simulation, and no message is lost.
        self.core = SchedulerCore(replace(limits, gateway_ttl_s=float("inf")), timeline, epoch=1, policy=policy)
        self._on_grant = on_grant
        self._on_revoke = on_revoke
        self._on_migrate = on_migrate
        self._num_lists = 0
        self._busy_until_ns = 0
        self._revision = 0
        self._is_stopped = False

    def start(self) -> None:
        self._tick()

    def stop(self) -> None:
        """No more ticks."""
        self._is_stopped = True

    def submit(self, submit: Submit) -> SubmitReply:
        reply = self.core.submit(submit)
        self._act()
        return reply

    def prefilled(self, prefilled: Prefilled) -> None:
        self.core.prefilled(prefilled)
        self._act()

    def finish(self, finish: Finish) -> None:
        self.core.finish(finish)
        self._act()

    def progressed(self, request_id: str, num_output_tokens: int) -> None:
        """Changes what is charged and expected, and starts nothing by itself."""
        self.core.progressed(request_id, num_output_tokens)

    def migration_answered(self, request_id: str, placement: Placement, *, accepted: bool) -> None:
        self.core.migration_answered(request_id, placement, accepted=accepted)
        self._act()

    def held(self, entry: HeldRequest) -> None:
        """The first part of a list of which the others never come: nothing is missed in it."""
        self._num_lists += 1
        self.core.held(Held(entry.submit.gateway_id, self._num_lists, (entry,), part=0, num_parts=2))
        self._act()

    def cancel(self, cancel: Cancel) -> None:
        self.core.cancel(cancel)
        self._act()

    def prefixes_changed(self, message: PrefixChanged) -> None:
        self.core.prefixes_changed(message)
        self._act()

    def worker_seen(self, record: WorkerRecord) -> None:
        self._revision += 1
        self.core.worker_seen(record, self._revision)
        self._act()

    def worker_gone(self, worker_id: str) -> None:
        """It has taken its registry entry back."""
        self.core.worker_gone(worker_id)
        self._act()

    @property
    def num_queued(self) -> int:
        return self.core.num_queued

    def _tick(self) -> None:
        if self._is_stopped:
            return
        self.core.tick()
        self._act()
        self._timeline.after(ns_of_s(TICK_S), self._tick)

    def _act(self) -> None:
        """Each message takes the scheduler's time; what it decides is sent when it is through with all before."""
        self._busy_until_ns = max(self._busy_until_ns, self._timeline.now_ns) + self._decision_ns
        arrives_ns = self._busy_until_ns + self._bus_ns
        for command in self.core.decide():
            match command:
                case SendGrant(_, grant):
                    self._timeline.at(arrives_ns, lambda grant=grant: self._on_grant(grant))  # type: ignore[misc]
                case SendRevoke(_, revoke):
                    self._timeline.at(arrives_ns, lambda revoke=revoke: self._on_revoke(revoke))  # type: ignore[misc]
                case SendMigrate(_, migrate):
                    self._timeline.at(arrives_ns, lambda migrate=migrate: self._on_migrate(migrate))  # type: ignore[misc]
                case _:
                    pass
