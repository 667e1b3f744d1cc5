"""A whole system around one core in one thread: gateways and workers that can die, and a wire that may do anything."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from math import ceil

from weir.bus.messages import (
    Cancel,
    Finish,
    Grant,
    Held,
    HeldRequest,
    Outcome,
    Placement,
    Prefilled,
    Revoke,
    Submit,
    SubmitReply,
    WorkerRecord,
)
from weir.core.clock import ManualClock
from weir.scheduling.commands import Command, EnteredQueue, LeftQueue, SendGrant, SendRevoke
from weir.scheduling.core import SchedulerCore
from weir.scheduling.limits import CoreLimits

STEP_S = 0.5


class State(Enum):
    SUBMITTING = "submitting"
    QUEUED = "queued"
    GRANTED = "granted"
    ENDED = "ended"


@dataclass
class ClientRequest:
    """As its gateway sees it. `ends` must come to exactly one."""

    submit: Submit
    state: State = State.SUBMITTING
    placement: Placement | None = None
    ends: list[str] = field(default_factory=list)

    @property
    def dispatch(self) -> int:
        return self.submit.dispatch

    def end(self, how: str) -> None:
        self.state = State.ENDED
        self.ends.append(how)


class GatewayModel:
    """What a gateway does, in as few words as possible."""

    def __init__(self, gateway_id: str, send: Callable[[object], None]) -> None:
        self.gateway_id = gateway_id
        self.requests: dict[str, ClientRequest] = {}
        self._send = send
        self._sequence = 0

    def live(self) -> list[ClientRequest]:
        return [request for request in self.requests.values() if request.state is not State.ENDED]

    def submit(self, submit: Submit) -> None:
        self.requests[submit.request_id] = ClientRequest(submit)
        self._send(submit)

    def close(self, request: ClientRequest, outcome: Outcome) -> None:
        request_id = request.submit.request_id
        if request.placement is None:
            self._send(Cancel(request_id, self.gateway_id))
        else:
            self._send(Finish(request_id, self.gateway_id, request.dispatch, outcome, 1))
        request.end(outcome.value)

    def submit_again(self, request: ClientRequest) -> None:
        """Its workers could not be reached."""
        request.submit = replace(request.submit, dispatch=request.dispatch + 1)
        request.state, request.placement = State.QUEUED, None
        self._send(request.submit)

    def on_submit_reply(self, request_id: str, reply: SubmitReply) -> None:
        request = self.requests[request_id]
        if request.state is State.SUBMITTING and request.dispatch == 1:
            if reply.queued:
                request.state = State.QUEUED
            else:
                request.end("refused")

    def on_grant(self, grant: Grant) -> bool:
        request = self.requests.get(grant.request_id)
        if request is None or request.state is State.ENDED or grant.placement.dispatch != request.dispatch:
            return False
        if request.placement is None:
            request.state, request.placement = State.GRANTED, grant.placement
        return request.placement == grant.placement

    def on_revoke(self, revoke: Revoke) -> None:
        request = self.requests.get(revoke.request_id)
        is_queued = request is not None and request.state in (State.SUBMITTING, State.QUEUED)
        if request is not None and is_queued and revoke.dispatch == request.dispatch:
            request.end(f"revoked: {revoke.reason.value}")

    def on_refused(self, said: Held, request_ids: tuple[str, ...]) -> None:
        for entry in said.requests:
            request = self.requests[entry.submit.request_id]
            is_still = (request.submit, request.placement) == (entry.submit, entry.placement)
            if entry.submit.request_id in request_ids and is_still and request.state is not State.ENDED:
                assert request.state is not State.GRANTED, f"{entry.submit.request_id} runs, and is refused"
                request.end("refused by reconciliation")

    def speak(self) -> None:
        """Repeats what was not answered, and says what it holds."""
        for request in self.live():
            if request.state is State.SUBMITTING or (request.placement is None and request.dispatch > 1):
                self._send(request.submit)
        self._sequence += 1
        held = tuple(HeldRequest(request.submit, request.placement) for request in self.live())
        self._send(Held(self.gateway_id, self._sequence, held))


class SimulatedSystem:
    """`wire` holds what is under way; whoever drives the test decides what arrives, twice, late or never."""

    def __init__(self, limits: CoreLimits, *, is_plain: bool = True) -> None:
        """`is_plain`: lanes in strict order, one tenant, first come first served, nothing overcommitted."""
        self.limits = limits
        self._is_plain = is_plain
        self.clock = ManualClock(100.0)
        self.epoch = 1
        self.core = SchedulerCore(limits, self.clock, self.epoch)
        self.wire: list[object] = []
        self.gateways: dict[str, GatewayModel] = {}
        self.workers: dict[str, WorkerRecord] = {}
        self.workers_ever: dict[str, WorkerRecord] = {}
        self.grants: dict[str, Placement] = {}
        """Placements of the present core's own making, until it frees them."""
        self.waiting: dict[str, Submit] = {}
        """What this core put in a queue."""
        self._arrived: dict[str, tuple[float, str]] = {}
        """Time and id: who of one lane and tenant is before whom."""
        self.is_bus_away = False
        self._unanswered: list[SendGrant | SendRevoke] = []
        self._submits: dict[str, Submit] = {}
        self._revision = 0
        self.silent: set[str] = set()
        """Workers that gateways reach and the scheduler does not hear."""

    def add_gateway(self, gateway_id: str) -> GatewayModel:
        self.gateways[gateway_id] = GatewayModel(gateway_id, self.wire.append)
        return self.gateways[gateway_id]

    def add_worker(self, record: WorkerRecord) -> None:
        self.workers[record.worker_id] = self.workers_ever[record.worker_id] = record

    def submit(self, submit: Submit) -> None:
        self._submits[submit.request_id] = submit
        self.gateways[submit.gateway_id].submit(submit)

    def restart_core(self) -> None:
        self.epoch += 1
        self.core = SchedulerCore(self.limits, self.clock, self.epoch)
        self.core.bus_changed(is_connected=not self.is_bus_away)
        self.grants.clear()
        self.waiting.clear()
        self._unanswered.clear()

    def deliver(self, message: object) -> None:
        """To whom it is meant for; nothing passes while the bus is away."""
        if self.is_bus_away:
            return
        match message:
            case SendGrant(gateway_id, grant) if gateway_id in self.gateways:
                accepted = self.gateways[gateway_id].on_grant(grant)
                if grant.epoch == self.core.epoch:
                    self.core.grant_answered(grant.request_id, grant.placement, accepted=accepted)
                    self._unanswered = [command for command in self._unanswered if command != message]
            case SendRevoke(gateway_id, revoke) if gateway_id in self.gateways:
                self.gateways[gateway_id].on_revoke(revoke)
                self._unanswered = [command for command in self._unanswered if command != message]
            case Submit():
                self._submits[message.request_id] = message
                reply = self.core.submit(message)
                if message.gateway_id in self.gateways:
                    self.gateways[message.gateway_id].on_submit_reply(message.request_id, reply)
            case Held():
                self._submits |= {entry.submit.request_id: entry.submit for entry in message.requests}
                held_reply = self.core.held(message)
                if message.gateway_id in self.gateways:
                    self.gateways[message.gateway_id].on_refused(message, held_reply.refused_request_ids)
            case Cancel():
                self.core.cancel(message)
            case Finish():
                self.core.finish(message)
            case Prefilled():
                self.core.prefilled(message)
        self.decide()

    def pass_time(self) -> None:
        """One step: the living speak, the core ticks, unanswered commands are sent again."""
        self.clock.advance(STEP_S)
        if not self.is_bus_away:
            for record in self.workers.values():
                if record.worker_id not in self.silent:
                    self._revision += 1
                    self.core.worker_seen(record, self._revision)
        for gateway in self.gateways.values():
            gateway.speak()
        self.core.tick()
        self.wire += [command for command in self._unanswered if self._is_wanted(command)]
        self.decide()

    def decide(self) -> None:
        commands = self.core.decide()
        for command in commands:
            self._check(command)
        assert self.core.check_integrity() == ()

    def _is_wanted(self, command: SendGrant | SendRevoke) -> bool:
        if isinstance(command, SendGrant):
            return self.core.is_granted(command.grant.request_id, command.grant.placement)
        return self.core.knows_gateway(command.gateway_id)

    def _check(self, command: Command) -> None:
        match command:
            case EnteredQueue(request_id):
                self.waiting[request_id] = self._submits[request_id]
                self._arrived[request_id] = (self.clock.now_s(), request_id)
            case LeftQueue(request_id):
                self.waiting.pop(request_id, None)
            case SendGrant(_, grant):
                if self._is_plain:
                    self._check_order(grant.request_id)
                self.waiting.pop(grant.request_id, None)
                self._check_capacity(grant)
                self._unanswered.append(command)
                self.wire.append(command)
            case SendRevoke(_, revoke):
                self.waiting.pop(revoke.request_id, None)
                self._unanswered.append(command)
                self.wire.append(command)

    def _check_order(self, granted_id: str) -> None:
        """Nobody of a more urgent lane waits, nor anybody of the same lane who came earlier."""
        lanes = [lane.name for lane in self.limits.lanes]
        granted = self._submits[granted_id]
        for request_id, submit in self.waiting.items():
            if submit.model != granted.model or request_id == granted_id:
                continue
            assert lanes.index(submit.lane) >= lanes.index(granted.lane), f"{granted_id} overtook {request_id}"
            # What was granted in vain waits by when its first scheduler heard of it, which is not seen here.
            is_first = max(granted.dispatch, submit.dispatch) == 1
            if submit.lane == granted.lane and granted_id in self.waiting and is_first:
                assert self._arrived[granted_id] < self._arrived[request_id], f"{granted_id} before {request_id}"

    def _check_capacity(self, grant: Grant) -> None:
        self.grants[grant.request_id] = grant.placement
        self.grants = {i: p for i, p in self.grants.items() if self.core.is_granted(i, p)}
        worker = self.workers_ever[grant.placement.decode_worker_id]
        mine = [p for p in self.grants.values() if p.decode_worker_id == worker.worker_id]
        on_host = [p for p in self.grants.values() if self.workers_ever[p.decode_worker_id].host_id == worker.host_id]
        num_pages = sum(p.num_reserved_pages for p in on_host)
        if self._is_plain:
            assert len(mine) <= worker.max_num_seqs
            assert num_pages <= worker.num_arena_pages
        else:
            assert len(mine) <= worker.max_num_seqs + ceil(worker.max_num_seqs * self.limits.slot_overcommit)
            assert num_pages <= 2 * worker.num_arena_pages


def reborn(record: WorkerRecord, number: int) -> WorkerRecord:
    """The same place in a new process."""
    return replace(record, worker_id=f"{record.worker_id.partition('.')[0]}.{number}")
