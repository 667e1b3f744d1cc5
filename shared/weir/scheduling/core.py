"""The scheduler's decisions: events in, commands out; the clock is injected, and there is no I/O.

    Submit ──> refused
       └─────> queued ──> granted ──> ended by its gateway
                  │          └──────> revoked (its worker is lost), freed (its gateway is gone or dropped it)
                  └─> cancelled, waited too long, freed (its gateway is gone or dropped it)

Every event may come late, twice or never: the answer to a repeated one is the same, and what a lost one would have
said comes with its gateway's list of held requests within a second.
"""

from collections import Counter

from weir.bus.messages import (
    Cancel,
    Finish,
    Grant,
    Held,
    HeldReply,
    Prefilled,
    RefusalReason,
    Revoke,
    Submit,
    SubmitReply,
    WorkerRecord,
)
from weir.core.clock import Clock
from weir.scheduling.admission import WORKER_RETRY_MS, Admission
from weir.scheduling.commands import Command, EnteredQueue, LeftQueue, SendGrant, SendRevoke
from weir.scheduling.ledger import Ledger
from weir.scheduling.limits import CoreLimits
from weir.scheduling.placement import try_place
from weir.scheduling.rate import FinishRate
from weir.scheduling.reconcile import Verdict, reconcile
from weir.scheduling.request import Request
from weir.scheduling.workers import DECODE, PREFILL, Workers

_REACH_S = 1.0
"""A grant this old has reached its prefill worker, if it ever will."""
_DISPATCH = 1


class SchedulerCore:
    """Feed it events; after each, `decide` says what is to be done."""

    def __init__(self, limits: CoreLimits, clock: Clock, epoch: int) -> None:
        self.epoch = epoch
        self._limits = limits
        self._clock = clock
        self._ledger = Ledger(limits)
        self._workers = Workers(limits.worker_ttl_s, limits.max_models)
        self._rate = FinishRate()
        self._admission = Admission(limits, self._ledger.lanes, self._workers, self._rate)
        self._commands: list[Command] = []
        self._counts: Counter[str] = Counter()
        self._blocked: dict[str, tuple[str, int, int]] = {}
        """model -> the request that did not fit, and when: as long as nothing became free since, it still does not."""
        self._is_bus_away = False
        self._ticked_at_s = clock.now_s()
        self._gather_until_s = clock.now_s() + limits.gather_s

    @property
    def is_gathering(self) -> bool:
        """Just started: gateways and workers are telling what there is, and nothing is placed yet."""
        return self._clock.now_s() < self._gather_until_s

    @property
    def is_idle(self) -> bool:
        return len(self._ledger) == 0

    def is_granted(self, request_id: str, dispatch: int) -> bool:
        request = self._ledger.try_get(request_id)
        return request is not None and request.placement is not None and request.placement.dispatch == dispatch

    def knows_gateway(self, gateway_id: str) -> bool:
        return gateway_id in self._ledger.gateways

    def submit(self, submit: Submit) -> SubmitReply:
        """Queues the request or refuses it; a repeated one gets the answer that it got before."""
        now_s = self._clock.now_s()
        if self._ledger.try_get(submit.request_id) is not None:
            return SubmitReply(self.epoch, queued=True)
        earlier_reply = self._ledger.tombstones.try_reply(submit.request_id, now_s)
        if earlier_reply is not None:
            return earlier_reply
        self._counts["submitted"] += 1
        refusal = self._admission.try_refuse(submit, is_gathering=self.is_gathering, now_s=now_s)
        if refusal is not None:
            reply = self._refuse(*refusal)
            self._ledger.tombstones.put(submit.request_id, reply, now_s)
            return reply
        self._ledger.tombstones.remove(submit.request_id)
        request = self._ledger.enqueue(submit, now_s)
        self._commands.append(EnteredQueue(request.request_id, request.lane))
        return SubmitReply(self.epoch, queued=True)

    def cancel(self, cancel: Cancel) -> None:
        """Drops the request wherever it is, and refuses a Submit of it that comes late."""
        self._end(cancel.request_id, "cancelled")

    def finish(self, finish: Finish) -> None:
        """The gateway closed the request."""
        request = self._ledger.try_get(finish.request_id)
        if request is not None and request.placement is not None and request.placement.dispatch > finish.dispatch:
            return
        if request is not None:
            self._rate.add(self._clock.now_s())
        self._end(finish.request_id, finish.outcome.value)

    def prefilled(self, prefilled: Prefilled) -> None:
        """The request's prompt is read: its prefill worker has room for another."""
        request = self._ledger.try_get(prefilled.request_id)
        if request is not None and self.is_granted(prefilled.request_id, prefilled.dispatch):
            self._ledger.book.mark_prefilled(request, self._clock.now_s())

    def grant_answered(self, request_id: str, dispatch: int, *, accepted: bool) -> None:
        """The gateway's answer to a Grant; declined, the booking is free again."""
        if not accepted and self.is_granted(request_id, dispatch):
            self._end(request_id, "declined")

    def held(self, held: Held) -> HeldReply:
        """Takes over what the gateway holds, and frees what it does not hold any more."""
        now_s = self._clock.now_s()
        if not self._ledger.gateways.hear(held, now_s):
            return HeldReply(self.epoch, num_adopted=0)
        num_adopted = 0
        refused_ids = []
        for entry in held.requests:
            was_queued = entry.submit.request_id in self._ledger.lanes
            verdict = reconcile(entry, held.gateway_id, self._ledger, self._limits, now_s)
            if verdict is Verdict.REFUSED:
                refused_ids.append(entry.submit.request_id)
            elif verdict is Verdict.ADOPTED:
                num_adopted += 1
            if verdict is Verdict.ADOPTED and was_queued:
                self._commands.append(LeftQueue(entry.submit.request_id, "adopted"))
            if verdict is Verdict.ADOPTED and entry.placement is not None:
                self._workers.expect(entry.placement.prefill_worker_id, now_s)
                self._workers.expect(entry.placement.decode_worker_id, now_s)
        for request_id in self._ledger.gateways.missing_from(held):
            self._judge_missing(request_id, now_s)
        self._counts["adopted"] += num_adopted
        return HeldReply(self.epoch, num_adopted, tuple(refused_ids))

    def worker_seen(self, record: WorkerRecord, revision: int) -> None:
        """A registry entry was told; only one of a new revision is a sign of life."""
        if record.role not in (PREFILL, DECODE):
            self._counts["worker_malformed"] += 1
            return
        now_s = self._clock.now_s()
        if self._workers.put(record, revision, now_s) and record.role == PREFILL:
            num_on_worker = record.num_running + record.num_waiting
            self._ledger.book.settle_prefills(record.worker_id, num_on_worker, now_s - _REACH_S, now_s)

    def worker_gone(self, worker_id: str) -> None:
        """Its registry entry was taken back, or nothing was heard of it for too long."""
        if self._workers.remove(worker_id):
            self._counts["workers_lost"] += 1
        for request in self._ledger.book.requests_on(worker_id):
            self._revoke(request, RefusalReason.WORKER_LOST, f"worker {worker_id} is gone", WORKER_RETRY_MS)

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
        self._ticked_at_s = now_s
        self._ledger.tombstones.expire(now_s)
        for request in self._ledger.lanes.expired(now_s):
            message = f"lane {request.lane} had no room for it within {now_s - request.queued_at_s:.1f} s"
            retry_after_ms = self._rate.retry_after_ms(self._ledger.lanes.num_ahead(request.lane), now_s)
            self._revoke(request, RefusalReason.WAITED_TOO_LONG, message, retry_after_ms)
        if self._is_bus_away:
            return
        for worker_id in self._workers.expired(now_s):
            self.worker_gone(worker_id)
        for gateway_id in self._ledger.gateways.expired(now_s):
            self._drop_gateway(gateway_id)

    def decide(self) -> tuple[Command, ...]:
        """Grants whatever can start now; returns everything to be done since the last call."""
        if not self.is_gathering and not self._is_bus_away:
            for model in self._ledger.lanes.models():
                self._grant_from(model)
        commands = tuple(self._commands)
        self._commands.clear()
        return commands

    def metrics(self) -> dict[str, float]:
        """Counters (`_total`) and gauges."""
        counts = {f"{name}_total": float(count) for name, count in self._counts.items()}
        own = {"workers": len(self._workers), "epoch": self.epoch, "is_gathering": self.is_gathering}
        return counts | self._ledger.metrics() | {name: float(value) for name, value in own.items()}

    def check_integrity(self) -> tuple[str, ...]:
        """What does not add up in the books; empty when all is well."""
        return self._ledger.check_integrity()

    def _grant_from(self, model: str) -> None:
        """In order, until one does not fit: nobody overtakes it, or small requests would keep a large one waiting."""
        while (request := self._ledger.lanes.try_next(model)) is not None:
            situation = (request.request_id, self._ledger.book.num_frees, self._workers.num_changes)
            if self._blocked.get(model) == situation:
                return
            if not self._workers.knows_model(model):
                self._revoke(request, RefusalReason.UNKNOWN_MODEL, f"no worker ever served model {model!r}", 0)
                continue
            hosts = self._workers.hosts_of(model)
            if hosts and not any(host.can_ever_hold(request.num_tokens, request.num_pages) for host in hosts):
                message = f"no worker that is left can hold its {request.num_pages} pages"
                self._revoke(request, RefusalReason.NO_WORKER, message, WORKER_RETRY_MS)
                continue
            placement = try_place(request, hosts, self._ledger.book, self._limits, _DISPATCH)
            if placement is None:
                self._blocked[model] = situation
                return
            self._blocked.pop(model, None)
            self._ledger.place(request, placement, self._clock.now_s())
            self._counts[f"granted_{request.lane}"] += 1
            grant = Grant(self.epoch, request.request_id, placement)
            self._commands.append(SendGrant(request.submit.gateway_id, grant))

    def _revoke(self, request: Request, reason: RefusalReason, message: str, retry_after_ms: int) -> None:
        dispatch = request.placement.dispatch if request.placement else 0
        self._counts[f"revoked_{reason.value}"] += 1
        reply = SubmitReply(self.epoch, False, reason, message, retry_after_ms)
        self._ledger.remove(request, reply, self._clock.now_s())
        revoke = Revoke(self.epoch, request.request_id, dispatch, reason, message, retry_after_ms)
        self._commands.append(SendRevoke(request.submit.gateway_id, revoke))

    def _refuse(self, reason: RefusalReason, message: str, retry_after_ms: int) -> SubmitReply:
        self._counts[f"refused_{reason.value}"] += 1
        return SubmitReply(self.epoch, False, reason, message, retry_after_ms)

    def _end(self, request_id: str, outcome: str) -> None:
        """Nobody wants the request any more, known or not."""
        now_s = self._clock.now_s()
        reply = SubmitReply(self.epoch, False, RefusalReason.CANCELLED, f"the request is over: {outcome}")
        request = self._ledger.try_get(request_id)
        if request is not None:
            self._drop(request, outcome, reply)
        else:
            self._ledger.tombstones.put(request_id, reply, now_s)

    def _drop(self, request: Request, outcome: str, reply: SubmitReply | None) -> None:
        self._counts[f"ended_{outcome}"] += 1
        if request.placement is None:
            self._commands.append(LeftQueue(request.request_id, outcome))
        self._ledger.remove(request, reply, self._clock.now_s())

    def _judge_missing(self, request_id: str, now_s: float) -> None:
        request = self._ledger.try_get(request_id)
        if request is None:
            return
        if request.missing_since_s is None:
            request.missing_since_s = now_s
        elif now_s - request.missing_since_s > self._limits.missing_s:
            self._drop(request, "missing", None)

    def _drop_gateway(self, gateway_id: str) -> None:
        """Not buried: a gateway that was only cut off lists its requests again when it is back."""
        self._counts["gateways_lost"] += 1
        for request_id in self._ledger.gateways.requests_of(gateway_id):
            request = self._ledger.try_get(request_id)
            if request is not None:
                self._drop(request, "gateway_lost", None)
        self._ledger.gateways.remove(gateway_id)

    def _excuse_silence(self) -> None:
        now_s = self._clock.now_s()
        self._workers.excuse_silence(now_s)
        self._ledger.gateways.excuse_silence(now_s)
