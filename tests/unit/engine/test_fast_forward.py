"""Many steps at once leave what so many single steps leave."""

import copy
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.engine.world import Records, facts, limits

from weir.engine.local import LocalBatcher
from weir.engine.messages import Arrival, PageLot, TokenDrawn
from weir.engine.pages import PagePool
from weir.engine.plan import StepResult
from weir.kv.geometry import PAGE_TOKENS
from weir.policy.registry import make_policy

TOKEN = 7
NUM_PAGES = 40
STEP_S = 0.25

PROMPTS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 60), st.integers(1, 10), st.booleans()), min_size=1, max_size=5
)


def started(prompts: list[tuple[int, int, int, bool]], num_free_pages: int) -> LocalBatcher:
    """A batcher that has read its prompts; a prompt: tokens, most output, pages booked, ends by TOKEN."""
    pool = PagePool(reserve_pages=0, reserve_slots=0)
    pool.give(PageLot(tuple(range(NUM_PAGES)), tuple(range(8))))
    batcher = LocalBatcher(limits(max_num_seqs=5), pool, Records(NUM_PAGES, 8).open)
    for index, (num_tokens, max_tokens, num_booked_pages, ends) in enumerate(prompts):
        stop_token_ids = (TOKEN,) if ends else ()
        made = facts(tuple(range(num_tokens)), index, max_tokens=max_tokens, stop_token_ids=stop_token_ids)
        batcher.add(Arrival(replace(made, num_booked_pages=3 + num_booked_pages)))
    for _ in range(6):
        single_step(batcher, 0.0, token_id=TOKEN + 1)
    lot = pool.take_all_free()
    pool.give(PageLot(lot.page_ids[:num_free_pages], lot.slots))
    batcher.take_events()
    return batcher


def single_step(batcher: LocalBatcher, now_s: float, token_id: int = TOKEN) -> None:
    plan = batcher.decide(now_s)
    if plan is not None:
        drawn = {chunk.slot: token_id for chunk in plan.chunks if chunk.sample is not None}
        batcher.record(plan, StepResult(drawn), now_s + STEP_S)


def state_of(batcher: LocalBatcher) -> object:
    """All that a later step could depend on."""
    sequences = [
        {
            name: copy.copy(getattr(sequence, name))
            for name in sequence.__slots__
            if name not in ("facts", "log", "history")
        }
        for sequence in batcher._ranked()
    ]
    records = [s.log.read() for s in batcher._ranked() if s.log is not None]  # type: ignore[attr-defined]
    pool = batcher.pool
    free = (list(pool._free_pages), list(pool._free_slots), dict(pool._pages_in_use))
    return sequences, records, free, batcher.counters, batcher._decided_at_s, batcher.next_deadline_s, batcher.need()


@settings(max_examples=200, deadline=None)
@given(PROMPTS, st.integers(0, 12), st.integers(1, 60))
def test_many_steps_at_once_leave_what_single_steps_leave(
    prompts: list[tuple[int, int, int, bool]], num_free_pages: int, max_steps: int
) -> None:
    at_once, one_by_one = started(prompts, num_free_pages), started(prompts, num_free_pages)
    assert state_of(at_once) == state_of(one_by_one)
    last_s = 1.0 + STEP_S * (max_steps - 1)
    num_steps = at_once.advance(TOKEN, max_steps, last_s, last_s + STEP_S)
    assert 0 <= num_steps <= max_steps
    for step in range(max_steps - num_steps, max_steps):
        single_step(one_by_one, 1.0 + STEP_S * step)
    assert at_once.take_events() == ()
    drawn = one_by_one.take_events()
    assert all(isinstance(event, TokenDrawn) for event in drawn), "nobody ended, stalled or was told anything else"
    assert len(drawn) == num_steps * len(one_by_one._ranked())
    assert state_of(at_once) == state_of(one_by_one)
    assert at_once.check_integrity() == ()


def test_a_batch_that_only_decodes_goes_to_the_step_before_the_first_end() -> None:
    """The property above would hold for one that never does anything."""
    batcher = started([(5, 30, 10, False), (20, 50, 10, False)], num_free_pages=30)
    num_drawn = min(sequence.num_output_tokens for sequence in batcher._ranked())
    assert batcher.advance(TOKEN, 1000, 0.0, 0.0) == 30 - 1 - num_drawn
    assert batcher.advance(TOKEN, 1000, 0.0, 0.0) == 0


def test_it_goes_as_far_as_there_are_pages() -> None:
    batcher = started([(5, 60, 10, False)], num_free_pages=1)
    (sequence,) = batcher._ranked()
    num_left = 2 * PAGE_TOKENS - sequence.num_computed
    assert batcher.advance(TOKEN, 1000, 0.0, 0.0) == num_left
    assert batcher.pool.num_free_pages == 0


def test_who_waits_or_a_policy_that_has_a_say_wants_single_steps() -> None:
    batcher = started([(5, 60, 10, False)], num_free_pages=20)
    batcher.set_policy(make_policy("slai"))
    assert batcher.advance(TOKEN, 10, 0.0, 0.0) == 0
    batcher.set_policy(make_policy("fcfs"))
    batcher.add(Arrival(facts((1, 2), 7)))
    assert batcher.advance(TOKEN, 10, 0.0, 0.0) == 0
    batcher.cancel(batcher._ranked()[-1].key)
    assert batcher.advance(TOKEN, 10, 0.0, 0.0) == 10
