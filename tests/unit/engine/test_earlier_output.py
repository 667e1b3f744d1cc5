"""Prompts that come with output which an earlier dispatch has sampled: they go on behind it."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.engine.world import VOCAB_SIZE, Records, limits, params

from weir.core.sampling import SamplingParams
from weir.engine.batching.batcher import Batcher
from weir.engine.batching.prefill import PrefillBatcher
from weir.engine.batching.running import RunningBatcher
from weir.engine.memory.pages import PagePool
from weir.engine.messages import (
    Arrival,
    ChunkComputed,
    Event,
    HandOffReady,
    PageBundle,
    SequenceEnded,
    TokenSampled,
)
from weir.engine.plan import ChunkPlan, StepPlan
from weir.engine.sequence import Sequence
from weir.kv.geometry import PAGE_TOKENS
from weir.kv.records.record import SequenceParams
from weir.testing.runner import HashRunner, reference_tokens

NUM_PAGES, NUM_SLOTS, MAX_TOKENS = 16, 2, 24
PENALIZED = SamplingParams(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.5)


class Workers:
    """A prefill and a decode engine over the same pages; `events` are those of both."""

    def __init__(self, **changes: int) -> None:
        self.records = Records(NUM_PAGES, NUM_SLOTS)
        self.runner = HashRunner(NUM_PAGES, VOCAB_SIZE)
        self.prefill = PrefillBatcher(
            limits(**changes), PagePool(watermark_pages=0, watermark_slots=0), self.records.open
        )
        self.decode = RunningBatcher(
            limits(**changes), PagePool(watermark_pages=0, watermark_slots=0), self.records.open
        )
        self.events: list[Event] = []

    def cache(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Writes full pages of these tokens, the first pages there are, as another sequence would have."""
        page_ids = tuple(range(len(token_ids) // PAGE_TOKENS))
        computed = token_ids[: len(page_ids) * PAGE_TOKENS]
        if page_ids:
            chunk = ChunkPlan(slot=0, start=0, token_ids=computed, block_table=page_ids, sample=None, score=None)
            self.runner.run(StepPlan(0, (chunk,)))
        return page_ids

    def give(self, batcher: Batcher, num_cached_pages: int) -> None:
        batcher.pool.give(PageBundle(tuple(range(num_cached_pages, NUM_PAGES)), tuple(range(NUM_SLOTS))))

    def run(self, batcher: Batcher) -> None:
        while (plan := batcher.decide(0.0)) is not None:
            batcher.record(plan, self.runner.run(plan))
            assert batcher.check_integrity() == ()
        self.events += batcher.take_events()

    def hand_off(self) -> None:
        (ready,) = [event for event in self.events if isinstance(event, HandOffReady)]
        record = self.records.open(ready.slot)
        snapshot = record.read()
        assert snapshot is not None
        self.prefill.forget(ready.key)
        rest = self.prefill.pool.take_all_free()
        self.decode.pool.give(PageBundle(rest.all_page_ids))
        arrival = Arrival(
            params=snapshot.params,
            slot=ready.slot,
            log=record,
            output_token_ids=snapshot.output_token_ids,
            block_table=snapshot.block_table,
            num_computed_tokens=snapshot.num_computed_tokens,
        )
        self.decode.add(arrival)

    def sampled(self) -> list[tuple[int, int]]:
        return [(event.index, event.token_id) for event in self.events if isinstance(event, TokenSampled)]


def reference(params_: SequenceParams) -> list[int]:
    return reference_tokens(params_.prompt_token_ids, params_.sampling, MAX_TOKENS, VOCAB_SIZE)


@settings(max_examples=150, deadline=None)
@given(
    num_prompt_tokens=st.integers(1, 70),
    num_given=st.integers(0, MAX_TOKENS - 1),
    num_cached=st.integers(0, 100),
    chunk_tokens=st.integers(1, 40),
    sampling=st.sampled_from([SamplingParams(temperature=0.0), PENALIZED]),
    is_local=st.booleans(),
)
def test_the_rest_is_what_it_would_have_been(
    num_prompt_tokens: int,
    num_given: int,
    num_cached: int,
    chunk_tokens: int,
    sampling: SamplingParams,
    is_local: bool,
) -> None:
    prompt = tuple(index * 7 % VOCAB_SIZE for index in range(num_prompt_tokens))
    params_ = params(prompt, max_tokens=MAX_TOKENS, seed=5, sampling=sampling)
    expected = reference(params_)
    given_ = tuple(expected[:num_given])
    workers = Workers(chunk_tokens=chunk_tokens)
    cached = workers.cache((*prompt, *given_)[: min(num_cached, num_prompt_tokens + num_given - 1)])
    arrival = Arrival(
        params_,
        output_token_ids=given_,
        block_table=cached,
        num_computed_tokens=len(cached) * PAGE_TOKENS,
        num_shared_pages=len(cached),
    )
    first = workers.decode if is_local else workers.prefill
    workers.give(first, len(cached))
    first.add(arrival)
    workers.run(first)
    if not is_local and num_given < MAX_TOKENS - 1:
        workers.hand_off()
        workers.run(workers.decode)
    assert workers.sampled() == list(enumerate(expected))[num_given:]
    assert [event.reason is not None for event in workers.events if isinstance(event, SequenceEnded)] == [True]
    chunks = [(event.start, event.num_tokens) for event in workers.events if isinstance(event, ChunkComputed)]
    assert sum(num_tokens for _, num_tokens in chunks) == num_prompt_tokens + num_given - len(cached) * PAGE_TOKENS


def test_pages_of_earlier_output_may_be_others_prefix_too() -> None:
    """A preempted sequence must not give such a page to be written to; nor must one that was handed off with it."""
    params_ = replace(params(tuple(range(20)), max_tokens=MAX_TOKENS), prefix_seed=bytes(range(16)))
    earlier_output = tuple(reference(params_)[:14])
    prompt = Sequence.of_arrival(Arrival(params_, output_token_ids=earlier_output))
    handed_off = Sequence.of_arrival(
        Arrival(params_, slot=0, output_token_ids=(*earlier_output, 7), block_table=(3, 4, 5), num_computed_tokens=34)
    )
    assert (prompt.num_sharable_pages, handed_off.num_sharable_pages) == (34 // PAGE_TOKENS, 34 // PAGE_TOKENS)
