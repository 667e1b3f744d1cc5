"""Half-read prompts give way where pages run short: once each, the later ones first, and whatever happens all end."""

import random
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.engine.world import VOCAB_SIZE, Records, limits, params

from weir.core.clock import ManualClock
from weir.core.life import SchedulingParams
from weir.engine.batching.prefill import PrefillBatcher
from weir.engine.memory.giving_way import AFTER_S, ALONE_AFTER_S
from weir.engine.memory.pages import PagePool
from weir.engine.messages import Arrival, ChunkComputed, HandOffReady, PageBundle, SequenceEnded, TokenSampled
from weir.kv.geometry import PAGE_TOKENS
from weir.testing.runner import HashRunner, reference_tokens

TICK_S = 0.05
NEVER_S = 1e9


@dataclass(frozen=True)
class Prompt:
    """`worker` reads it, from tick `arrives_at` on."""

    num_tokens: int
    worker: int = 0
    lane: int = 0
    arrives_at: int = 0
    prefix_seed: bytes = b""

    def token_ids(self, index: int) -> tuple[int, ...]:
        return tuple((index * 7 + position) % VOCAB_SIZE for position in range(self.num_tokens))


class SharedArena:
    """Prefill workers that know nothing of each other, over one arena; what is handed off comes back after a while."""

    def __init__(self, prompts: list[Prompt], num_pages: int, *, seed: int = 0, **changes: int) -> None:
        self.prompts = prompts
        self.num_pages = num_pages
        self.clock = ManualClock()
        records = Records(num_pages, 2 * len(prompts))
        memory = np.full((num_pages, PAGE_TOKENS), -1, np.int64)
        self.runner = HashRunner(num_pages, VOCAB_SIZE, None, memory)
        self.free_pages = set(range(num_pages))
        self.free_slots = set(range(2 * len(prompts)))
        patient = replace(limits(**changes), max_stall_s=NEVER_S)
        self.workers = [
            PrefillBatcher(patient, PagePool(watermark_pages=0, watermark_slots=0), records.open)
            for _ in range(1 + max(prompt.worker for prompt in prompts))
        ]
        self.first_tokens: dict[str, list[int]] = {}
        self.num_read: dict[str, list[int]] = {}
        self._random = random.Random(seed)
        self._decoding: list[tuple[int, HandOffReady]] = []
        self._tick = 0

    def run(self, max_ticks: int = 2000) -> None:
        last = max(prompt.arrives_at for prompt in self.prompts)
        while self._tick <= last or self._decoding or not all(worker.is_idle for worker in self.workers):
            self.tick()
            assert self._tick < max_ticks, "a prompt never ends"
        for worker in self.workers:
            self._take_back(worker.pool.take_all_free())

    def tick(self) -> None:
        for index, prompt in enumerate(self.prompts):
            if prompt.arrives_at == self._tick:
                made = replace(
                    params(prompt.token_ids(index), index),
                    scheduling=SchedulingParams(prompt.lane),
                    prefix_seed=prompt.prefix_seed,
                )
                self.workers[prompt.worker].add(Arrival(made))
        for entry in [entry for entry in self._decoding if entry[0] <= self._tick]:
            self._decoding.remove(entry)
            self._take_back(PageBundle(entry[1].page_ids, (entry[1].slot,)))
        for worker in self._random.sample(self.workers, len(self.workers)):
            self._turn(worker)
        self._tick += 1
        self.clock.advance(TICK_S)

    def _turn(self, worker: PrefillBatcher) -> None:
        self._grant(worker)
        plan = worker.decide(self.clock.now_s())
        if plan is not None:
            worker.record(plan, self.runner.run(plan))
        for event in worker.take_events():
            match event:
                case TokenSampled(key, index, token_id):
                    self.first_tokens.setdefault(key.request_id, []).append(token_id)
                    assert index == 0
                case ChunkComputed(key, start, num_tokens):
                    self.num_read.setdefault(key.request_id, []).extend(range(start, start + num_tokens))
                case HandOffReady(key):
                    worker.forget(key)
                    self._decoding.append((self._tick + self._random.randint(1, 6), event))
                case SequenceEnded():
                    raise AssertionError(f"{event}: nobody fails")
                case _:
                    pass
        self._take_back(worker.take_surplus())
        assert worker.check_integrity() == ()

    def _grant(self, worker: PrefillBatcher) -> None:
        wanted = worker.wanted()
        if wanted is None:
            return
        for num_pages, num_slots in (
            (wanted.num_pages, wanted.num_slots),
            (wanted.least_pages, wanted.least_slots),
        ):
            if num_pages <= len(self.free_pages) and num_slots <= len(self.free_slots):
                pages = tuple(self.free_pages.pop() for _ in range(num_pages))
                worker.pool.give(PageBundle(pages, tuple(self.free_slots.pop() for _ in range(num_slots))))
                return

    def _take_back(self, bundle: PageBundle) -> None:
        self.runner.spoil(bundle.all_page_ids)
        self.free_pages.update(bundle.all_page_ids)
        self.free_slots.update(bundle.slots)

    def check(self) -> None:
        """Every prompt was read once to its end as far as anybody is told, with the token that it has alone."""
        for index, prompt in enumerate(self.prompts):
            token_ids, request_id = prompt.token_ids(index), f"{index:032x}"
            made = params(token_ids, index)
            assert self.first_tokens[request_id] == reference_tokens(token_ids, made.sampling, 1, VOCAB_SIZE)
            assert self.num_read[request_id] == list(range(prompt.num_tokens))
        assert self.free_pages == set(range(self.num_pages))
        assert self.free_slots == set(range(2 * len(self.prompts)))
        for worker in self.workers:
            counters = worker.counters
            mine = [prompt for prompt in self.prompts if self.workers[prompt.worker] is worker]
            assert counters.preemptions == counters.preemptions_dropped <= len(mine), "each gives way once"
            assert counters.prompt_tokens_computed == sum(prompt.num_tokens for prompt in mine)
            assert bool(counters.tokens_recomputed) == bool(counters.preemptions)

    @property
    def num_preemptions(self) -> int:
        return sum(worker.counters.preemptions for worker in self.workers)


PROMPTS = st.builds(
    Prompt,
    num_tokens=st.integers(1, 110),
    worker=st.integers(0, 2),
    lane=st.sampled_from([0, 0, 1, 2]),
    arrives_at=st.integers(0, 30),
    prefix_seed=st.sampled_from([b"", b"all"]),
)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(PROMPTS, min_size=2, max_size=10),
    st.sampled_from([7, 8, 10, 14]),
    st.sampled_from([64, 16, 5]),
    st.sampled_from([32, 16, 3]),
    st.integers(1, 4),
    st.integers(0, 2**32),
)
def test_whatever_workers_share_an_arena_every_prompt_ends_with_its_own_token_and_nothing_leaks(
    prompts: list[Prompt], num_pages: int, num_tokens: int, chunk_tokens: int, max_num_seqs: int, seed: int
) -> None:
    sizes = {"max_num_batched_tokens": num_tokens, "chunk_tokens": chunk_tokens, "max_num_seqs": max_num_seqs}
    arena = SharedArena(prompts, num_pages, seed=seed, **sizes)
    arena.run()
    arena.check()


def test_two_workers_whose_prompts_hold_half_the_arena_each_do_not_wait_for_each_other_for_ever() -> None:
    arena = SharedArena([Prompt(96, 0), Prompt(96, 1)], 8, max_num_batched_tokens=32)
    arena.run()
    arena.check()
    assert arena.num_preemptions > 0


def half_read(num_pages: int = 6) -> PrefillBatcher:
    """An urgent prompt and another one have half of the pages each, and need more."""
    pool = PagePool(watermark_pages=0, watermark_slots=0)
    pool.give(PageBundle(tuple(range(num_pages)), tuple(range(4))))
    batcher = PrefillBatcher(limits(max_num_batched_tokens=16), pool, Records(num_pages, 4).open)
    for number, lane, num_steps in ((1, 0, 3), (2, 1, 3)):
        made = replace(params(tuple(range(80)), number), scheduling=SchedulingParams(lane))
        batcher.add(Arrival(made))
        for _ in range(num_steps):
            assert step(batcher, 0.0) == [(number, 16)]
    assert step(batcher, 0.0) == [], "there is no page"
    return batcher


def step(batcher: PrefillBatcher, now_s: float) -> list[tuple[int, int]]:
    plan = batcher.decide(now_s)
    if plan is None:
        return []
    owners = [int(owner.key.request_id, 16) for owner in batcher._steps.owners(plan) if owner is not None]
    batcher.record(plan, HashRunner(10, VOCAB_SIZE).run(plan))
    assert batcher.check_integrity() == ()
    return [(owner, len(chunk.token_ids)) for owner, chunk in zip(owners, plan.chunks, strict=True)]


def test_the_later_one_gives_way_after_a_while_and_is_back_when_all_its_pages_are_there() -> None:
    batcher = half_read()
    assert batcher.next_deadline_s == AFTER_S
    assert step(batcher, AFTER_S / 2) == []
    assert [step(batcher, AFTER_S) for _ in range(3)] == [[(2, 16)], [(2, 16)], []]
    assert (batcher.counters.preemptions, batcher.load.num_used_pages) == (1, 5)
    assert batcher.need().num_pages == 5, "it never holds a part of what it needs again"
    (ready,) = [event for event in batcher.take_events() if isinstance(event, HandOffReady)]
    batcher.forget(ready.key)
    batcher.pool.give(PageBundle(ready.page_ids, (ready.slot,)))
    assert step(batcher, 1.0) == [(1, 16)]
    assert batcher.load.num_used_pages == 5
    assert [step(batcher, 1.0) for _ in range(4)] == 4 * [[(1, 16)]]
    assert (batcher.counters.tokens_recomputed, batcher.counters.prompt_tokens_computed) == (48, 160)


def test_one_that_waits_alone_gives_way_itself_but_later() -> None:
    pool = PagePool(watermark_pages=0, watermark_slots=0)
    pool.give(PageBundle((0, 1), (0,)))
    batcher = PrefillBatcher(limits(max_num_batched_tokens=32), pool, Records(2, 4).open)
    batcher.add(Arrival(params(tuple(range(80)), 1)))
    assert step(batcher, 0.0) == [(1, 32)]
    assert step(batcher, 0.0) == []
    assert batcher.next_deadline_s == ALONE_AFTER_S
    assert step(batcher, ALONE_AFTER_S) == []
    assert batcher.load.num_used_pages == 0
    assert batcher.take_surplus().all_page_ids, "somebody else may need them"
    assert batcher.wanted() is not None


def test_nobody_gives_way_while_the_arena_is_silent() -> None:
    batcher = half_read()
    batcher.set_arena_silent(True, 0.0)
    assert step(batcher, 1.9) == []
    assert batcher.counters.preemptions == 0
    batcher.set_arena_silent(False, 1.9)
    assert step(batcher, 2.1) == [(2, 16)]


def test_what_gave_way_after_others_could_use_its_pages_gives_them_to_the_arena() -> None:
    pool = PagePool(watermark_pages=0, watermark_slots=0)
    pool.give(PageBundle((0, 1), (0,)))
    batcher = PrefillBatcher(limits(max_num_batched_tokens=32), pool, Records(2, 4).open)
    batcher.add(Arrival(replace(params(tuple(range(80)), 1), prefix_seed=b"all")))
    assert step(batcher, 0.0) == [(1, 32)]
    assert step(batcher, 0.0) == []
    assert step(batcher, ALONE_AFTER_S) == []
    assert pool.num_free_pages == 0
    assert {page for used in pool.take_used().used for page in used.page_ids} == {0, 1}


def test_nobody_else_gives_way_before_what_was_given_up_can_have_come_back() -> None:
    pool = PagePool(watermark_pages=0, watermark_slots=0)
    pool.give(PageBundle(tuple(range(6)), tuple(range(4))))
    batcher = PrefillBatcher(limits(max_num_batched_tokens=16), pool, Records(6, 4).open)
    for number in (1, 2, 3):
        made = replace(params(tuple(range(80)), number), scheduling=SchedulingParams(number), prefix_seed=b"all")
        batcher.add(Arrival(made))
        assert [step(batcher, 0.0) for _ in range(2)] == 2 * [[(number, 16)]]
    assert [step(batcher, now_s) for now_s in (0.0, AFTER_S, 1.5 * AFTER_S)] == 3 * [[]]
    assert batcher.counters.preemptions == 1, "its pages are on their way"
    assert batcher.next_deadline_s == 2 * AFTER_S
    step(batcher, 2 * AFTER_S)
    assert batcher.counters.preemptions == 2, "they did not come"


def test_a_prompt_gives_way_once_and_is_then_read_to_its_end() -> None:
    batcher = half_read()
    assert [step(batcher, AFTER_S) for _ in range(3)] == [[(2, 16)], [(2, 16)], []]
    (ready,) = [event for event in batcher.take_events() if isinstance(event, HandOffReady)]
    batcher.forget(ready.key)
    batcher.pool.give(PageBundle(ready.page_ids, (ready.slot,)))
    assert step(batcher, 1.0) == [(1, 16)]
    batcher.add(Arrival(replace(params(tuple(range(80)), 3), scheduling=SchedulingParams(1))))
    assert [step(batcher, now_s) for now_s in (1.0, 2.0, 3.0, 3.1)] == [[(3, 16)], [(1, 16)], [(1, 16)], [(1, 16)]]
    assert batcher.counters.tokens_recomputed == 48, "it is the urgent one that gives way the second time"
    assert batcher.counters.preemptions == 2
