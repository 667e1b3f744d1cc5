"""Steps from plan to result: checked against the plan first, then recorded in sequences, counters and events."""

import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from weir.core.life import FinishReason
from weir.engine.counters import EngineCounters
from weir.engine.memory.pages import PagePool
from weir.engine.messages import ChunkComputed, Event, Failure, FailureReason, PromptScored, SequenceKey, TokenSampled
from weir.engine.plan import NO_SWAP, ChunkPlan, StepPlan, StepResult, SwapPlan
from weir.engine.sequence import Sequence
from weir.kv.geometry import PAGE_TOKENS, first_page_read, tokens_until_behind

_DETAIL = re.compile(r"[:;\"'`]")
_new = tuple.__new__  # of named tuples: their own constructors look at keywords first


class StepDefect(Exception):
    """What the runner returned is not what the plan asked for."""


def check_result(plan: StepPlan, result: StepResult, vocab_size: int) -> None:
    """Raises StepDefect, naming the slot, for what is missing or is not a token. Nothing of a result is used before."""
    token_ids = result.token_ids
    for chunk in plan.chunks:
        sample = chunk.sample
        if sample is not None and sample.params.logprobs is None and chunk.score is None:
            # Most chunks, so this runs often.
            token_id = token_ids.get(chunk.slot)
            if token_id is not None and 0 <= token_id < vocab_size:
                continue
        problem = _try_find_problem(chunk, result, vocab_size)
        if problem is not None:
            raise StepDefect(f"slot {chunk.slot}: {problem}")


def _try_find_problem(chunk: ChunkPlan, result: StepResult, vocab_size: int) -> str | None:
    if chunk.score is not None:
        num_scored, num_wanted = len(result.prompt_logprobs.get(chunk.slot, ())), len(chunk.score.next_token_ids)
        if num_scored != num_wanted:
            return f"{num_scored} of {num_wanted} tokens of the prompt were scored"
    if chunk.sample is None:
        return None
    token_id = result.token_ids.get(chunk.slot)
    if token_id is None or not 0 <= token_id < vocab_size:
        return f"sampled {token_id}, the vocabulary has {vocab_size}"
    if chunk.sample.params.logprobs is not None and chunk.slot not in result.logprobs:
        return "the sampled token has no log-probability"
    return None


@dataclass(slots=True)
class Sampled:
    """Sequences that end by the token sampled for them, those that go on after the first one sampled here, those whose
    grammar could not say what may come (what was sampled for them counts for nothing), and those that go on and hold
    pages that they do not see any more, with the first page that they still do."""

    ended: list[tuple[Sequence, FinishReason]] = field(default_factory=list)
    begun: list[Sequence] = field(default_factory=list)
    failed: list[tuple[Sequence, Failure]] = field(default_factory=list)
    past_window: list[tuple[Sequence, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step that was decided and is not recorded yet."""

    owners: Seq[Sequence | None]
    """The sequence of each chunk; None for one that has ended."""
    decided_at_s: float
    is_ahead: bool
    """It was planned while the step before it ran."""


class StepsInFlight:
    """The step that runs, and one that is planned ahead of its result. They end in order."""

    def __init__(self, pool: PagePool, counters: EngineCounters, sequences: Mapping[SequenceKey, Sequence]) -> None:
        """Counts steps in `counters`; looks into `sequences` for who is still there."""
        self._pool = pool
        self._counters = counters
        self._sequences = sequences
        self._steps: dict[int, StepInFlight] = {}  # and the one that ended last

    def owners(self, plan: StepPlan) -> Seq[Sequence | None]:
        return self._steps[plan.step].owners

    def begin(
        self,
        chunks: Seq[ChunkPlan],
        owners: Seq[Sequence | None],
        now_s: float,
        swap: SwapPlan = NO_SWAP,
        *,
        is_ahead: bool = False,
    ) -> StepPlan:
        """From here on until a step planned ahead has ended, nothing is released that it may write to."""
        self._counters.steps += 1
        number = self._counters.steps
        for ended in [step for step in self._steps if step < number - 1]:
            del self._steps[ended]
        self._steps[number] = StepInFlight(owners, now_s, is_ahead)
        if is_ahead:
            self._pool.launched(number)
        return StepPlan(number, tuple(chunks), swap)

    def end(self, plan: StepPlan) -> StepInFlight:
        """It writes to nothing any more. Its owners are those that no step before it has ended. May be said twice."""
        step = self._steps[plan.step]
        if not step.is_ahead:
            return step
        self._pool.completed(plan.step)
        owners = [s if s is not None and self._sequences.get(s.key) is s else None for s in step.owners]
        return replace(step, owners=owners)


class Recorder:
    """Changes `counters` and `events` of its batcher."""

    def __init__(
        self, counters: EngineCounters, events: list[Event], max_context_tokens: int, window: int | None = None
    ) -> None:
        """`window`: no layer sees more than so many positions; None: some see all."""
        self._counters = counters
        self._events = events
        self._max_context_tokens = max_context_tokens
        self._window = max_context_tokens if window is None else window
        self._num_until_behind = tokens_until_behind(self._window)

    def record(self, plan: StepPlan, step: StepInFlight, result: StepResult, ended_at_s: float) -> Sampled:
        """The result has been checked.

        Most chunks are the next token of an output and nothing else: those are recorded here, others apart.
        """
        sampled, counters, events = Sampled(), self._counters, self._events
        num_prompt, num_output = counters.prompt_tokens_computed, counters.output_tokens_computed
        token_ids, longest, num_decoded, num_sampled = result.token_ids, self._max_context_tokens, 0, 0
        num_until_behind = self._num_until_behind
        for chunk, sequence in zip(plan.chunks, step.owners, strict=True):
            if sequence is None:
                continue
            sequence.served_at_s = ended_at_s
            start, sample = chunk.start, chunk.sample
            if sample is not None and sequence.grammar is not None and sequence.grammar.error:
                sampled.failed.append((sequence, _failure_of(sequence.grammar.error)))
                continue
            is_new = start >= sequence.num_prefill_tokens and start >= sequence.num_computed_before
            if sample is None or not is_new or sample.params.logprobs is not None:
                self._record_chunk(sequence, chunk, result, sampled)
                continue
            end, token_id = start + len(chunk.token_ids), token_ids[chunk.slot]
            sequence.record_decode(end, token_id)
            num_decoded += end - start
            num_sampled += 1
            events.append(_new(TokenSampled, (sequence.key, end - sequence.num_prompt_tokens, token_id, None)))
            if token_id in sequence.stop_token_ids or end + 1 >= sequence.max_num_tokens or end + 1 >= longest:
                sampled.ended.append((sequence, _reason_of(sequence, longest)))
            elif end - sequence.first_page * PAGE_TOKENS >= num_until_behind:
                sampled.past_window.append((sequence, first_page_read(end, self._window)))
        if step.is_ahead:
            counters.late_rows_computed += step.owners.count(None)
        else:
            counters.held_rows_computed += step.owners.count(None)
        counters.output_tokens_computed += num_decoded
        counters.tokens_generated += num_sampled
        counters.prefill_steps += counters.prompt_tokens_computed > num_prompt
        counters.decode_steps += counters.output_tokens_computed > num_output
        return sampled

    def _record_chunk(self, sequence: Sequence, chunk: ChunkPlan, result: StepResult, sampled: Sampled) -> None:
        token_id = result.token_ids[chunk.slot] if chunk.sample is not None else None
        logprobs = result.logprobs.get(chunk.slot)
        sequence.record_chunk(chunk.end, token_id, logprobs)
        num_before = sequence.num_computed_before
        self._counters.count_chunk(chunk.start, chunk.end, sequence.num_prompt_tokens, num_before)
        if num_before <= chunk.start < sequence.num_prefill_tokens:
            computed = ChunkComputed(sequence.key, chunk.start, len(chunk.token_ids), chunk.block_table)
            self._events.append(computed)
        if chunk.score is not None:
            self._events.append(PromptScored(sequence.key, chunk.start + 1, result.prompt_logprobs[chunk.slot]))
        reason = None
        if token_id is not None:
            self._counters.tokens_generated += 1
            self._events.append(TokenSampled(sequence.key, sequence.num_output_tokens - 1, token_id, logprobs))
            reason = sequence.end_reason(self._max_context_tokens)
        if reason is not None:
            sampled.ended.append((sequence, reason))
            return
        if chunk.end - sequence.first_page * PAGE_TOKENS >= self._num_until_behind:
            sampled.past_window.append((sequence, first_page_read(chunk.end, self._window)))
        if token_id is not None and chunk.start < sequence.num_prefill_tokens:
            sampled.begun.append(sequence)


def _failure_of(error: str) -> Failure:
    """How the error begins; what follows may repeat the answer, and stands in logs and spans then."""
    begin = _DETAIL.split(error, maxsplit=1)[0]
    return Failure(FailureReason.INTERNAL, f"the grammar of its output cannot go on: {' '.join(begin.split())}")


def _reason_of(sequence: Sequence, max_context_tokens: int) -> FinishReason:
    reason = sequence.end_reason(max_context_tokens)
    assert reason is not None, "found when it was recorded"
    return reason
