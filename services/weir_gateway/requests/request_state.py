"""The record of one running request: its phase, its placement, its output, and how it ended, once.

    scheduler ── grant, revoke ──┐                  ┌── output ──> frontend
    workers ──── updates ────────┼──> RequestState ─┤
    client ───── cancel ─────────┘                  └── ended ───> driver

Everything that comes in is a plain call from the event loop; nothing here waits.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from weir.bus.messages import Placement
from weir.core.clock import Clock
from weir.core.errors import Cancelled, DeadlineExceeded, InternalError, Overloaded, Unavailable, WeirError
from weir.core.life import Attempt, FinishReason, Phase, check_transition
from weir.rpc.conversions import attempt_from_pb
from weir.wire.v1 import types_pb2, worker_pb2
from weir_gateway.requests.dispatch_count import DispatchCount
from weir_gateway.requests.output import Output, output_end_from_pb
from weir_gateway.requests.token_order import TokenConflict
from weir_gateway.requests.validation import CheckedRequest
from weir_gateway.requests.worker_commands import resume_command, start_command

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0

_INTERNAL_REASONS = (
    worker_pb2.WORKER_ERROR_REASON_UNSPECIFIED,
    worker_pb2.WORKER_ERROR_REASON_STALE_ATTEMPT,
    worker_pb2.WORKER_ERROR_REASON_INTERNAL,
)


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """How a request ended. `error` is None for FINISHED alone, and then `finish_reason` is set."""

    phase: Phase
    error: WeirError | None = None
    finish_reason: FinishReason | None = None


class RequestState:
    """The attributes are public to look at and changed by the methods alone. The last phase is terminal."""

    def __init__(
        self,
        request_id: str,
        checked: CheckedRequest,
        *,
        deadline_at_s: float | None,
        traceparent: str,
        has_output: asyncio.Event,
        clock: Clock,
        on_phase: Callable[[Phase], None],
    ) -> None:
        """`has_output` is set at each change that a frontend may wait for; `traceparent` is of the request's span."""
        self.request_id = request_id
        self.checked = checked
        self.deadline_at_s = deadline_at_s
        self.has_output = has_output
        self._traceparent = traceparent
        self._clock = clock
        self._on_phase = on_phase
        self.output = Output.of(checked)
        self.phase = Phase.RECEIVED
        self.dispatches = DispatchCount()
        self.adoption = 0
        """How many workers have gone on with the present dispatch after another one."""
        self.placement: Placement | None = None
        """Set by the grant of the present dispatch; its decode worker is the one that has the sequence now."""
        self.is_admitted = False
        """Whether the scheduler queued it, however it ended."""
        self.is_known_to_scheduler = False
        """Whether the scheduler may hold it, so that it needs the end."""
        self.is_started = False
        """Whether its workers may know of it."""
        self.is_over_at_workers = False
        """Whether the workers ended it themselves, so that no Cancel is needed."""
        self.num_cached_tokens = 0
        """Tokens of the prompt that were in the prefix cache, as its workers report."""
        self.lost_worker_id = ""
        """The worker that the present dispatch was lost with, or the one before it, if it was lost with one."""
        self.is_awaiting_adopter = False
        """Whether whoever adopts the sequence of a lost worker is looked for."""
        self._num_given_tokens = 0
        """Output tokens that the present dispatch goes on from."""
        self._received_at_s = self._last_event_s = clock.now_s()
        self._last_probe_s = float("-inf")
        loop = asyncio.get_running_loop()
        self.granted: asyncio.Future[Placement] = loop.create_future()
        self.interrupted: asyncio.Future[WeirError] = loop.create_future()
        """Why its workers cannot go on with it; like `granted` and `prefilled` of the present dispatch."""
        self.prefilled: asyncio.Future[None] = loop.create_future()
        self.adopted: asyncio.Future[str] = loop.create_future()
        """The worker that has adopted the sequence, once `await_adopter` was called."""
        self.ended: asyncio.Future[RequestEnd] = loop.create_future()
        self.released = asyncio.Event()
        """Set when nobody takes the output any more."""
        on_phase(self.phase)

    @property
    def dispatch(self) -> int:
        return self.dispatches.present

    @property
    def attempt(self) -> Attempt:
        """Updates of older attempts are dropped."""
        return Attempt(self.dispatch, self.adoption)

    @property
    def age_s(self) -> float:
        return self._clock.now_s() - self._received_at_s

    @property
    def silent_s(self) -> float:
        """Time since its last token in order, or since it started."""
        return self._clock.now_s() - self._last_event_s

    @property
    def has_new_tokens(self) -> bool:
        """Whether the present dispatch has brought any."""
        return self.output.next_index > self._num_given_tokens

    # Submitted, granted, started.

    def submit(self) -> None:
        self.is_known_to_scheduler = True

    def queue(self) -> None:
        """The scheduler took it. A grant can overtake that reply, which then changes nothing."""
        if self.phase is Phase.RECEIVED:
            self.is_admitted = True
            self._enter(Phase.QUEUED)

    def grant(self, placement: Placement) -> None:
        if placement.dispatch != self.dispatch:
            raise ValueError(f"request {self.request_id}: dispatch {placement.dispatch}, not {self.dispatch}")
        self.queue()
        self._enter(Phase.GRANTED)
        self.placement = placement
        self.lost_worker_id = ""
        if not self.granted.done():  # else the wait for it has just timed out
            self.granted.set_result(placement)

    def interrupt(self, error: WeirError) -> None:
        """Its workers cannot go on with it. What their dispatch still sends counts until the next one."""
        if not self.interrupted.done():
            self.interrupted.set_result(error)

    @property
    def may_be_adopted(self) -> bool:
        """Whether it was interrupted since the worker that has, or is being handed, its sequence is lost or emptied."""
        placement, is_sampled = self.placement, self.phase in (Phase.HANDING_OFF, Phase.DECODING)
        is_lost = placement is not None and self.lost_worker_id == placement.decode_worker_id
        return is_lost and is_sampled and self.checked.try_find_end(self.output.token_ids) is None

    def await_adopter(self) -> "tuple[str, asyncio.Future[str]]":
        """From here on `resume_command` is for whoever adopts its sequence. Returns the worker that was lost, and what
        says by whom it was adopted."""
        loop = asyncio.get_running_loop()
        self.is_awaiting_adopter = True
        self.interrupted, self.adopted = loop.create_future(), loop.create_future()
        return self.lost_worker_id, self.adopted

    def follow(self, worker_id: str, address: str) -> None:
        """Its sequence is at another worker now."""
        if self.placement is None:
            raise AssertionError(f"request {self.request_id} is adopted without a grant")
        self.lost_worker_id = worker_id if worker_id == self.lost_worker_id else ""  # it has given it up meanwhile
        self._last_event_s, self._last_probe_s = self._clock.now_s(), float("-inf")
        if self.placement.is_local:
            self.placement = replace(self.placement, prefill_worker_id=worker_id, prefill_address=address)
        self.placement = replace(self.placement, decode_worker_id=worker_id, decode_address=address)

    def requeue(self) -> None:
        """It waits for the grant of the next dispatch, to go on after the tokens that it has."""
        self._enter(Phase.QUEUED)
        self.dispatches.begin_next(is_started=self.is_started, has_new_tokens=self.has_new_tokens)
        self.output.drop_ahead()
        self._num_given_tokens = self.output.next_index
        self.placement = None
        self.is_started = self.is_over_at_workers = False
        self.adoption = 0
        loop = asyncio.get_running_loop()
        self.granted = loop.create_future()
        self.interrupted = loop.create_future()
        self.prefilled = loop.create_future()

    def start(self) -> worker_pb2.ServeRequest:
        """From now on its workers may know it. Returns the command for the prefill worker."""
        self._enter(Phase.PREFILLING)
        self.is_started = True
        self._last_event_s = self._clock.now_s()
        self._last_probe_s = float("-inf")
        return self._start_command()

    def resume_command(self) -> worker_pb2.ServeRequest:
        """Asks a worker for the updates from the next token on."""
        is_split = self.placement is not None and not self.placement.is_local
        is_search, index = self.is_awaiting_adopter, self.output.next_index
        awaits = is_search or (is_split and self.phase is not Phase.DECODING)
        return resume_command(self.request_id, self.attempt, index, awaits_hand_off=awaits, is_search=is_search)

    def try_probe(self, overdue_s: float, again_s: float) -> worker_pb2.ServeRequest | None:
        """A Resume for the decode worker when tokens are overdue: a lost update comes again, a lost sequence shows.

        Repeated after `again_s`, longer than a worker waits for a sequence that it was asked for: it would wait anew.
        """
        now_s = self._clock.now_s()
        is_due = now_s - self._last_event_s >= overdue_s and now_s - self._last_probe_s >= again_s
        may_be_at_decode = self.output.has_gap or self.phase is Phase.DECODING
        if not (is_due and may_be_at_decode):
            return None
        self._last_probe_s = now_s
        return self.resume_command()

    # What ends it.

    def fail(self, error: WeirError) -> None:
        """The error's message gets the number of tokens that were sent before, if any were."""
        self.end(RequestEnd(Phase.FAILED, self._with_count(error)))

    def refuse(self, error: WeirError) -> None:
        """The scheduler did not take it, so it does not hold it."""
        self.is_known_to_scheduler = False
        if self.is_admitted:
            self.fail(error)
        else:
            self.end(RequestEnd(Phase.REFUSED, error))

    def revoke(self, error: WeirError) -> None:
        """The scheduler does not hold it any more. It may be the first to see that the deadline has passed."""
        self.is_known_to_scheduler = False
        if self.deadline_at_s is not None and self._clock.now_s() >= self.deadline_at_s:
            self.expire()
        else:
            self.fail(error)

    def cancel(self, message: str) -> None:
        self.end(RequestEnd(Phase.CANCELLED, Cancelled(message)))

    def expire(self) -> None:
        """Its deadline has passed: it ends with what there is, if its client wanted that."""
        if self.checked.client_request.options.partial_at_deadline and not self.phase.is_terminal:
            self.output.end(FinishReason.DEADLINE)
            self._finish()
            return
        self.end(RequestEnd(Phase.CANCELLED, self._with_count(DeadlineExceeded("the deadline has passed"))))

    def lose(self, message: str) -> None:
        """Fails it as Unavailable: to be tried again, unless tokens were sent."""
        self.fail(Unavailable(message, retry_after_s=RETRY_AFTER_S))

    def try_finish(self) -> bool:
        """Ends it if the tokens that are there are all of the answer, although no worker has said so: the last one's
        frame may have been lost with its worker. False: there are more to come."""
        reason = self.checked.try_find_end(self.output.token_ids)
        if reason is None:
            return False
        self.output.end(reason)
        self._finish()
        return True

    def end(self, ending: RequestEnd) -> None:
        """The first ending counts; later ones have no effect."""
        if self.phase.is_terminal:
            return
        self._enter(ending.phase)
        self.ended.set_result(ending)

    # `workers.connections.UpdateSubscriber`.

    def on_update(self, worker_id: str, update: worker_pb2.SequenceUpdate) -> None:
        if self.phase.is_terminal:
            return
        try:
            self._take_update(worker_id, update)
        except TokenConflict as conflict:
            logger.error("request %s: worker %s: %s", self.request_id, worker_id, conflict)
            self.fail(InternalError(f"worker {worker_id} contradicts what was sent: {conflict}"))
        except Exception as error:  # the boundary between one request and the stream that it shares with others
            logger.exception("request %s: update of %s failed", self.request_id, worker_id)
            self.fail(InternalError(f"internal error: {type(error).__name__}; see the gateway's log"))

    def on_connection_lost(self, worker_id: str, message: str) -> None:
        if self._is_searched_at(worker_id):
            return  # another one may have the sequence
        if self._is_prefill(worker_id) and self.phase is Phase.DECODING:
            return  # it has done its part
        if not self.interrupted.done():
            self.lost_worker_id = worker_id
        self.interrupt(Unavailable(message, retry_after_s=RETRY_AFTER_S))

    def commands_to_resume(self, worker_id: str) -> list[worker_pb2.ServeRequest]:
        if not self.is_started or self.phase.is_terminal:
            return []
        if self.phase is Phase.PREFILLING and self._starts_at(worker_id):
            # Whether Start arrived is not known: both are harmless for a worker that has it.
            return [self._start_command(), self.resume_command()]
        return [self.resume_command()]

    def _take_update(self, worker_id: str, update: worker_pb2.SequenceUpdate) -> None:
        attempt = attempt_from_pb(update.attempt)
        if attempt < self.attempt:
            return
        if attempt.dispatch > self.dispatch:
            raise TokenConflict(f"attempt {attempt.dispatch}, and {self.dispatch} was granted")
        if attempt.adoption > self.adoption:
            self.adoption = attempt.adoption
            if not self.adopted.done():
                self.adopted.set_result(worker_id)
        if update.HasField("error") and not update.handed_off:
            self._end_by_worker(worker_id, update.error)
            return
        if not self._num_given_tokens:
            self.num_cached_tokens = max(self.num_cached_tokens, update.num_cached_tokens)
        if self.output.push(update):
            self._last_event_s = self._clock.now_s()
            self.has_output.set()
        self._advance_phase(worker_id, update)
        if self.output.finish_reason is not None:
            self.is_over_at_workers = output_end_from_pb(update.finish_reason) is not None
            self._finish()
        elif update.HasField("error"):
            self.lost_worker_id = worker_id
            self._end_by_worker(worker_id, update.error)
        elif update.finish_reason == types_pb2.FINISH_REASON_CANCELLED:
            message = f"worker {worker_id} cancelled the request"
            self.interrupt(Unavailable(message, retry_after_s=RETRY_AFTER_S))

    def _finish(self) -> None:
        self.has_output.set()
        self.end(RequestEnd(Phase.FINISHED, finish_reason=self.output.finish_reason))

    def _advance_phase(self, worker_id: str, update: worker_pb2.SequenceUpdate) -> None:
        if self.has_new_tokens and not self.prefilled.done():
            self.prefilled.set_result(None)
            if self.phase is Phase.PREFILLING:
                self._enter(Phase.HANDING_OFF)
        # Either worker may be the first to report that the decode worker has it.
        is_handed_off = update.handed_off or self._has_decoded(worker_id)
        if is_handed_off and self.phase in (Phase.PREFILLING, Phase.HANDING_OFF):
            self._enter(Phase.DECODING)

    def _end_by_worker(self, worker_id: str, error: worker_pb2.WorkerError) -> None:
        message = f"worker {worker_id} gave the request up: {error.message or 'no reason given'}"
        is_unknown = error.reason == worker_pb2.WORKER_ERROR_REASON_UNKNOWN_REQUEST
        if is_unknown and self.phase is Phase.PREFILLING and not self._starts_at(worker_id):
            return  # it waits no longer for a hand-off that is still to come
        if self.is_awaiting_adopter and self._is_searched_at(worker_id) and not self.adopted.done():
            return  # it was asked in vain, another one may have the sequence
        if error.reason == worker_pb2.WORKER_ERROR_REASON_NO_CAPACITY:
            self.interrupt(Overloaded(message, retry_after_s=RETRY_AFTER_S))
        elif error.reason in _INTERNAL_REASONS:
            self.is_over_at_workers = not self._is_prefill(worker_id)
            self.fail(InternalError(message))
        else:
            self.interrupt(Unavailable(message, retry_after_s=RETRY_AFTER_S))

    def _with_count(self, error: WeirError) -> WeirError:
        """Once tokens were sent, trying again is for the client to decide: it would see them twice."""
        if self.output.num_tokens == 0 or not self.checked.client_request.is_stream:
            return error
        counted = f"{error.message}; {self.output.num_tokens} tokens were sent before"
        return type(error)(counted) if isinstance(error, DeadlineExceeded | InternalError) else Unavailable(counted)

    def _has_decoded(self, worker_id: str) -> bool:
        """Whether an update of this worker shows that the prompt is prefilled. A local one's may be of the prompt."""
        is_local = self.placement is not None and self.placement.is_local
        return not self._is_prefill(worker_id) and (not is_local or self.has_new_tokens)

    def _starts_at(self, worker_id: str) -> bool:
        return self.placement is not None and worker_id == self.placement.prefill_worker_id

    def _is_own(self, worker_id: str) -> bool:
        return self.placement is not None and self.placement.names(worker_id)

    def _is_searched_at(self, worker_id: str) -> bool:
        return not self._is_own(worker_id) or (self.is_awaiting_adopter and worker_id == self.lost_worker_id)

    def _is_prefill(self, worker_id: str) -> bool:
        return self.placement is not None and self.placement.is_prefill_alone(worker_id)

    def _start_command(self) -> worker_pb2.ServeRequest:
        if self.placement is None:
            raise AssertionError(f"request {self.request_id} is started without a grant")
        output_token_ids = self.output.token_ids[: self._num_given_tokens]
        return start_command(self.request_id, self.checked, self.placement, output_token_ids, self._traceparent)

    def _enter(self, phase: Phase) -> None:
        """Raises IllegalTransition."""
        check_transition(self.request_id, self.phase, phase)
        self.phase = phase
        self._on_phase(phase)
        self.has_output.set()
