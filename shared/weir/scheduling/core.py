"""The scheduler's decisions: events in, commands out; the clock is injected, and there is no I/O.

    Submit ──> refused
       └─────> queued ──> granted ──> ended by its gateway, freed (its gateway is gone or dropped it)
                ^ │          └──────> submitted again, under a newer dispatch ──┐
                │ └─> cancelled, waited too long, freed (its gateway is gone or dropped it)
                └───────────────────────────────────────────────────────────────┘

A granted request ends when its gateway says so, which hears its workers on streams of its own; where the gateway is
silent it ends after `gateway_ttl_s`. A worker that is silent here gets nothing new, and that is all.

Every event may come late, twice or never: the answer to a repeated one is the same, and what a lost one would
have said comes with its gateway's list of held requests within a second.
"""

from collections.abc import Mapping

from weir.bus.messages import (
    Cancel,
    Finish,
    Held,
    HeldReply,
    Outcome,
    Placement,
    Prefilled,
    Submit,
    SubmitReply,
    WorkerRecord,
)
from weir.bus.prefix_news import PrefixChanged, PrefixSnapshot
from weir.bus.queue_report import QueueReport
from weir.core.clock import Clock
from weir.core.roles import WORKER_ROLES
from weir.policy.registry import PolicySpec
from weir.policy.seams import Policy
from weir.scheduling.admission import Admission, Rates, Shedding
from weir.scheduling.commands import Command, CommandQueue, Refusal
from weir.scheduling.fairness import GroupKey
from weir.scheduling.granter import Granter
from weir.scheduling.lane_rates import LaneRates
from weir.scheduling.lifecycle import RequestLifecycle, Verdict
from weir.scheduling.limits import CoreLimits
from weir.scheduling.migrations import Migrations
from weir.scheduling.placer import Placer
from weir.scheduling.queue_report import queue_report
from weir.scheduling.rebalancing.rebalancer import Rebalancer
from weir.scheduling.request import ScheduledRequest
from weir.scheduling.request_table import RequestTable, check_requests
from weir.scheduling.tenants import QuotaDebt
from weir.scheduling.workers import PREFILL, Workers

_REACH_S = 1.0
"""A grant this old has reached its prefill worker, if it ever will."""
_FROM_ZERO = ("submitted", "adopted", "workers_lost", "gateways_lost", "worker_malformed", "rebalanced")
"""Shown before anything is counted, as are grants of lanes: a series that begins at 1 has never risen."""


class SchedulerCore:
    """Feed it events; after each, `decide` says what is to be done."""

    def __init__(self, limits: CoreLimits, clock: Clock, epoch: int, policy: Policy | None = None) -> None:
        """`policy`: first come first served, if none is given. It must be used by nobody else."""
        self.epoch = epoch
        self._limits = limits
        self._policy = policy or PolicySpec("fcfs").make()
        self._clock = clock
        self._queued_reply = SubmitReply(epoch, queued=True)
        self._requests = RequestTable(limits, self._policy, clock.now_s())
        self._workers = Workers(limits.worker_ttl_s)
        self._placer = Placer(limits, self._workers, self._requests.reservations, self._requests.wanting)
        self._rates = Rates(limits.max_models)
        self._lane_rates = LaneRates()
        self._commands = CommandQueue(epoch)
        self._life = RequestLifecycle(self._requests, self._commands)
        self._migrations = Migrations(self._requests, self._workers, self._commands)
        self._rebalancer = Rebalancer(self._requests, self._workers, self._migrations, self._commands)
        self._is_bus_away = False
        self._ticked_at_s = clock.now_s()
        self._has_decided = False
        """Since the last tick. A leader that is not certain of it does not."""
        self._gather_until_s = clock.now_s() + limits.gather_s
        self._apply(limits)

    @property
    def is_gathering(self) -> bool:
        """Just started: gateways and workers are reporting what there is, and nothing is placed yet."""
        return self._clock.now_s() < self._gather_until_s

    @property
    def is_idle(self) -> bool:
        return len(self._requests) == 0

    def is_granted(self, request_id: str, placement: Placement) -> bool:
        """Under this placement."""
        request = self._requests.try_get(request_id)
        return request is not None and request.placement == placement

    def knows_gateway(self, gateway_id: str) -> bool:
        return gateway_id in self._requests.gateways

    def submit(self, submit: Submit) -> SubmitReply:
        """Queues the request or refuses it; a repeated one gets the answer that it got before."""
        now_s = self._clock.now_s()
        if submit.lost_worker_id:
            self.worker_gone(submit.lost_worker_id)
        known = self._requests.try_get(submit.request_id)
        if known is not None and submit.dispatch <= known.dispatch:
            return self._queued_reply
        earlier_reply = self._requests.tombstones.try_reply(submit, now_s)
        if earlier_reply is not None:
            return earlier_reply
        if submit.dispatch > 1 and self._life.queue_again(submit, now_s) is not Verdict.REFUSED:
            return self._queued_reply
        self._commands.counts["submitted"] += 1
        refusal = self._admission.try_refuse(submit, is_gathering=now_s < self._gather_until_s, now_s=now_s)
        refusal = refusal or self._shedding.try_refuse(submit, now_s)
        if refusal is not None:
            return self._life.refuse(submit, refusal, now_s)
        reads_cache = self._policy.reads_cache
        num_uncached_tokens = self._placer.num_uncached_tokens(submit) if reads_cache else submit.num_prompt_tokens
        self._life.queue(submit, num_uncached_tokens, now_s)
        return self._queued_reply

    def cancel(self, cancel: Cancel) -> None:
        """Drops the request wherever it is, and refuses a Submit of it that comes late. A gateway that another one took
        the request from has no say in it."""
        request = self._requests.try_get(cancel.request_id)
        if request is not None and request.submit.gateway_id != cancel.gateway_id:
            return
        self._life.end(cancel.request_id, "cancelled", self._clock.now_s())

    def finish(self, finish: Finish) -> None:
        """The gateway closed the request."""
        request = self._requests.try_get(finish.request_id)
        if request is not None and request.dispatch > finish.dispatch:
            return
        now_s = self._clock.now_s()
        if request is not None:
            model = request.submit.model
            self._rates.add(model, now_s, is_backlogged=self._requests.lanes.has_queued(model))
            self._count_end(request, now_s)
            self._requests.progressed(request, finish.num_output_tokens, now_s)
        if request is not None and request.placement is not None and finish.outcome is Outcome.FINISHED:
            self._placer.finished(request, finish.num_output_tokens)
            self._policy.order.finished(request.waiting, finish.num_output_tokens, now_s)
        self._life.end(finish.request_id, finish.outcome.value, now_s)

    def progressed(self, request_id: str, num_output_tokens: int) -> None:
        """So many tokens of a granted request are delivered by now."""
        request = self._requests.try_get(request_id)
        if request is not None:
            self._requests.progressed(request, num_output_tokens, self._clock.now_s())

    def prefilled(self, prefilled: Prefilled) -> None:
        """The request has its first token: its prefill worker has room for another."""
        request = self._requests.try_get(prefilled.request_id)
        if request is not None and request.dispatch == prefilled.dispatch:
            self._requests.reservations.mark_prefilled(request, self._clock.now_s())

    def grant_answered(self, request_id: str, placement: Placement, *, accepted: bool) -> None:
        """The gateway's answer to a Grant; declined, the reservation is free again."""
        request = self._requests.try_get(request_id)
        if not accepted and request is not None and request.placement == placement:
            self._life.decline(request, self._clock.now_s())

    def held(self, held: Held) -> HeldReply:
        """Takes over what the gateway holds, and frees what it does not hold any more."""
        now_s = self._clock.now_s()
        if not self._requests.gateways.hear(held, now_s):
            return HeldReply(self.epoch, num_adopted=0)
        self._migrations.heard(held.requests, now_s)
        reply = self._life.held(held, self._limits.missing_s, now_s)
        for entry in held.requests:
            placement = entry.placement
            if placement is None or placement.decode_worker_id in self._workers:
                continue
            if self.is_granted(entry.submit.request_id, placement):
                self._workers.recall(placement.decode_worker_id)
        return reply

    def prefixes_changed(self, message: PrefixChanged) -> None:
        """Pages with these hashes came into an arena, or went."""
        self._placer.prefixes_changed(message, self._clock.now_s())

    def prefixes_replaced(self, snapshot: PrefixSnapshot) -> None:
        """All pages with a hash that an arena has, after `unknown_prefixes` named it."""
        self._placer.prefixes.replace(snapshot, self._clock.now_s())

    def unknown_prefixes(self) -> tuple[str, ...]:
        """Arenas of whose changes some were lost: a snapshot of each is needed."""
        return self._placer.prefixes.take_unknown(self._clock.now_s())

    def worker_seen(self, record: WorkerRecord, revision: int) -> None:
        """A registry entry came; only one of a new revision is a sign of life."""
        if record.role not in WORKER_ROLES:
            self._commands.counts["worker_malformed"] += 1
            return
        now_s = self._clock.now_s()
        if self._workers.put(record, revision, now_s) and record.role == PREFILL:
            num_on_worker = record.num_running + record.num_waiting
            self._requests.reservations.settle_prefills(record.worker_id, num_on_worker, now_s - _REACH_S, now_s)

    @property
    def migrations(self) -> Migrations:
        """For who asks gateways to begin them."""
        return self._migrations

    def migration_answered(self, request_id: str, placement: Placement, *, accepted: bool) -> None:
        """The gateway's answer to a Migrate; declined, the room there is free again."""
        self._migrations.answered(request_id, placement, accepted=accepted, now_s=self._clock.now_s())

    @property
    def workers(self) -> Workers:
        """To look at."""
        return self._workers

    def worker_gone(self, worker_id: str) -> None:
        """Its registry entry was taken back, or nothing was heard of it for too long: it gets nothing new. What is
        reserved on it stays reserved, for its gateways may hear it well, until they say that it ended."""
        if self._workers.silence(worker_id):
            self._commands.counts["workers_lost"] += 1
        self._forget_silent()

    def bus_changed(self, *, is_connected: bool) -> None:
        """While the bus is away nobody can be heard, so nobody is judged by silence; nor for one time to live after."""
        if is_connected and self._is_bus_away:
            self._excuse_silence()
        self._is_bus_away = not is_connected

    def tick(self) -> None:
        """Lets time pass: whoever waited or was silent too long is dealt with."""
        now_s = self._clock.now_s()
        if now_s - self._ticked_at_s > self._limits.max_stall_s:
            self._excuse_silence()
        may_grant = self._has_decided and not self._is_bus_away
        self._lane_rates.stand_still(
            now_s - self._ticked_at_s, lambda model: not may_grant or not self._workers.can_serve(model)
        )
        self._has_decided = False
        self._ticked_at_s = now_s
        self._requests.tombstones.expire(now_s)
        self._placer.prefixes.forget_silent(now_s)
        self._shedding.give_up(now_s)
        if self._is_bus_away:
            return
        for worker_id in self._workers.expired(now_s):
            self.worker_gone(worker_id)
        for gateway_id in self._requests.gateways.expired(now_s):
            self._life.drop_gateway(gateway_id, now_s)
        self._forget_silent()

    def decide(self) -> tuple[Command, ...]:
        """Grants whatever can start now; returns everything to be done since the last call."""
        now_s = self._clock.now_s()
        self._has_decided = True
        if now_s >= self._gather_until_s and not self._is_bus_away:
            for model in self._requests.lanes.models():
                while (decision := self._granter.try_decide(model, now_s)) is not None:
                    request, outcome = decision
                    if isinstance(outcome, Refusal):
                        self._life.revoke(request, outcome, now_s)
                    else:
                        self._life.grant(request, outcome, now_s)
            self._migrations.plan(now_s)
            self._rebalancer.plan(now_s)
        return self._commands.take()

    @property
    def num_queued(self) -> int:
        return len(self._requests.lanes)

    def queue_report(self) -> QueueReport:
        """What waits now, for gateways."""
        return queue_report(self.epoch, self._requests, self._limits, self._lane_rates, self._clock.now_s())

    def metrics(self) -> dict[str, float]:
        """Counters (`_total`) and gauges."""
        counted = dict.fromkeys((*_FROM_ZERO, *(f"granted_{lane.name}" for lane in self._limits.lanes)), 0)
        counted |= self._commands.counts
        counts = {f"{name}_total": float(count) for name, count in counted.items()}
        gauges = {"epoch": self.epoch, "workers": len(self._workers), "is_gathering": self.is_gathering}
        own = {name: float(value) for name, value in gauges.items()}
        now_s = self._clock.now_s()
        placed = self._placer.metrics(now_s)
        moved = self._migrations.metrics() | self._rebalancer.metrics(now_s)
        return counts | self._requests.metrics() | placed | moved | own

    def worker_records(self) -> tuple[WorkerRecord, ...]:
        """Of those that are heard."""
        return self._workers.records()

    def lane_metrics(self) -> dict[str, dict[str, float]]:
        """lane -> metric -> value."""
        return self._requests.lane_metrics(self._commands.counts, self._clock.now_s())

    def tenant_metrics(self) -> dict[str, dict[str, float]]:
        """tenant -> metric -> value; of those that ever had a request."""
        return self._requests.tenants.metrics(self._clock.now_s())

    def tenant_counters(self) -> dict[GroupKey, dict[str, float]]:
        """(model, lane) -> tenant -> service by virtual token counter: to be kept for the next scheduler."""
        return self._requests.fairness.values()

    def restore_tenant_counters(self, counters: Mapping[GroupKey, Mapping[str, float]]) -> None:
        """What an earlier scheduler counted; of lanes and tenants that are configured now."""
        self._requests.fairness.restore(counters, self._limits.lanes_by_name, self._limits.tenants_by_name)

    def quota_debts(self) -> dict[str, QuotaDebt]:
        """Tenants that have used up some of their quotas: to be kept for the next scheduler."""
        return self._requests.tenants.debts(self._clock.now_s())

    def restore_quota_debts(self, debts: Mapping[str, QuotaDebt]) -> None:
        """What an earlier scheduler's tenants had used up; of those that are configured now."""
        self._requests.tenants.restore_debts(debts, self._clock.now_s())

    def check_integrity(self) -> tuple[str, ...]:
        """What does not add up; empty when all is well."""
        return check_requests(self._requests)

    def set_limits(self, limits: CoreLimits) -> None:
        """From now on; nothing that waits or runs is lost. If anything raises, the earlier ones stay."""
        self._requests.set_limits(limits, self._policy, self._clock.now_s())
        self._apply(limits)

    def set_policy(self, policy: Policy) -> None:
        """From now on, also for what waits already. It must be used by nobody else. If anything raises, the earlier
        one stays."""
        if policy.reads_cache and not self._policy.reads_cache:
            # The earlier one does not read it, so that it may stay if anything raises.
            for request in self._requests.lanes.requests():
                request.set_uncached(self._placer.num_uncached_tokens(request.submit))
        self._requests.set_policy(policy)
        self._policy = policy
        self._apply(self._limits)

    def _apply(self, limits: CoreLimits) -> None:
        self._limits = limits
        self._workers.let_prompts_cross(limits.placing.crossing == "prompts")
        self._placer.set_limits(limits)
        self._migrations.set_limits(limits, self._placer.pools)
        self._rebalancer.set_limits(limits, self._placer)
        self._admission = Admission(limits, self._requests, self._placer, self._rates)
        self._shedding = Shedding(limits, self._requests, self._rates, self._life)
        self._granter = Granter(limits, self._requests, self._workers, self._placer)

    def _forget_silent(self) -> None:
        """Workers that nothing is reserved on any more."""
        for worker_id in self._workers.silent():
            if not self._requests.reservations.requests_on(worker_id):
                self._workers.remove(worker_id)

    def _count_end(self, request: ScheduledRequest, now_s: float) -> None:
        """How fast its lane goes, for `queue_report`."""
        model, lane = request.submit.model, request.lane
        if lane not in self._limits.lanes_by_name or request.placement is None:
            return
        is_backlogged = self._requests.lanes.num_tenants(model, lane) > 0
        num_running = self._requests.reservations.num_running(lane)
        self._lane_rates.add(model, lane, num_running, now_s, is_backlogged=is_backlogged)

    def _excuse_silence(self) -> None:
        now_s = self._clock.now_s()
        self._workers.excuse_silence(now_s)
        self._requests.gateways.excuse_silence(now_s)
