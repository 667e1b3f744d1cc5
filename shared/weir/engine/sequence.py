"""The one mutable record of a sequence in an engine, changed by its methods and nowhere else.

    tokens      | prompt ........ | output 0, 1, ... |
    positions   0 ........ num_computed ....... num_tokens
                |-- in pages ---|-- to be computed --|

The keys and values of [0, num_computed) are in `block_table`'s pages. A token is sampled from the logits of position
num_tokens - 1, that is when num_computed reaches num_tokens; the token by which a sequence ends is never computed.

Where no layer of the model sees further back than a window, pages that nothing to be computed sees are given back:

    block table | given back | held .............. |
    pages       0 ....... first_page ............. len(block_table)

A preempted sequence keeps only those of its pages that it shares (the first `num_shared_pages` of its block table), and
num_computed says no more than they hold. One that has given its first pages back keeps none, since nothing can be
computed from the others alone. What it gave up is in `swap_slots` of the swap file, or lost and computed again.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum

from weir.core.life import FinishReason
from weir.core.sampling import TokenLogprobs
from weir.engine.history import GrowingHistory
from weir.engine.messages import Arrival, SequenceKey, SequenceLog
from weir.engine.plan import SAMPLED_BEFORE, ChunkPlan, SampleSpec, ScoreSpec
from weir.engine.waits import WaitTimes
from weir.grammar.masks import GrammarState
from weir.kv.geometry import PAGE_TOKENS, num_pages_for
from weir.kv.records.record import SequenceParams

_new = tuple.__new__  # of named tuples: their own constructors look at keywords first

OpenLog = Callable[[int], SequenceLog]
"""The empty record of a slot."""

LOOKAHEAD_TOKENS = 8
"""Pages are asked for this many tokens before they are needed, so that the arena's answer is here in time."""


class Stage(Enum):
    """Of a sequence in this worker."""

    WAITING = "waiting"
    RUNNING = "running"
    HANDING_OFF = "handing_off"


@dataclass(slots=True, eq=False)
class Sequence:
    """Everybody may look; it is changed by the methods below, and `stage`, `stalled_since_s`, `is_cancelled` and the
    fields of pauses by its batcher, `swap_slots` by `Preemption`."""

    params: SequenceParams
    token_ids: list[int]
    slot: int | None = None
    log: SequenceLog | None = None
    block_table: tuple[int, ...] = ()
    first_page: int = 0
    num_computed: int = 0
    stage: Stage = Stage.WAITING
    stalled_since_s: float | None = None
    is_cancelled: bool = False
    is_sound: bool = True
    """False: a step with it failed, so nobody else may use what is in its pages."""
    num_shared_pages: int = 0
    preempted_since_s: float | None = None
    swap_slots: tuple[int, ...] = ()
    num_swapped_out_tokens: int = 0
    """Tokens whose keys and values `swap_slots` and the shared pages hold, from `first_page` on."""
    num_computed_before: int = 0
    """Positions below this were computed once already, before they were lost."""
    num_preemptions: int = 0
    num_pauses: int = 0
    """Times that it left the batch for a more urgent one; its pages stayed."""
    paused_since_s: float | None = None
    first_seen_at_s: float | None = None
    """By its batcher, while it waited."""
    served_at_s: float = 0.0
    """When a step with it ended last; before that, `first_seen_at_s`."""
    waits: WaitTimes = field(default_factory=WaitTimes)
    grammar: GrammarState | None = None
    """Where it stands in its grammar; None: its output is free."""
    num_passed_over: int = 0
    """Steps in a row that had no room for any of its prompt."""
    key: SequenceKey = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_prefill_tokens: int = field(init=False)
    """Those that are there before the first one is sampled here: prompt and earlier output; of a handed-off sequence
    what was computed when it came, at least its prompt."""
    max_num_tokens: int = field(init=False)
    """Prompt and output together, by its own stop rules."""
    history: GrowingHistory | None = field(init=False, default=None)
    stop_token_ids: tuple[int, ...] = field(init=False)
    first_plain_index: int = field(init=False)
    """From this output token on a sample depends on the logits and the sampling parameters alone."""

    def __post_init__(self) -> None:
        params = self.params
        self.key = SequenceKey.of(params)
        self.num_prompt_tokens = len(params.prompt_token_ids)
        is_prompt = self.slot is None
        self.num_prefill_tokens = len(self.token_ids) if is_prompt else max(self.num_prompt_tokens, self.num_computed)
        self.max_num_tokens = self.num_prompt_tokens + params.stop.max_tokens
        self.stop_token_ids = params.stop.stop_token_ids
        is_ever_plain = self.grammar is None and not params.sampling.has_penalties
        self.first_plain_index = params.stop.min_tokens if is_ever_plain else self.max_num_tokens
        if params.sampling.has_penalties:
            self.history = GrowingHistory(self.token_ids, self.num_prompt_tokens)

    @classmethod
    def of_arrival(cls, arrival: Arrival) -> "Sequence":
        return cls(
            params=arrival.params,
            token_ids=[*arrival.params.prompt_token_ids, *arrival.output_token_ids],
            slot=arrival.slot,
            log=arrival.log,
            block_table=arrival.block_table,
            first_page=arrival.first_page,
            num_computed=arrival.num_computed_tokens,
            num_shared_pages=arrival.num_shared_pages,
            grammar=arrival.grammar,
        )

    @property
    def prefix_seed(self) -> bytes:
        """The seed of the hashes under which its pages may serve others as a prefix; empty: they may not."""
        return self.params.prefix_seed if self.is_sound else b""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_begun(self) -> bool:
        """Whether it got its first token by the attempt that it is."""
        return len(self.token_ids) > max(self.num_prefill_tokens, self.num_prompt_tokens)

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def num_sharable_pages(self) -> int:
        """How many of its first pages other sequences may use by now: the full ones of what is prefilled."""
        if not self.params.prefix_seed:
            return self.num_shared_pages
        return max(self.num_shared_pages, self.num_prefill_tokens // PAGE_TOKENS)

    @property
    def is_preempted(self) -> bool:
        return self.preempted_since_s is not None

    @property
    def held_pages(self) -> tuple[int, ...]:
        return self.block_table[self.first_page :]

    @property
    def first_private_page(self) -> int:
        """It gives those from here on up when it gives way."""
        return self.first_page or self.num_shared_pages

    @property
    def private_pages(self) -> tuple[int, ...]:
        return self.block_table[self.first_private_page :]

    @property
    def num_sharable_private_pages(self) -> int:
        """How many of its first private pages others may use by now: the arena alone knows whether they are free."""
        return max(0, self.num_sharable_pages - self.first_private_page)

    def num_missing_pages(self, num_ahead: int) -> int:
        """Pages to add before the next `num_ahead` positions can be computed."""
        return max(0, num_pages_for(self.num_computed + num_ahead) - len(self.block_table))

    def num_pages_short_of(self, num_ahead: int) -> int:
        """Pages that it lacks for all its tokens and `num_ahead` more, but for those over its reservation."""
        num_pages, num_wanted = len(self.block_table), len(self.token_ids) + num_ahead
        if num_wanted <= num_pages * PAGE_TOKENS:  # nearly always, and this runs often
            return 0
        return max(0, min(self.params.num_reserved_pages, num_pages_for(num_wanted)) - num_pages)

    def num_pages_short_of_chunk(self, num_tokens: int) -> int:
        """Pages that it lacks to have its next `num_tokens` computed; once it has given way, all that it has: from then
        on it never again holds a part of what it needs while it waits for the rest."""
        is_whole = self.num_preemptions > 0 or num_tokens > self.num_uncomputed
        return self.num_missing_pages(self.num_uncomputed if is_whole else num_tokens)

    def allocate(self, slot: int, log: SequenceLog, page_ids: Seq[int]) -> None:
        """Gives a new sequence its slot, and pages after its cached prefix, and publishes that much of its record."""
        block_table = (*self.block_table, *page_ids)
        log.begin(self.params, self.token_ids[self.num_prompt_tokens :])
        log.set_block_table(block_table)
        log.publish(self.num_computed)
        self.slot, self.log, self.block_table = slot, log, block_table

    def grow(self, page_id: int) -> None:
        """Adds a page; the next publish makes it count."""
        assert self.log is not None, "a sequence without a record has no pages"
        self.log.append_page(page_id)
        self.block_table += (page_id,)

    def publish(self) -> None:
        """Pages that it has got since the last step count in its record as well."""
        assert self.log is not None, "only a sequence with a slot has a record"
        self.log.publish(self.num_computed)

    def give_back(self, first_page: int) -> tuple[int, ...]:
        """Its pages before `first_page`, which is the first that a query from the next position on reads; they are not
        its own any more when this returns. The record comes first, as in `_give_up_pages`."""
        assert self.log is not None, "only a sequence with a slot has a record"
        assert first_page > self.first_page, "found by `tokens_until_behind`, which is `first_page_read` the other way"
        self.log.drop_first_pages(first_page)
        given_back, self.first_page = self.block_table[self.first_page : first_page], first_page
        return given_back

    def swap_out(self, swap_slots: tuple[int, ...], now_s: float) -> None:
        """Its private pages were copied to `swap_slots`, in order; they are not its own any more when this returns."""
        self.swap_slots, self.num_swapped_out_tokens = swap_slots, self.num_computed
        self._give_up_pages(now_s)

    def drop_pages(self, now_s: float) -> None:
        """Its private pages are lost, and not its own any more when this returns."""
        self.num_computed_before = max(self.num_computed_before, self.num_computed)
        self._give_up_pages(now_s)
        self._begin_anew()

    def restore(self, page_ids: Seq[int], *, is_intact: bool, now_s: float | None = None) -> None:
        """Private pages again; `is_intact`: with what was swapped out. Otherwise that is to be computed again."""
        assert self.log is not None, "only a sequence with a slot is preempted"
        if is_intact:
            self.num_computed = self.num_swapped_out_tokens
        else:
            self.num_computed_before = max(self.num_computed_before, self.num_swapped_out_tokens)
            self._begin_anew()
        if now_s is not None:  # else nobody is told how long it waited
            self.waits.came_back(self.preempted_since_s, now_s)
        self.swap_slots, self.num_swapped_out_tokens, self.preempted_since_s = (), 0, None
        self.block_table += tuple(page_ids)
        self.log.set_block_table(self.block_table, self.first_page)
        self.log.publish(self.num_computed)

    def _give_up_pages(self, now_s: float) -> None:
        """The record comes first: an adopter must not find pages that are somebody else's. What was given back before
        keeps its place in the block table, for what is swapped out to come behind it."""
        assert self.log is not None, "only a sequence with a slot is preempted"
        if self.first_page:
            self.num_shared_pages = 0
        self.log.drop_pages(self.num_shared_pages)
        self.block_table = self.block_table[: self.first_private_page]
        self.num_computed = min(self.num_computed, self.num_shared_pages * PAGE_TOKENS)
        self.num_preemptions += 1
        self.preempted_since_s = now_s

    def _begin_anew(self) -> None:
        """It is computed again from the pages that it shares, or from position 0 on."""
        if self.first_page:
            self.block_table, self.first_page = (), 0

    def end(self, reason: FinishReason) -> tuple[int, SequenceLog]:
        """Publishes that it has ended, and parts with its slot and its record, which name no pages any more."""
        slot, log = self.slot, self.log
        assert slot is not None, "only a sequence with a slot is kept"
        assert log is not None, "a slot has a record"
        log.end(reason)
        self.slot = self.log = None
        return slot, log

    def plan_chunk(self, max_tokens: int) -> ChunkPlan:
        """The next at most `max_tokens` positions, with a sample when they reach the end. Changes nothing.

        What was lost is computed again in chunks of its own, since no event reports it a second time.
        """
        assert self.slot is not None, "only a sequence with a slot can be computed"
        is_again = self.num_computed < self.num_computed_before
        end = min(self.num_computed + max_tokens, self.num_computed_before if is_again else self.num_tokens)
        is_last = end == self.num_tokens
        return ChunkPlan(
            slot=self.slot,
            start=self.num_computed,
            token_ids=tuple(self.token_ids[self.num_computed : end]),
            block_table=self.block_table[: num_pages_for(end)],
            sample=self._sample_spec() if is_last else None,
            score=None if is_again else self._try_score_spec(end),
        )

    def plan_decode(self) -> ChunkPlan:
        """`plan_chunk(1)` of a sequence with one token to compute and a page for it: most chunks, so it is quicker."""
        start, params, table = self.num_computed, self.params, self.block_table
        output_index = start + 1 - self.num_prompt_tokens
        sample = (
            _new(SampleSpec, (params.sampling, output_index, (), None, None))
            if output_index >= self.first_plain_index
            else self._sample_spec()
        )
        num_pages = start // PAGE_TOKENS + 1
        if len(table) != num_pages:
            table = table[:num_pages]
        return _new(ChunkPlan, (self.slot, start, (self.token_ids[start],), table, sample, None))

    def plan_decode_ahead(self) -> ChunkPlan:
        """`plan_decode` of the next position, while a step samples the token that it reads. There is no history."""
        assert self.slot is not None, "only a sequence with a slot can be computed"
        start, stop = self.num_computed + 1, self.params.stop
        output_index = start + 1 - self.num_prompt_tokens
        masked = stop.stop_token_ids if output_index < stop.min_tokens else ()
        sample = SampleSpec(self.params.sampling, output_index, masked)
        return ChunkPlan(self.slot, start, (SAMPLED_BEFORE,), self.block_table[: num_pages_for(start + 1)], sample)

    def _sample_spec(self) -> SampleSpec:
        stop, output_index = self.params.stop, self.num_output_tokens
        return SampleSpec(
            self.params.sampling,
            output_index,
            masked_token_ids=stop.stop_token_ids if output_index < stop.min_tokens else (),
            history=None if self.history is None else self.history.view(),
            mask=self.grammar,
        )

    def _try_score_spec(self, end: int) -> ScoreSpec | None:
        """For the positions up to `end` that are computed now. None if nobody asked, or no prompt token follows."""
        num_top, num_prompt_tokens = self.params.sampling.prompt_logprobs, self.num_prompt_tokens
        if num_top is None or self.num_computed + 1 >= num_prompt_tokens or self.num_output_tokens > 0:
            return None
        return ScoreSpec(tuple(self.token_ids[self.num_computed + 1 : end + 1]), num_top)

    def record_chunk(self, end: int, token_id: int | None, logprobs: TokenLogprobs | None = None) -> None:
        """Positions up to `end` are computed, and `token_id` was sampled after them. Published when this returns."""
        assert self.log is not None, "only a sequence with a slot can be computed"
        if token_id is None:
            self.num_computed = end
            self.log.publish(end)
            return
        if logprobs is not None:
            self.log.keep_logprobs(self.num_output_tokens, logprobs)
        self.record_decode(end, token_id)

    def record_decode(self, end: int, token_id: int) -> None:
        """`record_chunk` of a token that comes without log-probabilities; quicker."""
        log = self.log
        assert log is not None, "only a sequence with a slot can be computed"
        log.append_token(token_id)
        self.token_ids.append(token_id)
        if self.history is not None:
            self.history.append(token_id)
        if self.grammar is not None:
            self.grammar.accept(token_id)
        self.num_computed = end
        log.publish(end)

    def end_reason(self, max_context_tokens: int) -> FinishReason | None:
        """Why the last sampled token ends the sequence, or None when it goes on."""
        if self.num_output_tokens == 0:
            return None
        if self.token_ids[-1] in self.params.stop.stop_token_ids:
            return FinishReason.STOP
        if self.num_tokens >= min(self.max_num_tokens, max_context_tokens):
            return FinishReason.LENGTH
        return None

    def check_integrity(self) -> list[str]:
        """What is wrong with the ranges in the drawing above, in sentences."""
        errors = []
        capacity = len(self.block_table) * PAGE_TOKENS
        if not 0 <= self.num_computed <= min(capacity, self.num_tokens):
            errors.append(
                f"{self.key.request_id}: {self.num_computed} of {self.num_tokens} tokens in pages for {capacity}"
            )
        if not 0 <= self.first_page <= len(self.block_table):
            errors.append(
                f"{self.key.request_id}: holds pages from {self.first_page} on, and has {len(self.block_table)}"
            )
        if self.is_preempted and self.private_pages:
            errors.append(f"{self.key.request_id}: is preempted, but has {len(self.private_pages)} pages of its own")
        num_swapped_out, num_swap_slots = self.num_swapped_out_tokens, len(self.swap_slots)
        if num_swap_slots and num_swap_slots != num_pages_for(num_swapped_out) - self.first_private_page:
            errors.append(f"{self.key.request_id}: {num_swapped_out} tokens swapped out to {num_swap_slots} pages")
        return errors
