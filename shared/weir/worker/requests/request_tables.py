"""What a worker remembers of requests, all of it bounded: the output of sequences that it has or had a moment ago,
resumes that came before their sequence, and cancelled attempts.

    output tokens   0 ....... next_index ....... len(token_ids)
                    |-- sent --|--- to be sent --|   then the ending, once

Every token is kept until some time after the end, so whatever a slow or broken stream missed can be sent again; the
engine never waits for a gateway.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from weir.core.clock import Clock
from weir.core.life import Attempt, FinishReason
from weir.core.sampling import TokenLogprobs
from weir.engine.messages import Arrival, FailureReason, SequenceEnded, SequenceForgotten, SequenceKey
from weir.engine.waits import NO_WAITS, SequenceWaits
from weir.rpc.conversions import finish_reason_to_pb, logprobs_to_pb
from weir.wire.v1 import types_pb2, worker_pb2

_FAILURES = {
    FailureReason.UNKNOWN_REQUEST: worker_pb2.WORKER_ERROR_REASON_UNKNOWN_REQUEST,
    FailureReason.STALE_ATTEMPT: worker_pb2.WORKER_ERROR_REASON_STALE_ATTEMPT,
    FailureReason.NO_CAPACITY: worker_pb2.WORKER_ERROR_REASON_NO_CAPACITY,
    FailureReason.HAND_OFF_REFUSED: worker_pb2.WORKER_ERROR_REASON_HAND_OFF_REFUSED,
    FailureReason.INTERNAL: worker_pb2.WORKER_ERROR_REASON_INTERNAL,
    FailureReason.DRAINING: worker_pb2.WORKER_ERROR_REASON_DRAINING,
}
_OWN_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(slots=True, eq=False)
class OutputCollector:
    """What one gateway was sent of one sequence, and what it has yet to be sent. `next_index` is None while no stream
    asked for the sequence. `key` is the engine's: a gateway that has claimed it calls it by `wire_key`."""

    key: SequenceKey
    gateway_id: str
    token_ids: list[int] = field(default_factory=list)
    next_index: int | None = None
    num_cached_tokens: int | None = None
    """Prompt tokens that were found in the prefix cache; None before the first chunk."""
    ending: SequenceEnded | SequenceForgotten | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One entry a token, or none at all."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One entry a prompt token, from number 1 on: 0 has none."""
    ended_at_s: float = 0.0
    is_cancel_posted: bool = False
    keep_ms: int = 0
    """How long it is kept for another gateway; 0: it is for its own alone."""
    claimed_dispatch: int | None = None
    """By which a gateway has claimed it that did not start it."""
    _is_claim_sent: bool = True
    _num_prompt_sent: int = 0
    _is_ending_sent: bool = False

    @classmethod
    def of_arrival(cls, arrival: Arrival, *, next_index: int | None) -> "OutputCollector":
        """With the tokens that are there already; log-probabilities that did not come with them are not known."""
        params, token_ids = arrival.params, arrival.output_token_ids
        logprobs = arrival.output_logprobs
        if params.sampling.logprobs is not None and not logprobs:
            logprobs = tuple(map(TokenLogprobs.unknown, token_ids))
        key, keep_ms = SequenceKey.of(params), params.keep_ms
        return cls(key, params.gateway_id, list(token_ids), next_index, logprobs=list(logprobs), keep_ms=keep_ms)

    @property
    def wire_key(self) -> SequenceKey:
        """By which its gateway knows it: every adoption of what was claimed is one of the claim's dispatch."""
        if self.claimed_dispatch is None:
            return self.key
        return SequenceKey(self.key.request_id, Attempt(self.claimed_dispatch, self.key.attempt.adoption))

    @property
    def is_claimable(self) -> bool:
        """Whether a gateway that did not start it can have all of it."""
        return self.is_claimable_from(0)

    def is_claimable_from(self, next_index: int) -> bool:
        """Whether such a gateway can go on at this token: it is to be kept, runs or has ended by itself, and no
        log-probabilities are lost that were asked for."""
        ended = self.ending
        is_whole = ended is None or (isinstance(ended, SequenceEnded) and ended.reason in _OWN_ENDS)
        is_known = not any(logprobs.is_unknown for logprobs in self.logprobs[next_index:])
        return self.keep_ms > 0 and is_whole and is_known and not self.is_cancel_posted

    def claim(self, gateway_id: str, dispatch: int) -> None:
        """From here on it is that gateway's."""
        self.gateway_id, self.claimed_dispatch = gateway_id, dispatch
        self._is_claim_sent = False

    def is_kept(self, now_s: float) -> bool:
        """Once it has ended: for another gateway, since its own may have died without having taken the end."""
        return not self._is_ending_sent and self.is_claimable and now_s < self.ended_at_s + self.keep_ms / 1000

    @property
    def has_updates(self) -> bool:
        if self.next_index is None:
            return False
        if (
            not self._is_claim_sent
            or self.next_index < len(self.token_ids)
            or self._num_prompt_sent < len(self.prompt_logprobs)
        ):
            return True
        return self.ending is not None and not self._is_ending_sent

    @property
    def is_ending_sent(self) -> bool:
        """The present stream has taken it, with all that comes before it."""
        return self._is_ending_sent

    def resume(self, next_index: int) -> None:
        """A stream asks for everything from `next_index` on."""
        self.next_index = next_index
        self._num_prompt_sent = 0
        self._is_ending_sent = False

    def pause(self) -> None:
        """The stream is gone; how much of it the gateway has got is not known."""
        self.next_index = None
        self._is_ending_sent = False
        self._is_claim_sent = self.claimed_dispatch is None

    def add_token(self, index: int, token_id: int, logprobs: TokenLogprobs | None = None) -> None:
        assert index == len(self.token_ids), f"token {index} follows {len(self.token_ids)} tokens"
        self.token_ids.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)

    def add_prompt_logprobs(self, first_index: int, logprobs: Sequence[TokenLogprobs]) -> None:
        assert first_index == len(self.prompt_logprobs) + 1, f"{first_index} follows {len(self.prompt_logprobs)}"
        self.prompt_logprobs.extend(logprobs)

    def add_chunk(self, start: int) -> None:
        """Prompt tokens from `start` on were computed: before the first chunk lies what was cached."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = start

    def end(self, ending: SequenceEnded | SequenceForgotten, now_s: float) -> None:
        self.ending = ending
        self.ended_at_s = now_s

    def take_update(self, max_tokens: int) -> worker_pb2.SequenceUpdate:
        """What is new, as sent: at most `max_tokens` tokens, the ending after the last one."""
        assert self.next_index is not None, "nobody asked for it"
        first_index = self.next_index
        token_ids = self.token_ids[first_index : first_index + max_tokens]
        self.next_index = first_index + len(token_ids)
        is_last = self.ending is not None and self.next_index >= len(self.token_ids)
        self._is_ending_sent = is_last
        key = self.wire_key
        update = ending_to_pb(self.ending, key) if self.ending is not None and is_last else _update_of(key)
        update.claimed, self._is_claim_sent = not self._is_claim_sent, True
        update.first_index = first_index
        update.token_ids.extend(token_ids)
        update.logprobs.extend(map(logprobs_to_pb, self.logprobs[first_index : self.next_index]))
        update.num_cached_tokens = self.num_cached_tokens or 0
        update.first_prompt_index = self._num_prompt_sent + 1
        update.prompt_logprobs.extend(map(logprobs_to_pb, self.prompt_logprobs[self._num_prompt_sent :]))
        self._num_prompt_sent = len(self.prompt_logprobs)
        return update


def ending_to_pb(
    ending: SequenceEnded | SequenceForgotten, key: SequenceKey | None = None
) -> worker_pb2.SequenceUpdate:
    """An update that has nothing but how a sequence ended on this worker. `key`: by which its gateway knows it."""
    update = _update_of(key or ending.key)
    if isinstance(ending, SequenceForgotten):
        update.handed_off = True
        if ending.is_adoption:  # with an error: a gateway that knows nothing of this has it go on by a new dispatch
            update.error.reason = worker_pb2.WORKER_ERROR_REASON_DRAINING
            update.error.message = "this worker drains; another one of its memory goes on with the sequence"
        return update
    update.finish_reason = finish_reason_to_pb(ending.reason)
    if ending.waits != NO_WAITS:
        update.waits.CopyFrom(waits_to_pb(ending.waits))
    if ending.failure is not None:
        update.error.reason = _FAILURES[ending.failure.reason]
        update.error.message = ending.failure.message
    return update


def waits_to_pb(waits: SequenceWaits) -> worker_pb2.SequenceWaits:
    return worker_pb2.SequenceWaits(
        waiting_us=round(waits.waiting_s * 1e6),
        swapped_out_us=round(waits.swapped_out_s * 1e6),
        paused_us=round(waits.paused_s * 1e6),
        num_preemptions=waits.num_preemptions,
        num_pauses=waits.num_pauses,
    )


def _update_of(key: SequenceKey) -> worker_pb2.SequenceUpdate:
    attempt = types_pb2.Attempt(dispatch=key.attempt.dispatch, adoption=key.attempt.adoption)
    return worker_pb2.SequenceUpdate(request_id=key.request_id, attempt=attempt)


class SequenceTable:
    """One collector a request: that of its newest attempt. Those of ended sequences are retained for `retained_s`, at
    most `max_retained` of them."""

    def __init__(self, clock: Clock, *, retained_s: float, max_retained: int) -> None:
        self._clock = clock
        self._retained_s = retained_s
        self._max_retained = max_retained
        self._collectors: dict[str, OutputCollector] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()  # oldest end first

    @property
    def num_live(self) -> int:
        return len(self._collectors) - len(self._ended)

    def of_gateway(self, gateway_id: str) -> list[OutputCollector]:
        return [collector for collector in self._collectors.values() if collector.gateway_id == gateway_id]

    def find(self, request_id: str) -> OutputCollector | None:
        """The newest attempt's."""
        return self._collectors.get(request_id)

    def get(self, key: SequenceKey) -> OutputCollector | None:
        """None also for an attempt that a newer one has replaced."""
        collector = self._collectors.get(key.request_id)
        return collector if collector is not None and collector.key == key else None

    def find_adoption(self, key: SequenceKey) -> OutputCollector | None:
        """This attempt's, or that of a later adoption of the same dispatch, as its gateway knows it."""
        collector = self._collectors.get(key.request_id)
        if collector is None:
            return None
        known = collector.wire_key
        return collector if _dispatch_of(known) == _dispatch_of(key) and known.attempt >= key.attempt else None

    def open(self, collector: OutputCollector) -> None:
        """Replaces an older attempt's."""
        self.drop(collector.key.request_id)
        self._collectors[collector.key.request_id] = collector

    def drop(self, request_id: str) -> None:
        self._collectors.pop(request_id, None)
        self._ended.pop(request_id, None)

    def end(self, collector: OutputCollector, ending: SequenceEnded | SequenceForgotten) -> None:
        """From now on the collector is only retained."""
        collector.end(ending, self._clock.now_s())
        self._ended[collector.key.request_id] = None
        if len(self._ended) > self._max_retained:
            self.drop(next(iter(self._ended)))

    def sweep(self) -> None:
        """Forgets sequences that ended too long ago. One that is kept for another gateway may still be claimed."""
        now_s = self._clock.now_s()
        until_s = now_s - self._retained_s
        for request_id in list(self._ended):
            collector = self._collectors[request_id]
            if collector.ended_at_s > until_s:
                return  # so are all that ended later
            if not collector.is_kept(now_s):
                self.drop(request_id)


@dataclass(frozen=True, slots=True)
class Resume:
    """What a gateway asks of a sequence: everything from `next_index` on, now and later.

    `awaits_hand_off`: also if it comes only later; `is_search`: others may get it as well. What was adopted since this
    attempt goes on for it; `claims`: and what another gateway had under an earlier one.
    """

    key: SequenceKey
    next_index: int
    awaits_hand_off: bool = False
    claims: bool = False
    is_search: bool = False


class PendingResume(NamedTuple):
    """One of a sequence that may still come."""

    resume: Resume
    gateway_id: str
    expires_at_s: float


def _dispatch_of(key: SequenceKey) -> tuple[str, int]:
    return key.request_id, key.attempt.dispatch


def _claim_of(key: SequenceKey) -> tuple[str, int]:
    return key.request_id, 0


class PendingResumes:
    """Resumes of sequences that a decode worker has yet to be handed; of too many, the oldest is forgotten.

    One is for all adoptions of its dispatch: which of them comes here its gateway cannot know.
    """

    def __init__(self, clock: Clock, *, ttl_s: float, max_entries: int) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        self._max_entries = max_entries
        self._entries: OrderedDict[tuple[str, int], PendingResume] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_expected(self) -> int:
        """Without those that others may get as well."""
        return sum(not entry.resume.is_search for entry in self._entries.values())

    def put(self, resume: Resume, gateway_id: str) -> None:
        place = _claim_of(resume.key) if resume.claims else _dispatch_of(resume.key)
        self._entries.pop(place, None)
        self._entries[place] = PendingResume(resume, gateway_id, self._clock.now_s() + self._ttl_s)
        if len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)

    def try_take(self, key: SequenceKey, gateway_id: str) -> PendingResume | None:
        """What the gateway that started it asked for, or another one that claims it."""
        claim = self._entries.get(_claim_of(key))
        if claim is not None and claim.resume.key.attempt.dispatch > key.attempt.dispatch:
            return self._entries.pop(_claim_of(key))
        entry = self._entries.pop(_dispatch_of(key), None)
        return entry if entry is not None and entry.gateway_id == gateway_id else None

    def drop(self, key: SequenceKey, gateway_id: str) -> None:
        """The gateway waits no longer."""
        for place in (_dispatch_of(key), _claim_of(key)):
            entry = self._entries.get(place)
            if entry is not None and entry.gateway_id == gateway_id:
                del self._entries[place]

    def drop_gateway(self, gateway_id: str) -> None:
        for place in [place for place, entry in self._entries.items() if entry.gateway_id == gateway_id]:
            del self._entries[place]

    def take_all(self) -> list[PendingResume]:
        entries, self._entries = self._entries, OrderedDict()
        return list(entries.values())

    def take_expired(self) -> list[PendingResume]:
        """Those that waited for too long."""
        now_s, expired = self._clock.now_s(), []
        while self._entries and next(iter(self._entries.values())).expires_at_s <= now_s:
            expired.append(self._entries.popitem(last=False)[1])
        return expired


class CancelledRequests:
    """The newest cancelled attempt of each request, for `ttl_s`: older ones and all adoptions of its dispatch are not
    to be started, even if they come after the Cancel."""

    def __init__(self, clock: Clock, *, ttl_s: float, max_entries: int) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        self._max_entries = max_entries
        self._entries: OrderedDict[str, tuple[Attempt, float]] = OrderedDict()  # oldest first

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, key: SequenceKey) -> None:
        attempt, _ = self._entries.pop(key.request_id, (key.attempt, 0.0))
        self._entries[key.request_id] = (max(attempt, key.attempt), self._clock.now_s() + self._ttl_s)
        if len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)

    def covers(self, key: SequenceKey) -> bool:
        entry = self._entries.get(key.request_id)
        return entry is not None and key.attempt.dispatch <= entry[0].dispatch

    def sweep(self) -> None:
        """Forgets what is old."""
        now_s = self._clock.now_s()
        while self._entries and next(iter(self._entries.values()))[1] <= now_s:
            self._entries.popitem(last=False)
