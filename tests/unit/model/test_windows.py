"""A model whose layers all have a window, over pages that are NaN once they are given back: through both engines, and
through preemption, the same tokens and log-probabilities to the bit as if all pages were kept."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.engine.pressure import PressedEngine, Pressure, Prompt
from tests.unit.engine.world import Outcome, Request, Schedule, World
from tests.unit.model.architectures import MISTRAL, Variant, save_variant
from tests.unit.model.tiny import VOCAB_SIZE, TinyLlama, poisoned_pages, prompt_ids

from weir.core.errors import InternalError
from weir.core.sampling import SamplingParams
from weir.engine.batching.batcher import BatchLimits
from weir.engine.batching.own_rules import JoinSettings
from weir.engine.memory.preemption import PreemptionSettings
from weir.engine.plan import ChunkPlan, SampleSpec, StepPlan, StepResult
from weir.kv.geometry import ATTENTION_BLOCK_TOKENS, first_page_read, num_pages_for
from weir.model.cpu.core_share import FixedShare
from weir.model.files.config import load_model_config
from weir.model.load import load_model
from weir.model.precision import page_geometry
from weir.model.torch.batch import build_batch
from weir.model.torch.paged_kv import PagedKv

pytestmark = pytest.mark.timeout(600)  # whoever comes first compiles

WINDOW, CONTEXT_TOKENS, NUM_PAGES = 160, 1280, 200
CHUNK_TOKENS = 100
NUM_PROMPT_TOKENS, NUM_TOKENS = (1003, 330, 129), 140
MOST_PAGES = num_pages_for(WINDOW + ATTENTION_BLOCK_TOKENS + CHUNK_TOKENS) + 1


class PoisoningRunner:
    """A model over pages of its own; what is given away is NaN."""

    def __init__(self, tiny: TinyLlama, precision: str, cache_dir: Path) -> None:
        weights = load_model(tiny.source, precision, FixedShare(1), cache_dir)  # type: ignore[arg-type]
        self.pages = poisoned_pages(NUM_PAGES, weights.page_geometry.page_bytes)
        self._runner = weights.runner_over(self.pages)

    def run(self, plan: StepPlan) -> StepResult:
        return self._runner.run(plan)

    def spoil(self, page_ids: tuple[int, ...]) -> None:
        self.pages[list(page_ids)] = 0xFF


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyLlama:
    changes = {"sliding_window": WINDOW, "max_position_embeddings": CONTEXT_TOKENS, "head_dim": 32}
    return save_variant(tmp_path_factory.mktemp("mistral"), Variant("mistral", MISTRAL, changes))


@pytest.fixture(params=["fp32", "int8"])
def make_runner(request: pytest.FixtureRequest, tiny: TinyLlama, tmp_path: Path) -> Any:
    return lambda: PoisoningRunner(tiny, request.param, tmp_path)


def limits(window: int | None, **changes: int) -> BatchLimits:
    values = {"max_num_seqs": 4, "max_num_batched_tokens": 256, "chunk_tokens": CHUNK_TOKENS} | changes
    return BatchLimits(
        **values, max_context_tokens=CONTEXT_TOKENS, vocab_size=VOCAB_SIZE, max_stall_s=1e6, window=window
    )


def through_both_engines(runner: PoisoningRunner, window: int | None) -> tuple[list[Outcome], World, int]:
    """Outcomes, and the most pages that the longest held in the decode engine."""
    requests = tuple(
        Request(
            tuple(prompt_ids(length, seed=length)),
            NUM_TOKENS,
            (),
            seed=length,
            arrives_at=0,
            cancelled_at=None,
            num_reserved_pages=num_pages_for(length + NUM_TOKENS),
            sampling=SamplingParams(temperature=0.7, top_p=0.95, logprobs=3),
        )
        for length in NUM_PROMPT_TOKENS
    )
    schedule = Schedule(requests, NUM_PAGES, 6, limits(window), limits(window), watermark_pages=2, seed=14)
    world: Any = World(schedule)
    world.prefill_runner = world.decode_runner = world._decode_core._runner = runner
    held = [0]
    check = world._check

    def look(batcher: Any) -> None:
        check(batcher)
        held.extend(len(s.held_pages) for b in (world.prefill, world.decode) for s in b._sequences.values())

    world._check = look
    world.run()
    return [outcome for _, outcome in sorted(world.outcomes.items())], world, max(held)


def test_through_prefill_hand_off_and_decode(make_runner: Any) -> None:
    kept, _, most_kept = through_both_engines(make_runner(), None)
    given_back, world, most = through_both_engines(make_runner(), WINDOW)
    assert [len(outcome.token_ids) for outcome in kept] == [NUM_TOKENS] * 3
    assert given_back == kept
    assert most_kept == num_pages_for(NUM_PROMPT_TOKENS[0] + NUM_TOKENS - 1)
    assert most <= MOST_PAGES
    assert world.prefill.counters.pages_behind_window > 0
    assert world.decode.counters.pages_behind_window > 0
    assert world.free_pages == set(range(NUM_PAGES))


@pytest.mark.parametrize("num_swap_slots", [600, 0], ids=["swapped", "dropped"])
def test_through_preemption_of_sequences_that_have_given_pages_back(make_runner: Any, num_swap_slots: int) -> None:
    """Prompts computed and decoded by one engine, in pages for half of what they want at a time."""
    made = tuple(
        Prompt(tuple(prompt_ids(length, seed=length)), 300, 0, 0, None, seed=length, prefix_seed=b"")
        for length in (300, 310, 320, 330)
    )
    preemption = PreemptionSettings(after_s=0.0, max_preemptions=1000, num_swap_slots=num_swap_slots)
    outcomes = []
    for window, num_pages in ((None, NUM_PAGES), (WINDOW, 44)):
        pressure = Pressure(made, num_pages, limits(window), JoinSettings(), preemption)
        engine: Any = PressedEngine(pressure)
        engine.runner = make_runner()
        engine.swap_file = engine._make_swap_file()
        late = watch_preemptions(engine)
        engine.run(max_ticks=20_000)
        outcomes.append([engine.outcomes[engine.key_of(index)].token_ids for index in range(4)])
        assert engine.batcher.counters.finished == 4
        assert engine.free_pages == set(range(num_pages))
        assert bool(late) == (window is not None)
        assert bool(engine.batcher.counters.pages_swapped_in) == bool(late and num_swap_slots)
    assert outcomes[0] == outcomes[1]


def watch_preemptions(engine: Any) -> list[int]:
    """The first page of each that is preempted without its first ones."""
    late: list[int] = []
    plan_out = engine.batcher._preemption._plan_out

    def note(sequence: Any) -> None:
        if sequence.first_page:
            late.append(sequence.first_page)
        plan_out(sequence)

    engine.batcher._preemption._plan_out = note
    return late


def test_no_page_is_read_that_is_given_back(make_runner: Any) -> None:
    """Nor does what is in them matter; of the first that is still seen it does."""
    runner, first_page = make_runner(), first_page_read(700, WINDOW)
    found = [decode_after(runner, num_spoiled) for num_spoiled in (0, first_page)]
    assert found[0] == found[1]
    assert first_page == 32
    with pytest.raises(InternalError, match="NaN"):
        decode_after(runner, num_spoiled=num_pages_for(701 - WINDOW) + 1)


def test_sequences_that_read_about_as_many_pages_attend_together_however_long_they_are(tiny: TinyLlama) -> None:
    """Sorted by length they alternate: a window is read from the beginning of a block on, so 8 pages come and go."""
    config = load_model_config(tiny.source)
    lengths = [140, 280, 290, 410, 420, 540]
    plan = StepPlan(1, tuple(chunk_at(slot, length) for slot, length in enumerate(lengths)))
    geometry = page_geometry(config, "fp32")
    kv = PagedKv(geometry, poisoned_pages(NUM_PAGES, geometry.page_bytes))
    batch = build_batch(plan, kv, config)
    num_read = [num_pages_for(length) - first_page_read(length - 1, WINDOW) for length in lengths]
    assert num_read == [9, 18, 11, 18, 11, 18]
    assert [group.last - group.first for group in batch.decode_groups] == [3, 3]
    assert batch.decode_groups[-1].last == len(lengths)


def chunk_at(slot: int, length: int) -> ChunkPlan:
    """Its last token."""
    greedy = SampleSpec(SamplingParams(temperature=0.0), 1)
    return ChunkPlan(slot, length - 1, (1,), tuple(range(num_pages_for(length))), greedy)


def decode_after(runner: PoisoningRunner, num_spoiled: int) -> list[StepResult]:
    """Of position 700 alone, and as the last one of a chunk, once so many first pages are NaN."""
    ids, table = tuple(prompt_ids(701, seed=1)), tuple(range(5, 5 + num_pages_for(701)))
    greedy = SampleSpec(SamplingParams(temperature=0.0, logprobs=5), 1)
    runner.run(StepPlan(1, (ChunkPlan(0, 0, ids, table, None),)))
    runner.spoil(table[:num_spoiled])
    starts = (700, 690)
    results = [runner.run(StepPlan(2, (ChunkPlan(0, start, ids[start:], table, greedy),))) for start in starts]
    return [replace(result, mean_others=0.0) for result in results]
