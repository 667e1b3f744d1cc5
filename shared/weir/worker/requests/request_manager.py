"""Between gateways and the engine: takes commands and hand-offs in, and sends gateways what the engine reports.

    Start, Cancel, Resume ──> RequestManager ──> AddSequence, CancelSequence (engine)
    updates (streams)     <── RequestManager <── TokenSampled, SequenceEnded, SequenceForgotten, … (engine)

No I/O and no waiting; called in the event loop alone.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from weir.core.clock import Clock
from weir.core.life import FinishReason
from weir.engine.loop import InboxFull
from weir.engine.messages import (
    AddSequence,
    Arrival,
    CancelSequence,
    ChunkComputed,
    Command,
    EngineReport,
    Event,
    Failure,
    FailureReason,
    PromptScored,
    SequenceEnded,
    SequenceForgotten,
    SequenceKey,
    TokenSampled,
)
from weir.worker.requests.request_tables import (
    CancelledRequests,
    OutputCollector,
    PendingResumes,
    Resume,
    SequenceTable,
)
from weir.worker.requests.streams import GatewayStream, StreamHub

_log = logging.getLogger(__name__)
_MAX_HELD_S = 0.1


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds of what a worker remembers and accepts."""

    max_live: int
    """Sequences that run or wait here; more starts are refused."""
    takes_hand_offs: bool
    """A decode worker: what it does not hold may still be handed to it."""
    retained_s: float = 10.0
    """How long an ended sequence can still be resumed."""
    max_retained: int = 4096
    cancelled_s: float = 60.0
    max_cancelled: int = 8192
    pending_resume_s: float = 30.0
    max_pending_resumes: int = 4096
    gateway_gone_s: float = 5.0
    unclaimed_s: float = 40.0
    """What was adopted and no gateway asks for is cancelled after this: longer than a gateway looks for it."""
    ended_kept_s: float = 0.5
    """A sequence's record says how it ended for this long after the gateway's stream has taken the end."""
    max_ended_kept_s: float = 10.0
    """It does so no longer, whether a stream has taken it or not."""


class RequestManager:
    """One a worker. What refuses or ends a request is a SequenceEnded, whether the engine or this class says so."""

    def __init__(self, limits: RequestLimits, post: Callable[[Command], None], hub: StreamHub, clock: Clock) -> None:
        self._limits = limits
        self._post = post
        self._hub = hub
        self._clock = clock
        self._sequences = SequenceTable(clock, retained_s=limits.retained_s, max_retained=limits.max_retained)
        self._cancelled = CancelledRequests(clock, ttl_s=limits.cancelled_s, max_entries=limits.max_cancelled)
        self._pending_resumes = PendingResumes(
            clock, ttl_s=limits.pending_resume_s, max_entries=limits.max_pending_resumes
        )
        self._unposted: dict[SequenceKey, OutputCollector] = {}
        """To be cancelled as soon as the engine takes it; each is a sequence that the engine has."""
        self._unclaimed: dict[SequenceKey, float] = {}
        """Until when each is kept that was adopted or lost its gateway, and that nobody has asked for since."""
        self.num_claimed = 0
        """Times that a gateway has gone on with a sequence of another one."""
        self._is_draining = False
        self._takes_hand_offs = limits.takes_hand_offs

    @property
    def num_live(self) -> int:
        return self._sequences.num_live

    @property
    def num_unclaimed(self) -> int:
        """Sequences that wait for a gateway to ask for them."""
        return len(self._unclaimed)

    @property
    def num_expected(self) -> int:
        """Sequences that gateways wait for here and that have not been handed over yet."""
        return self._pending_resumes.num_expected

    def begin_drain(self) -> None:
        """Refuses every Start from here on. What is prefilled for this worker may still come."""
        self._is_draining = True

    def refuse_hand_offs(self) -> None:
        """While draining: what is prefilled for this worker is not taken any more, and goes on elsewhere."""
        self._takes_hand_offs = False
        for pending in self._pending_resumes.take_all():
            stream = self._hub.get(pending.gateway_id)
            if stream is not None:
                stream.answer(_draining(pending.resume.key))

    def end_drain(self) -> None:
        """Takes prompts and hand-offs again."""
        self._is_draining = False
        self._takes_hand_offs = self._limits.takes_hand_offs

    def is_wanted(self, key: SequenceKey) -> bool:
        """False once it was cancelled."""
        return not self._cancelled.covers(key)

    def is_end_sent(self, key: SequenceKey) -> bool:
        """Whether the gateway's stream has taken the end of a sequence; also if it is never to be sent any more."""
        held = self._sequences.get(key)
        return held is None or held.is_ending_sent

    # -- from gateways --

    def try_start(self, stream: GatewayStream, prompt: Arrival) -> bool:
        """Starts a prompt. False: it was refused, and the stream says why, or it was here already and is resumed."""
        params, num_output_tokens = prompt.params, len(prompt.output_token_ids)
        key = SequenceKey.of(params)
        held = self._sequences.find(key.request_id)
        if held is not None and held.wire_key == key and held.gateway_id == stream.gateway_id:
            self._resume(stream, held, num_output_tokens)
            return False
        refusal = self._refusal_of(key, held)
        if refusal is None:
            refusal = self._try_add(key, prompt)
        if refusal is not None:
            stream.answer(refusal)
            return False
        self._cancel(held)  # it is older, and nobody is sent its end
        self._sequences.open(OutputCollector.of_arrival(prompt, next_index=num_output_tokens))
        return True

    def cancel(self, stream: GatewayStream, key: SequenceKey) -> None:
        """Drops this dispatch and older ones, now or whenever they come. The sequence's end is the gateway's answer; if
        no such end will be sent, an answer comes at once, since a gateway sends its Cancel again until it is answered.
        """
        self._pending_resumes.drop(key, stream.gateway_id)
        held = self._sequences.find(key.request_id)
        is_covered = held is not None and held.wire_key.attempt.dispatch <= key.attempt.dispatch
        if held is None or is_covered or held.claimed_dispatch is None:
            self._cancelled.put(key)  # else it is of a gateway that has it no more
        is_older = held is not None and held.wire_key.attempt.dispatch < key.attempt.dispatch
        if held is not None and is_covered and (is_older or held.gateway_id == stream.gateway_id):
            self._cancel(held)
            if held.wire_key == key and held.next_index is not None and held.ending is None:
                return
        stream.answer(SequenceEnded(key, FinishReason.CANCELLED))

    def resume(self, stream: GatewayStream, resume: Resume) -> None:
        key = resume.key
        held = self._sequences.find_adoption(key)
        if held is not None and held.gateway_id == stream.gateway_id:
            self._resume(stream, held, resume.next_index)
        elif self._cancelled.covers(key):
            stream.answer(SequenceEnded(key, FinishReason.CANCELLED))
        elif resume.claims and (earlier := self._try_find_claimable(key, resume.next_index)) is not None:
            self._claim(stream, earlier, key)
            self._resume(stream, earlier, resume.next_index)
        elif resume.awaits_hand_off and self._may_still_come(key):
            self._pending_resumes.put(resume, stream.gateway_id)
        else:
            is_drained = resume.awaits_hand_off and self._is_draining
            stream.answer(_draining(key) if is_drained else self._unknown(key, stream.gateway_id))

    def on_stream_end(self, stream: GatewayStream) -> None:
        """How much the gateway has got is not known: it has to resume each sequence where it wants to go on."""
        if self._hub.detach(stream):
            self.pause(stream.gateway_id)

    def pause(self, gateway_id: str) -> None:
        """Nothing is sent to this gateway until it resumes."""
        for collector in self._sequences.of_gateway(gateway_id):
            collector.pause()

    # -- from the arena --

    def try_take_over(self, arrival: Arrival) -> bool:
        """Takes a handed-off sequence. False: it is not wanted, or the engine takes no more commands, and then it ends
        here with an error; its slot and pages are the caller's to free."""
        params = arrival.params
        key = SequenceKey.of(params)
        held = self._sequences.find(key.request_id)
        if self._cancelled.covers(key) or (held is not None and held.key.attempt >= key.attempt):
            return False
        if not self._takes_hand_offs:  # its gateway is told when it asks
            return False
        refusal = self._try_add(key, arrival)
        self._cancel(held)  # it is older, and nobody is sent its end
        collector = OutputCollector.of_arrival(arrival, next_index=None)
        self._sequences.open(collector)
        pending = self._pending_resumes.try_take(key, params.gateway_id)
        stream = self._hub.get(params.gateway_id if pending is None else pending.gateway_id)
        if stream is None:
            self._hub.expect(params.gateway_id)
        elif pending is not None and pending.resume.claims:
            if collector.is_claimable_from(pending.resume.next_index):
                self._claim(stream, collector, pending.resume.key)
                collector.resume(pending.resume.next_index)
        elif pending is not None:
            collector.resume(pending.resume.next_index)
        elif not key.attempt.adoption:
            collector.resume(0)  # of what was adopted its gateway may not have missed the old worker yet: it asks
        if collector.next_index is None:
            self._leave_unclaimed(collector, self._limits.unclaimed_s)
        if refusal is not None:
            self._sequences.end(collector, refusal)
        if stream is not None:
            stream.mark(collector, step=0)
        return refusal is None

    # -- from the engine --

    def on_report(self, report: EngineReport, released: "asyncio.Task[None] | None") -> None:
        """`released`: the pages of the report's ended sequences on their way to the arena; None: there are none.

        The end of a finished sequence waits a little until others can find what it computed: the next turn of a chat
        may come within milliseconds.
        """
        step = report.timing.step if report.timing is not None else 0
        finished: list[SequenceEnded] = []
        for event in report.events:
            if released is not None and isinstance(event, SequenceEnded) and event.reason is not None:
                finished.append(event)
            else:
                self.on_event(event, step)
        if released is None or not finished:
            return

        def end() -> None:  # outside a step, whose frame may be on its way
            for event in finished:
                self.on_event(event, step=0)

        asyncio.get_running_loop().call_later(_MAX_HELD_S, end)
        released.add_done_callback(lambda _: end())

    def on_event(self, event: Event, step: int) -> None:
        """Collects what happened; it is sent once the event loop runs again, all of one step in one frame.

        A second ending of a sequence is ignored: the first may be given before the engine has one, or without it.
        """
        collector = self._sequences.get(event.key)
        if collector is None or collector.ending is not None:
            return
        match event:
            case ChunkComputed(_, start):
                collector.add_chunk(start)
                return
            case PromptScored(_, first_index, prompt_logprobs):
                collector.add_prompt_logprobs(first_index, prompt_logprobs)
            case TokenSampled(_, index, token_id, logprobs):
                collector.add_token(index, token_id, logprobs)
            case SequenceEnded() | SequenceForgotten():
                self._sequences.end(collector, event)
            case _:
                return
        self._mark(collector, step)

    # -- every now and then --

    def sweep(self) -> None:
        """Forgets what is old, and cancels what belongs to gateways that have gone."""
        self._cancelled.sweep()
        self._sequences.sweep()
        self._sweep_unclaimed()
        for pending in self._pending_resumes.take_expired():
            stream = self._hub.get(pending.gateway_id)
            if stream is not None and pending.resume.next_index > 0:
                stream.answer(self._unknown(pending.resume.key, pending.gateway_id))
        for gateway_id in self._hub.take_vanished(self._limits.gateway_gone_s):
            self._pending_resumes.drop_gateway(gateway_id)
            self._on_gateway_gone(gateway_id)
        unposted, self._unposted = self._unposted, {}
        for collector in unposted.values():
            self._cancel(collector)

    def _on_gateway_gone(self, gateway_id: str) -> None:
        """What another gateway may claim runs on for a while, and may end; all else is cancelled."""
        live = [held for held in self._sequences.of_gateway(gateway_id) if held.ending is None]
        if live:
            num_kept = sum(collector.is_claimable for collector in live)
            _log.warning("gateway %s has gone: of %d sequences %d are kept", gateway_id, len(live), num_kept)
        for collector in live:
            if collector.is_claimable:
                self._leave_unclaimed(collector, 0.0)
            else:
                self._cancelled.put(collector.key)
                self._cancel(collector)

    def _leave_unclaimed(self, collector: OutputCollector, least_s: float) -> None:
        self._unclaimed[collector.key] = self._clock.now_s() + max(collector.keep_ms / 1000, least_s)

    def _sweep_unclaimed(self) -> None:
        """Its gateway may have given it up before it was adopted, and then nothing else would end it early."""
        now_s = self._clock.now_s()
        for key in [key for key, until_s in self._unclaimed.items() if until_s <= now_s]:
            del self._unclaimed[key]
            collector = self._sequences.get(key)
            if collector is not None and collector.ending is None:
                _log.warning("request %s: no gateway asks for it: cancelled", key.request_id)
                self._cancelled.put(key)
                self._cancel(collector)

    def _try_find_claimable(self, key: SequenceKey, next_index: int) -> OutputCollector | None:
        held = self._sequences.find(key.request_id)
        if held is None or held.wire_key.attempt.dispatch >= key.attempt.dispatch or held.key in self._unposted:
            return None
        return held if held.is_claimable_from(next_index) else None

    def _claim(self, stream: GatewayStream, collector: OutputCollector, key: SequenceKey) -> None:
        """Its own gateway, should it live, is told that it has it no more."""
        self.num_claimed += 1
        _log.info("request %s of gateway %s goes on for %s", key.request_id, collector.gateway_id, stream.gateway_id)
        before = self._hub.get(collector.gateway_id)
        if before is not None and before is not stream:
            before.leave(collector)
            before.answer(_failed(collector.wire_key, FailureReason.UNKNOWN_REQUEST, "another gateway goes on with it"))
        collector.claim(stream.gateway_id, key.attempt.dispatch)

    def _refusal_of(self, key: SequenceKey, held: OutputCollector | None) -> SequenceEnded | None:
        if self._cancelled.covers(key):
            return SequenceEnded(key, FinishReason.CANCELLED)
        if held is not None and held.wire_key.attempt >= key.attempt:
            return _failed(key, FailureReason.STALE_ATTEMPT, f"attempt {held.wire_key.attempt} is here already")
        if self._is_draining:
            return _draining(key)
        if self._sequences.num_live >= self._limits.max_live:
            return _failed(key, FailureReason.NO_CAPACITY, f"{self._limits.max_live} sequences are here already")
        return None

    def _try_add(self, key: SequenceKey, arrival: Arrival) -> SequenceEnded | None:
        """None: the engine has it."""
        try:
            self._post(AddSequence(arrival))
        except InboxFull as error:
            return _failed(key, FailureReason.NO_CAPACITY, str(error))
        return None

    def _cancel(self, collector: OutputCollector | None) -> None:
        """Posted once a sequence, since the engine's inbox is bounded; if that is full, posted at a later sweep."""
        if collector is None or collector.ending is not None or collector.is_cancel_posted:
            return
        try:
            self._post(CancelSequence(collector.key))
        except InboxFull as error:
            _log.warning("request %s is to be cancelled later: %s", collector.key.request_id, error)
            self._unposted[collector.key] = collector
        else:
            collector.is_cancel_posted = True

    def _resume(self, stream: GatewayStream, collector: OutputCollector, next_index: int) -> None:
        self._unclaimed.pop(collector.key, None)
        collector.resume(next_index)
        stream.mark(collector, step=0)

    def _mark(self, collector: OutputCollector, step: int) -> None:
        stream = self._hub.get(collector.gateway_id)
        if stream is not None:
            stream.mark(collector, step)

    def _may_still_come(self, key: SequenceKey) -> bool:
        """By hand-off."""
        held = self._sequences.find(key.request_id)
        return self._takes_hand_offs and (held is None or held.wire_key.attempt < key.attempt)

    def _unknown(self, key: SequenceKey, gateway_id: str) -> SequenceEnded:
        held = self._sequences.find(key.request_id)
        if held is not None and held.wire_key.attempt > key.attempt and held.gateway_id == gateway_id:
            return _failed(key, FailureReason.STALE_ATTEMPT, f"attempt {held.wire_key.attempt} is here already")
        return _failed(key, FailureReason.UNKNOWN_REQUEST, "this worker does not hold the request")


def _draining(key: SequenceKey) -> SequenceEnded:
    return _failed(key, FailureReason.DRAINING, "this worker takes nothing new")


def _failed(key: SequenceKey, reason: FailureReason, message: str) -> SequenceEnded:
    return SequenceEnded(key, failure=Failure(reason, message))
