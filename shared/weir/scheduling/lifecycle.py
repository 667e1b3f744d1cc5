"""The life of a request in the scheduler: how it enters, is granted and leaves, and what its gateway is sent.

Each step changes the request table, counts, and adds to the commands what is to be done.
"""

from enum import Enum

from weir.bus.messages import Grant, Held, HeldReply, HeldRequest, RefusalReason, Revoke, Submit, SubmitReply
from weir.scheduling.commands import CommandQueue, EnteredQueue, LeftQueue, Refusal, SendGrant, SendRevoke
from weir.scheduling.request import PlacementPlan, ScheduledRequest
from weir.scheduling.request_table import RequestTable


class Verdict(Enum):
    """What became of a request that its gateway holds."""

    KNOWN = "known"
    ADOPTED = "adopted"
    REFUSED = "refused"


class RequestLifecycle:
    """A request is queued, then granted, and ends once; a message that comes late or twice changes nothing."""

    def __init__(self, requests: RequestTable, commands: CommandQueue) -> None:
        self._requests = requests
        self._commands = commands
        self._replies: dict[str, SubmitReply] = {}
        """By outcome: what answers a Submit that comes after its request is over."""

    def queue(self, submit: Submit, num_uncached_tokens: int, now_s: float) -> None:
        """A new request, which pays for what it may use."""
        request = self._requests.enqueue(submit, now_s, num_uncached_tokens)
        self._requests.tenants.pay(request.tenant, submit, now_s)
        self._commands.add(EnteredQueue(request.request_id, request.lane))

    def queue_again(self, submit: Submit, now_s: float) -> Verdict:
        """A Submit of a newer dispatch: its request was admitted before, and granted in vain."""
        was_queued = submit.request_id in self._requests.lanes
        verdict = self._reconcile(HeldRequest(submit, None), submit.gateway_id, now_s)
        if verdict is Verdict.ADOPTED and not was_queued:
            self._commands.add(EnteredQueue(submit.request_id, self._requests.lane_of(submit)))
        return verdict

    def refuse(self, submit: Submit, refusal: Refusal, now_s: float) -> SubmitReply:
        self._commands.counts[f"refused_{refusal.reason.value}"] += 1
        quota = self._requests.tenants.try_quota(submit.tenant, now_s)
        reply = SubmitReply(self._commands.epoch, False, *refusal, quota)
        self._requests.tombstones.put(submit.request_id, reply, now_s, dispatch=submit.dispatch)
        return reply

    def grant(self, request: ScheduledRequest, plan: PlacementPlan, now_s: float) -> None:
        self._requests.place(request, plan, now_s)
        self._commands.counts[f"granted_{request.lane}"] += 1
        quota = self._requests.tenants.try_quota(request.tenant, now_s)
        grant = Grant(self._commands.epoch, request.request_id, plan.placement, quota)
        self._commands.add(SendGrant(request.submit.gateway_id, grant))

    def decline(self, request: ScheduledRequest, now_s: float) -> None:
        """Its gateway did not take the grant. No tombstone: if it runs under another one, its gateway lists it."""
        self._drop(request, "declined", None, now_s)

    def revoke(self, request: ScheduledRequest, refusal: Refusal, now_s: float) -> None:
        """The scheduler gives up what waits; its gateway gets a Revoke."""
        dispatch = request.dispatch
        self._commands.counts[f"revoked_{refusal.reason.value}"] += 1
        reply = SubmitReply(self._commands.epoch, False, *refusal)
        self._requests.remove(request, reply, now_s, up_to_dispatch=dispatch)
        reason, message, retry_after_ms, _ = refusal
        revoke = Revoke(self._commands.epoch, request.request_id, dispatch, reason, message, retry_after_ms)
        self._commands.add(SendRevoke(request.submit.gateway_id, revoke))

    def end(self, request_id: str, outcome: str, now_s: float) -> None:
        """Nobody wants the request any more, known or not."""
        reply = self._replies.get(outcome)
        if reply is None:
            message = f"the request is over: {outcome}"
            reply = self._replies[outcome] = SubmitReply(self._commands.epoch, False, RefusalReason.CANCELLED, message)
        request = self._requests.try_get(request_id)
        if request is not None:
            self._drop(request, outcome, reply, now_s)
        else:
            self._requests.tombstones.put(request_id, reply, now_s)

    def held(self, held: Held, missing_s: float, now_s: float) -> HeldReply:
        """Takes over what the gateway holds, and frees what its lists have lacked for `missing_s`. The list was heard
        (`Gateways.hear`)."""
        verdicts = [(self._reconcile(entry, held.gateway_id, now_s), entry.submit) for entry in held.requests]
        for request_id in self._requests.gateways.missing_from(held):
            self._judge_missing(request_id, missing_s, now_s)
        num_adopted = sum(verdict is Verdict.ADOPTED for verdict, _ in verdicts)
        self._commands.counts["adopted"] += num_adopted
        refused_ids = tuple(submit.request_id for verdict, submit in verdicts if verdict is Verdict.REFUSED)
        return HeldReply(self._commands.epoch, num_adopted, refused_ids)

    def drop_gateway(self, gateway_id: str, now_s: float) -> None:
        """Its requests get no tombstones: a gateway that was only cut off lists them again when it is back. What
        workers keep for another gateway stays reserved as long, or until that one lists it."""
        if self._requests.gateways.lose(gateway_id, now_s):
            self._commands.counts["gateways_lost"] += 1
        lost_s = now_s - self._requests.gateways.lost_since_s(gateway_id)
        for request_id in self._requests.gateways.requests_of(gateway_id):
            request = self._requests.try_get(request_id)
            if request is not None and (request.placement is None or lost_s >= request.submit.keep_ms / 1000):
                self._drop(request, "gateway_lost", None, now_s)
        if not self._requests.gateways.requests_of(gateway_id):
            self._requests.gateways.remove(gateway_id)

    def _judge_missing(self, request_id: str, missing_s: float, now_s: float) -> None:
        request = self._requests.try_get(request_id)
        if request is None:
            return
        if request.missing_since_s is None:
            request.missing_since_s = now_s
        elif now_s - request.missing_since_s > missing_s:
            self._drop(request, "missing", None, now_s)

    def _drop(self, request: ScheduledRequest, outcome: str, reply: SubmitReply | None, now_s: float) -> None:
        self._commands.counts[f"ended_{outcome}"] += 1
        if request.placement is None:
            self._commands.add(LeftQueue(request.request_id, outcome))
        self._requests.remove(request, reply, now_s)

    def _reconcile(self, entry: HeldRequest, gateway_id: str, now_s: float) -> Verdict:
        """Takes the request over if the table lacks it. A newer dispatch wins, and of one dispatch what the gateway
        runs: it takes one grant of each, so that any other one of the same dispatch is void."""
        request_id = entry.submit.request_id
        if entry.submit.gateway_id != gateway_id:
            return Verdict.REFUSED
        request = self._requests.try_get(request_id)
        was_queued = request is not None and request.plan is None
        if request is None:
            verdict = self._take_over(entry, now_s)
        else:
            if _dispatch(entry) < request.dispatch and request.submit.gateway_id != gateway_id:
                return Verdict.REFUSED  # another gateway has taken it over
            request.missing_since_s = None
            if _dispatch(entry) < request.dispatch:
                return Verdict.KNOWN
            verdict = self._update(request, entry, now_s)
        request = self._requests.try_get(request_id)
        if was_queued and (request is None or request.plan is not None):
            self._commands.add(LeftQueue(request_id, verdict.value))
        if request is not None:
            self._requests.progressed(request, entry.num_output_tokens, now_s)
            if entry.is_prefilled:
                self._requests.reservations.mark_prefilled(request, now_s)
        return verdict

    def _take_over(self, entry: HeldRequest, now_s: float) -> Verdict:
        """However full the lane is: it was admitted before whatever fills it, by a scheduler that kept the bound."""
        submit = entry.submit
        if self._requests.tombstones.covers(entry):
            return Verdict.REFUSED
        if entry.placement is not None:
            self._requests.adopt(submit, entry.placement, entry.num_output_tokens, now_s)
            return Verdict.ADOPTED
        if not self._requests.has_lane_of(submit):
            return Verdict.REFUSED
        self._requests.enqueue_ahead(submit, now_s)
        return Verdict.ADOPTED

    def _update(self, request: ScheduledRequest, entry: HeldRequest, now_s: float) -> Verdict:
        """Of a dispatch that is not older than the table's."""
        if entry.placement is not None:
            if entry.placement == request.placement:
                return Verdict.KNOWN
            self._requests.follow(request, entry.placement, now_s)
            self._requests.rebind(request, entry.submit, now_s)
            return Verdict.ADOPTED
        if entry.submit.dispatch == request.dispatch:
            return Verdict.KNOWN
        if not self._requests.has_lane_of(entry.submit):
            self._requests.remove(request, None, now_s)
            return Verdict.REFUSED
        self._requests.queue_again(request, entry.submit, now_s)
        return Verdict.ADOPTED


def _dispatch(entry: HeldRequest) -> int:
    return entry.submit.dispatch if entry.placement is None else entry.placement.dispatch
