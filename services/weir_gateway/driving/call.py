"""One request while it is driven: hears its workers and the scheduler, and hands its output to one reader.

    scheduler ── grant, revoke ──┐                       ┌── next_piece() ──> door
    workers ──── updates ────────┼──> Request + Output ──┤
    client ───── cancel ─────────┘                       └── ended ─────────> driver

Everything that comes in is a plain call from the event loop; nothing here waits.
"""

import asyncio
import logging

from weir.bus.messages import HeldRequest, Placement
from weir.core.clock import Clock
from weir.core.errors import Cancelled, DeadlineExceeded, InternalError, Overloaded, Unavailable, WeirError
from weir.core.life import FinishReason, Phase
from weir.rpc.conversions import attempt_from_pb
from weir.wire.v1 import types_pb2, worker_pb2
from weir_gateway.requests.output import Output, OutputPiece
from weir_gateway.requests.request import RequestEnd, RequestRecord
from weir_gateway.requests.tokens import TokenConflict
from weir_gateway.workers.wire import output_end_from_pb, resume_command, start_command, update_from_pb

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0

_OVERLOAD = worker_pb2.WORKER_ERROR_REASON_NO_CAPACITY
_DEFECTS = (
    worker_pb2.WORKER_ERROR_REASON_UNSPECIFIED,
    worker_pb2.WORKER_ERROR_REASON_STALE_ATTEMPT,
    worker_pb2.WORKER_ERROR_REASON_INTERNAL,
)


class RequestState:
    """`traceparent` is the request's span's, for the workers' spans; `has_output`: something can be taken."""

    def __init__(
        self, request: RequestRecord, output: Output, clock: Clock, traceparent: str, has_output: asyncio.Event
    ) -> None:
        self.request = request
        self._output = output
        self._clock = clock
        self._traceparent = traceparent
        self.has_output = has_output
        self._is_started = False
        self._is_known_to_scheduler = False
        self._is_over_at_workers = False
        self._last_event_s = clock.now_s()
        self._last_probe_s = float("-inf")
        loop = asyncio.get_running_loop()
        self.granted: asyncio.Future[Placement] = loop.create_future()
        self.unreachable: asyncio.Future[str] = loop.create_future()
        """Set when a worker of the grant is lost before it was told of the request; both are of one dispatch."""
        self.prefilled: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[RequestEnd] = loop.create_future()
        self.released = asyncio.Event()
        self.num_cached_tokens = 0
        """Of the prompt, as its workers say."""

    @property
    def output(self) -> Output:
        return self._output

    @property
    def is_started(self) -> bool:
        """Whether its workers may know of it."""
        return self._is_started

    @property
    def is_over_at_workers(self) -> bool:
        """Whether the workers ended it themselves, so that no Cancel is needed."""
        return self._is_over_at_workers

    @property
    def is_known_to_scheduler(self) -> bool:
        """Whether the scheduler may hold it, so that it has to be told the end."""
        return self._is_known_to_scheduler

    @property
    def silent_s(self) -> float:
        """Time since its last token in order, or since it started."""
        return self._clock.now_s() - self._last_event_s

    def is_still(self, said: HeldRequest) -> bool:
        """Whether it is under the grant, or waits for the one, that the list of held requests said."""
        return (self.request.dispatch, self.request.placement) == (said.submit.dispatch, said.placement)

    # What the driver says.

    def submitting(self) -> None:
        self._is_known_to_scheduler = True

    def submit_again(self) -> None:
        """Its grant came to nothing, and no worker knows of it."""
        self.request.queued_again()
        loop = asyncio.get_running_loop()
        self.granted = loop.create_future()
        self.unreachable = loop.create_future()

    def start(self) -> worker_pb2.ServeRequest:
        """From now on its workers may know it. Returns the command for the prefill worker."""
        self.request.started()
        self._is_started = True
        self._last_event_s = self._clock.now_s()
        return self._start_command()

    def try_probe(self, overdue_s: float, again_s: float) -> worker_pb2.ServeRequest | None:
        """A Resume for the decode worker when tokens are overdue: a lost update comes again, a lost sequence shows.

        Repeated after `again_s`, longer than a worker waits for a sequence that it was asked for: it would wait anew.
        """
        now_s = self._clock.now_s()
        is_due = now_s - self._last_event_s >= overdue_s and now_s - self._last_probe_s >= again_s
        may_be_at_decode = self._output.has_gap or self.request.phase is Phase.DECODING
        if not (is_due and may_be_at_decode):
            return None
        self._last_probe_s = now_s
        return self._resume_command()

    # What ends it.

    def fail(self, error: WeirError) -> None:
        self.end(RequestEnd(Phase.FAILED, error))

    def refuse(self, error: WeirError) -> None:
        """The scheduler did not take it, so it does not hold it."""
        self._is_known_to_scheduler = False
        self.end(RequestEnd(Phase.REFUSED, error))

    def give_up(self, error: WeirError) -> None:
        """The scheduler has given it up, so it does not hold it any more."""
        self._is_known_to_scheduler = False
        self.fail(self._with_count(error))

    def cancel(self, message: str) -> None:
        self.end(RequestEnd(Phase.CANCELLED, Cancelled(message)))

    def expire(self) -> None:
        self.end(RequestEnd(Phase.CANCELLED, self._with_count(DeadlineExceeded("the deadline has passed"))))

    def lose(self, message: str) -> None:
        """Fails it as Unavailable: to be tried again, unless tokens were sent."""
        self.fail(self._with_count(Unavailable(message, retry_after_s=RETRY_AFTER_S)))

    def end(self, ending: RequestEnd) -> None:
        """The first ending counts; later ones have no effect."""
        if self.request.phase.is_terminal:
            return
        self.request.end(ending)
        self.ended.set_result(ending)
        self.has_output.set()

    # What workers say.

    def on_update(self, worker_id: str, update: worker_pb2.SequenceUpdate) -> None:
        if self.request.phase.is_terminal:
            return
        try:
            self._take_update(worker_id, update)
        except TokenConflict as conflict:
            logger.error("request %s: %s says %s", self.request.request_id, worker_id, conflict)
            self.fail(self._with_count(InternalError(f"worker {worker_id} contradicts what was sent: {conflict}")))
        except Exception as error:  # the boundary between one request and the stream that it shares with others
            logger.exception("request %s: update of %s failed", self.request.request_id, worker_id)
            self.fail(InternalError(f"internal error: {type(error).__name__}; see the gateway's log"))

    def on_connection_lost(self, worker_id: str, message: str) -> None:
        if self._is_prefill(worker_id) and self.request.phase is Phase.DECODING:
            return  # it has done its part
        if self._is_started:
            self.lose(message)
        elif not self.unreachable.done():
            self.unreachable.set_result(message)

    def commands_to_resume(self, worker_id: str) -> list[worker_pb2.ServeRequest]:
        if not self._is_started or self.request.phase.is_terminal:
            return []
        placement = self.request.placement
        starts_here = placement is not None and worker_id == placement.prefill_worker_id
        if starts_here and self.request.phase is Phase.PREFILLING:
            # Whether Start arrived is not known: both are harmless for a worker that has it.
            return [self._start_command(), self._resume_command()]
        return [self._resume_command()]

    # What the door reads.

    def try_take(self) -> tuple[OutputPiece, FinishReason | None] | None:
        """What is there to send; the reason in the last piece. None: nothing now, or nothing more after an error."""
        is_finished = self.ended.done() and self.ended.result().error is None
        if not (is_finished or self._output.has_pending):
            return None
        return self._output.take(), self.ended.result().finish_reason if is_finished else None

    def _take_update(self, worker_id: str, update: worker_pb2.SequenceUpdate) -> None:
        attempt = attempt_from_pb(update.attempt)
        if attempt < self.request.attempt:
            return
        if attempt.dispatch > self.request.attempt.dispatch:
            raise TokenConflict(f"attempt {attempt.dispatch}, and {self.request.attempt.dispatch} was granted")
        if update.HasField("error"):
            self._end_by_worker(worker_id, update.error)
            return
        finish_reason = output_end_from_pb(update.finish_reason)
        self.num_cached_tokens = max(self.num_cached_tokens, update.num_cached_tokens)
        if self._output.push(update_from_pb(update)):
            self._last_event_s = self._clock.now_s()
            self.has_output.set()
        self._note_progress(worker_id, update)
        if self._output.finish_reason is not None:
            self._is_over_at_workers = finish_reason is not None
            self.end(RequestEnd(Phase.FINISHED, finish_reason=self._output.finish_reason))
        elif update.finish_reason == types_pb2.FINISH_REASON_CANCELLED:
            self._is_over_at_workers = True
            self.lose(f"worker {worker_id} cancelled the request")

    def _note_progress(self, worker_id: str, update: worker_pb2.SequenceUpdate) -> None:
        if self._output.next_index > 0 and not self.prefilled.done():
            self.request.prefilled()
            self.prefilled.set_result(None)
        if update.handed_off or self._has_decoded(worker_id):
            self.request.handed_off()

    def _end_by_worker(self, worker_id: str, error: worker_pb2.WorkerError) -> None:
        message = f"worker {worker_id} gave the request up: {error.message or 'no reason given'}"
        self._is_over_at_workers = not self._is_prefill(worker_id)
        if error.reason == _OVERLOAD:
            self.fail(self._with_count(Overloaded(message, retry_after_s=RETRY_AFTER_S)))
        elif error.reason in _DEFECTS:
            self.fail(self._with_count(InternalError(message)))
        else:
            self.lose(message)

    def _with_count(self, error: WeirError) -> WeirError:
        """Once tokens were sent, trying again is for the client to decide: it would see them twice."""
        if self._output.num_tokens == 0 or not self.request.checked.draft.is_stream:
            return error
        counted = f"{error.message}; {self._output.num_tokens} tokens were sent before"
        return type(error)(counted) if isinstance(error, DeadlineExceeded | InternalError) else Unavailable(counted)

    def _has_decoded(self, worker_id: str) -> bool:
        """Whether news of this worker say that the prompt is read. Serving locally, it tells of the prompt as well."""
        placement = self.request.placement
        is_local = placement is not None and placement.is_local
        return not self._is_prefill(worker_id) and (not is_local or self._output.next_index > 0)

    def _is_prefill(self, worker_id: str) -> bool:
        """Whether the worker's part ends with the hand-off."""
        placement = self.request.placement
        return placement is not None and not placement.is_local and worker_id == placement.prefill_worker_id

    def _start_command(self) -> worker_pb2.ServeRequest:
        placement = self.request.placement
        if placement is None:
            raise AssertionError(f"request {self.request.request_id} is started without a grant")
        return start_command(self.request.request_id, self.request.checked, placement, self._traceparent)

    def _resume_command(self) -> worker_pb2.ServeRequest:
        return resume_command(self.request.request_id, self.request.attempt, self._output.next_index)
