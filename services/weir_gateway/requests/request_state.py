"""The record of one running request: its phase, its placement, its output, and how it ended, once.

    scheduler ── grant, revoke ──┐                  ┌── output ──> frontend
    workers ──── updates ────────┼──> RequestState ─┤
    client ───── cancel ─────────┘                  └── ended ───> driver

Everything that comes in is a plain call from the event loop; nothing here waits.
"""

import asyncio
import logging

from weir.bus.messages import Placement
from weir.core.clock import Clock
from weir.core.errors import Cancelled, DeadlineExceeded, InternalError, Unavailable, WeirError
from weir.core.life import Attempt, FinishReason, Phase, attempt_of, check_transition
from weir.rpc.conversions import attempt_from_pb
from weir.wire.v1 import types_pb2, worker_pb2
from weir_gateway.requests.dispatch_count import DispatchCount
from weir_gateway.requests.output import Output, output_end_from_pb
from weir_gateway.requests.request_end import RETRY_AFTER_S, RequestEnd, after_tokens, given_up_by
from weir_gateway.requests.request_times import LifeObserver
from weir_gateway.requests.silence import Silence
from weir_gateway.requests.succession import Succession, claimed_placement
from weir_gateway.requests.token_order import TokenConflict
from weir_gateway.requests.validation import CheckedRequest
from weir_gateway.requests.whereabouts import Whereabouts
from weir_gateway.requests.worker_commands import resume_command, start_command

logger = logging.getLogger(__name__)


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
        observer: LifeObserver,
    ) -> None:
        """`has_output` is set at each change that a frontend may wait for; `traceparent` is of the request's span."""
        self.request_id = request_id
        self.checked = checked
        self.deadline_at_s = deadline_at_s
        self.has_output = has_output
        self._traceparent = traceparent
        self._clock = clock
        self._observer = observer
        self.output = Output.of(checked)
        self.phase = Phase.RECEIVED
        self.dispatches = DispatchCount()
        self.adoption = 0
        """How many workers have gone on with the present dispatch after another one."""
        self.whereabouts = Whereabouts()
        self.is_admitted = False
        """Whether the scheduler queued it, or a worker has what was claimed, however it ended."""
        self.is_known_to_scheduler = False
        """Whether the scheduler may hold it, so that it needs the end."""
        self.is_started = False
        """Whether its workers may know of it."""
        self.is_over_at_workers = False
        """Whether the workers ended it themselves, so that no Cancel is needed."""
        self.num_cached_tokens = 0
        """Tokens of the prompt that were in the prefix cache, as its workers report."""
        self.succession = Succession()
        self._num_given_tokens = 0
        """Output tokens that the present dispatch goes on from."""
        self._received_at_s = clock.now_s()
        self.silence = Silence(clock)
        loop = asyncio.get_running_loop()
        self.granted: asyncio.Future[Placement] = loop.create_future()
        self.interrupted: asyncio.Future[WeirError] = loop.create_future()
        """Why its workers cannot go on with it; like `granted` and `prefilled` of the present dispatch."""
        self.prefilled: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[RequestEnd] = loop.create_future()
        self.released = asyncio.Event()
        """Set when nobody takes the output any more."""
        observer.on_phase(self.phase, None)

    @property
    def placement(self) -> Placement | None:
        """Of the present dispatch, by grant or claim."""
        return self.whereabouts.placement

    @property
    def dispatch(self) -> int:
        return self.dispatches.present

    @property
    def attempt(self) -> Attempt:
        """Updates of older attempts are dropped."""
        return attempt_of(self.dispatches.present, self.adoption)

    @property
    def age_s(self) -> float:
        return self._clock.now_s() - self._received_at_s

    @property
    def has_new_tokens(self) -> bool:
        """Whether the present dispatch has brought any."""
        return self.output.next_index > self._num_given_tokens

    def succeed(self, succession: Succession) -> None:
        self.succession = succession
        self.dispatches.begin_at(succession.first_dispatch)

    def take_cached(self, num_tokens: int) -> None:
        """So many of its prompt were cached where it is computed."""
        self.num_cached_tokens = max(self.num_cached_tokens, num_tokens)

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
        self.whereabouts.grant(placement)
        if not self.granted.done():  # else the wait for it has just timed out
            self.granted.set_result(placement)

    def interrupt(self, error: WeirError) -> None:
        """Its workers cannot go on with it. What their dispatch still sends counts until the next one."""
        if not self.interrupted.done():
            self.interrupted.set_result(error)

    @property
    def may_be_adopted(self) -> bool:
        """Whether it was interrupted since the worker that has, or is being handed, its sequence is lost or emptied."""
        is_sampled = self.phase in (Phase.HANDING_OFF, Phase.DECODING)
        return (
            self.whereabouts.is_lost_at_decode
            and is_sampled
            and self.checked.try_find_end(self.output.token_ids) is None
        )

    def await_adopter(self) -> "tuple[str, asyncio.Future[str]]":
        """`resume_command` is for whoever adopts its sequence. Returns who was lost, and what says who adopted it."""
        self.interrupted = asyncio.get_running_loop().create_future()
        return self.whereabouts.lost_worker_id, self.whereabouts.look_for()

    def await_claim(self) -> "asyncio.Future[str]":
        """The same before anything was submitted: the sequence that a gateway which died had started."""
        self.interrupted = asyncio.get_running_loop().create_future()
        return self.whereabouts.look_for(is_claim=True)

    def drop_claim(self, *, was_told: bool) -> None:
        """Nobody has it: it is computed, under a dispatch of which no worker was told."""
        self.whereabouts.drop_claim()
        self.dispatches.begin_at(self.dispatch + was_told)

    def follow(self, worker_id: str, address: str) -> None:
        """Its sequence is at another worker now."""
        self.whereabouts.follow(worker_id, address)
        self.silence.begin()

    def move(self, placement: Placement) -> None:
        """It goes on under this placement, which is granted, and whose number was taken."""
        self._enter(Phase.QUEUED)
        self.dispatches.move_to(placement.dispatch)
        self._begin_dispatch()
        self.grant(placement)

    def requeue(self) -> None:
        """It waits for the grant of the next dispatch, to go on after the tokens that it has."""
        self._enter(Phase.QUEUED)
        self.dispatches.begin_next(is_started=self.is_started, has_new_tokens=self.has_new_tokens)
        self._begin_dispatch()

    def _begin_dispatch(self) -> None:
        self.output.drop_ahead()
        self._num_given_tokens = self.output.next_index
        self.whereabouts.leave()
        self.is_started = self.is_over_at_workers = False
        self.adoption = 0
        loop = asyncio.get_running_loop()
        self.granted, self.interrupted, self.prefilled = (loop.create_future() for _ in range(3))

    def start(self) -> worker_pb2.ServeRequest:
        """From now on its workers may know it. Returns the command for the prefill worker."""
        self._enter(Phase.PREFILLING)
        self.is_started = True
        self.silence.begin()
        return self._start_command()

    def resume_command(self) -> worker_pb2.ServeRequest:
        """Asks a worker for the updates from the next token on."""
        where = self.whereabouts
        return resume_command(
            self.request_id,
            self.attempt,
            self.output.next_index,
            awaits_hand_off=where.is_awaiting_adopter or (where.is_split and self.phase is not Phase.DECODING),
            claims=where.is_claimed,
            is_search=where.is_awaiting_adopter,
        )

    def try_probe(self, overdue_s: float, again_s: float) -> worker_pb2.ServeRequest | None:
        """A Resume for the decode worker when tokens are overdue: a lost update comes again, a lost sequence shows.

        Repeated after `again_s`, longer than a worker waits for a sequence that it was asked for: it would wait anew.
        """
        may_be_at_decode = self.output.has_gap or self.phase is Phase.DECODING
        is_due = may_be_at_decode and self.silence.take_probe(overdue_s, again_s)
        return self.resume_command() if is_due else None

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

    # `workers.connection.UpdateSubscriber`.

    def on_update(self, worker_id: str, update: worker_pb2.SequenceUpdate) -> None:
        if self.ended.done():
            return
        try:
            self._take_update(worker_id, update)
        except TokenConflict as conflict:
            logger.error("request %s: worker %s: %s", self.request_id, worker_id, conflict, extra=self.checked.log_ids)
            self.fail(InternalError(f"worker {worker_id} contradicts what was sent: {conflict}"))
        except Exception as error:  # the boundary between one request and the stream that it shares with others
            logger.exception("request %s: update of %s failed", self.request_id, worker_id, extra=self.checked.log_ids)
            self.fail(InternalError(f"internal error: {type(error).__name__}; see the gateway's log"))

    def on_connection_lost(self, worker_id: str, message: str) -> None:
        has_done_its_part = self.whereabouts.is_prefill(worker_id) and self.phase is Phase.DECODING
        if has_done_its_part or self.whereabouts.is_searched_at(worker_id):  # another one may have the sequence
            return
        if not self.interrupted.done():
            self.whereabouts.lose(worker_id)
        self.interrupt(Unavailable(message, retry_after_s=RETRY_AFTER_S))

    def commands_to_resume(self, worker_id: str) -> list[worker_pb2.ServeRequest]:
        where = self.whereabouts
        if self.phase.is_terminal or not (self.is_started or where.is_claimed):
            return []
        if not where.is_claimed and self.phase is Phase.PREFILLING and where.starts_at(worker_id):
            # Whether Start arrived is not known: both are harmless for a worker that has it.
            return [self._start_command(), self.resume_command()]
        return [self.resume_command()]

    def _take_update(self, worker_id: str, update: worker_pb2.SequenceUpdate) -> None:
        attempt, has_error = attempt_from_pb(update.attempt), update.HasField("error")
        is_as_before = attempt is self.attempt and not self.whereabouts.is_claimed  # as of nearly all tokens
        if not is_as_before and not self._counts(worker_id, attempt, update):
            return
        if has_error and not update.handed_off:
            self._end_by_worker(worker_id, update.error)
            return
        if not (self._num_given_tokens or self.whereabouts.is_read_elsewhere):
            self.take_cached(update.num_cached_tokens)
        if self.output.push(attempt, update):
            self._observer.on_tokens(self.silence.end(), self.output.num_tokens)
            self.has_output.set()
        if self.phase is not Phase.DECODING or not self.prefilled.done():
            self._advance_phase(worker_id, update)
        if has_error:
            self.whereabouts.lose(worker_id)
        if output_end_from_pb(update.finish_reason) is not None and not self.is_over_at_workers:
            self.is_over_at_workers = True  # although the prefill worker's token may be still to come
            self._observer.on_waits(update.waits)
        if self.output.finish_reason is not None:
            self._finish()
        elif has_error:
            self._end_by_worker(worker_id, update.error)
        elif update.finish_reason == types_pb2.FINISH_REASON_CANCELLED:
            self.interrupt(Unavailable(f"worker {worker_id} cancelled the request", retry_after_s=RETRY_AFTER_S))

    def _counts(self, worker_id: str, attempt: Attempt, update: worker_pb2.SequenceUpdate) -> bool:
        """Whether it is of what runs now. It may be the first to say that a worker has the sequence. Raises
        TokenConflict."""
        where, present = self.whereabouts, self.attempt
        if attempt < present:
            return False
        if where.is_claimed and self.placement is None and update.claimed:
            self._bind_claim(worker_id)
        if where.is_of_another_claim(worker_id):
            return False
        if attempt.dispatch > present.dispatch:
            raise TokenConflict(f"attempt {attempt.dispatch}, and {self.dispatch} was granted")
        if attempt.adoption > present.adoption:
            self.adoption = attempt.adoption
            where.find(worker_id)
        return True

    def _bind_claim(self, worker_id: str) -> None:
        """This worker has the sequence that was claimed: as if it had been granted, and started there."""
        self.submit()
        self.grant(claimed_placement(self.checked, self.dispatch, worker_id))
        self.is_started = True
        self.whereabouts.end_search()
        self._enter(Phase.PREFILLING)
        self.whereabouts.find(worker_id)

    def _finish(self) -> None:
        self.has_output.set()
        self.end(RequestEnd(Phase.FINISHED, finish_reason=self.output.finish_reason))

    def _advance_phase(self, worker_id: str, update: worker_pb2.SequenceUpdate) -> None:
        if not self.prefilled.done() and self.has_new_tokens:
            self.prefilled.set_result(None)
            if self.phase is Phase.PREFILLING:
                self._enter(Phase.HANDING_OFF)
        # Either worker may be the first to report that the decode worker has it.
        is_before = self.phase in (Phase.PREFILLING, Phase.HANDING_OFF)
        if is_before and (update.handed_off or self._has_decoded(worker_id)):
            self._enter(Phase.DECODING)

    def _end_by_worker(self, worker_id: str, error: worker_pb2.WorkerError) -> None:
        is_unknown = error.reason == worker_pb2.WORKER_ERROR_REASON_UNKNOWN_REQUEST
        where = self.whereabouts
        if is_unknown and self.phase is Phase.PREFILLING and not where.starts_at(worker_id):
            return  # it waits no longer for a hand-off that is still to come
        if where.is_awaiting_adopter and where.is_searched_at(worker_id) and not where.adopted.done():
            return  # it was asked in vain, another one may have the sequence
        reason = given_up_by(worker_id, error)
        if isinstance(reason, InternalError):
            self.is_over_at_workers = not where.is_prefill(worker_id)
            self.fail(reason)
        else:
            self.interrupt(reason)

    def _with_count(self, error: WeirError) -> WeirError:
        return after_tokens(error, self.output.num_tokens) if self.checked.client_request.is_stream else error

    def _has_decoded(self, worker_id: str) -> bool:
        """Whether an update of this worker shows that the prompt is prefilled. A local one's may be of the prompt."""
        return not self.whereabouts.is_prefill(worker_id) and (self.whereabouts.is_split or self.has_new_tokens)

    def _start_command(self) -> worker_pb2.ServeRequest:
        if self.placement is None:
            raise AssertionError(f"request {self.request_id} is started without a grant")
        output_token_ids = self.output.token_ids[: self._num_given_tokens]
        return start_command(
            self.request_id, self.checked, self.placement, output_token_ids, self._traceparent, self.succession.keep_ms
        )

    def _enter(self, phase: Phase) -> None:
        """Raises IllegalTransition."""
        check_transition(self.request_id, self.phase, phase)
        self.phase = phase
        self._observer.on_phase(phase, self.placement)
        self.has_output.set()
