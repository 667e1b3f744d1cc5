"""How requests leave the scheduler, and which gateway gets a Revoke."""

from weir.bus.messages import RefusalReason, Revoke, SubmitReply
from weir.scheduling.commands import CommandQueue, LeftQueue, Refusal, SendRevoke
from weir.scheduling.request import ScheduledRequest
from weir.scheduling.request_table import RequestTable


class RequestCloser:
    """Each method takes a request out of everything."""

    def __init__(self, requests: RequestTable, commands: CommandQueue) -> None:
        self._requests = requests
        self._commands = commands
        self._replies: dict[str, SubmitReply] = {}
        """By outcome: what answers a Submit that comes after its request is over."""

    def revoke(self, request: ScheduledRequest, refusal: Refusal, now_s: float) -> None:
        """The scheduler gives up what waits; its gateway is told."""
        dispatch = request.dispatch
        self._commands.counts[f"revoked_{refusal.reason.value}"] += 1
        reply = SubmitReply(self._commands.epoch, False, *refusal)
        self._requests.remove(request, reply, now_s, up_to_dispatch=dispatch)
        revoke = Revoke(self._commands.epoch, request.request_id, dispatch, *refusal)
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

    def decline(self, request: ScheduledRequest, now_s: float) -> None:
        """Its gateway did not take the grant. No tombstone: if it runs under another one, its gateway lists it."""
        self._drop(request, "declined", None, now_s)

    def judge_missing(self, request_id: str, missing_s: float, now_s: float) -> None:
        """Its gateway's list lacks it; if that has gone on for `missing_s`, it is freed."""
        request = self._requests.try_get(request_id)
        if request is None:
            return
        if request.missing_since_s is None:
            request.missing_since_s = now_s
        elif now_s - request.missing_since_s > missing_s:
            self._drop(request, "missing", None, now_s)

    def drop_gateway(self, gateway_id: str, now_s: float) -> None:
        """Its requests get no tombstones: a gateway that was only cut off lists them again when it is back."""
        self._commands.counts["gateways_lost"] += 1
        for request_id in self._requests.gateways.requests_of(gateway_id):
            request = self._requests.try_get(request_id)
            if request is not None:
                self._drop(request, "gateway_lost", None, now_s)
        self._requests.gateways.remove(gateway_id)

    def _drop(self, request: ScheduledRequest, outcome: str, reply: SubmitReply | None, now_s: float) -> None:
        self._commands.counts[f"ended_{outcome}"] += 1
        if request.placement is None:
            self._commands.add(LeftQueue(request.request_id, outcome))
        self._requests.remove(request, reply, now_s)
