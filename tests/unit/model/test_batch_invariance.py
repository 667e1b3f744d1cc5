"""P1 on the int8 path: a sequence's logits have the same bits whatever else its steps computed, and however they were
cut up: batch, chunks, slices, threads, a prefix that another sequence computed, pages that were copied elsewhere."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.model.architectures import VARIANTS, save_variant
from tests.unit.model.int8 import Int8Probe, Logits
from tests.unit.model.tiny import TinyLlama, chunk, poisoned_pages, prompt_ids

from weir.core.sampling import SamplingParams
from weir.engine.plan import ChunkPlan, SampleSpec, StepPlan
from weir.kv.geometry import PAGE_TOKENS, num_pages_for
from weir.model.cpu.core_share import FixedShare
from weir.model.errors import ModelNotFound
from weir.model.files.catalog import SMOLLM2_135M
from weir.model.files.source import ModelSource, resolve_model
from weir.model.load import Runner, load_model

pytestmark = pytest.mark.timeout(600)  # whoever comes first compiles

NUM_PAGES = 600
LENGTH = 170  # attention merges two blocks of context


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def alone(tiny: TinyLlama, cache_dir: Path) -> Logits:
    """Logits after each position of the prompt [positions, vocabulary]: one token a step, one thread, nobody else."""
    probe = Int8Probe(tiny.source, cache_dir)
    ids = prompt_ids(LENGTH, seed=1)
    return np.stack([probe.run(chunk(0, ids, at, at + 1, tuple(range(11))))[0] for at in range(LENGTH)])


class Neighbour:
    """Another sequence, which goes on by some tokens in each step."""

    def __init__(self, slot: int, page_ids: Sequence[int], seed: int) -> None:
        self._slot = slot
        self._table = tuple(page_ids)
        self._ids = prompt_ids(len(page_ids) * PAGE_TOKENS, seed)
        self._at = 0

    def next_chunk(self, num_tokens: int) -> ChunkPlan:
        if self._at == len(self._ids):
            self._at = 0  # it starts again, over its own pages
        start, self._at = self._at, min(self._at + num_tokens, len(self._ids))
        return chunk(self._slot, self._ids, start, self._at, self._table)


def assert_same_bits(found: Logits, expected: Logits) -> None:
    assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_neither_neighbours_nor_chunks_nor_slices_nor_threads_change_a_bit(
    data: st.DataObject, tiny: TinyLlama, cache_dir: Path, alone: Logits
) -> None:
    num_threads = data.draw(st.sampled_from([1, 2]), label="threads")
    slice_rows = data.draw(st.sampled_from([5, 16, 33, 128]), label="rows of a slice")
    num_neighbours = data.draw(st.sampled_from([0, 1, 6, 31]), label="neighbours")
    seed = data.draw(st.integers(0, 2**32 - 1), label="seed")
    random = np.random.default_rng(seed)
    probe = Int8Probe(tiny.source, cache_dir, num_pages=NUM_PAGES, share=FixedShare(num_threads), slice_rows=slice_rows)
    free = random.permutation(NUM_PAGES).tolist()
    table = tuple(free.pop() for _ in range(num_pages_for(LENGTH)))
    neighbours = [
        Neighbour(slot, [free.pop() for _ in range(random.integers(1, 14))], seed + slot)
        for slot in range(1, num_neighbours + 1)
    ]
    ids = prompt_ids(LENGTH, seed=1)
    cuts = data.draw(st.sets(st.integers(1, LENGTH - 1), max_size=8), label="cuts")
    start = 0
    for end in [*sorted(cuts), LENGTH]:
        chunks = [neighbour.next_chunk(int(random.integers(1, 40))) for neighbour in neighbours]
        chunks.insert(int(random.integers(0, len(chunks) + 1)), chunk(0, ids, start, end, table))
        assert_same_bits(probe.run(*chunks)[0], alone[end - 1])
        start = end


@pytest.mark.parametrize(("name", "length"), [("qwen3", 40), ("gemma2", 190), ("gemma3", 190)])
def test_what_architectures_add_to_llama_does_not_depend_on_what_else_is_computed(
    name: str, length: int, tmp_path: Path, cache_dir: Path
) -> None:
    variant = next(variant for variant in VARIANTS if variant.name == name)
    source, ids, table = save_variant(tmp_path, variant).source, prompt_ids(length, seed=1), tuple(range(12))
    probe = Int8Probe(source, cache_dir)
    alone = [probe.run(chunk(0, ids, at, at + 1, table))[0] for at in range(length)]
    neighbours = [Neighbour(slot, range(10 * slot + 4, 10 * slot + 8), slot) for slot in range(1, 6)]
    probe = Int8Probe(source, cache_dir, share=FixedShare(2), slice_rows=16)
    for start, end in ((0, 1), (1, length - 10), (length - 10, length - 1), (length - 1, length)):
        found = probe.run(*(neighbour.next_chunk(9) for neighbour in neighbours), chunk(0, ids, start, end, table))
        assert_same_bits(found[0], alone[end - 1])


@settings(max_examples=20, deadline=None)
@given(shared=st.integers(1, (LENGTH - 1) // PAGE_TOKENS), cut=st.integers(1, 40), seed=st.integers(0, 2**32 - 1))
def test_pages_that_another_sequence_computed_serve_as_ones_own(
    shared: int, cut: int, seed: int, tiny: TinyLlama, cache_dir: Path, alone: Logits
) -> None:
    probe = Int8Probe(tiny.source, cache_dir)
    free = np.random.default_rng(seed).permutation(64).tolist()
    ids = prompt_ids(LENGTH, seed=1)
    first = tuple(free.pop() for _ in range(num_pages_for(LENGTH)))
    other_end = [*ids[: shared * PAGE_TOKENS], *prompt_ids(30, seed=2)][:LENGTH]
    for start in range(0, len(other_end), cut):
        probe.run(chunk(7, other_end, start, min(start + cut, len(other_end)), first))
    table = (*first[:shared], *(free.pop() for _ in range(num_pages_for(LENGTH) - shared)))
    found = probe.run(chunk(0, ids, shared * PAGE_TOKENS, LENGTH, table))[0]
    assert_same_bits(found, alone[-1])


@settings(max_examples=20, deadline=None)
@given(pause=st.integers(1, LENGTH - 1), seed=st.integers(0, 2**32 - 1))
def test_a_sequence_goes_on_from_copies_of_its_pages_as_if_nothing_had_happened(
    pause: int, seed: int, tiny: TinyLlama, cache_dir: Path, alone: Logits
) -> None:
    before, after = (Int8Probe(tiny.source, cache_dir) for _ in range(2))
    ids = prompt_ids(LENGTH, seed=1)
    free = np.random.default_rng(seed).permutation(64).tolist()
    old, new = (tuple(free.pop() for _ in range(num_pages_for(LENGTH))) for _ in range(2))
    before.run(chunk(3, ids, 0, pause, old))
    after.pages[list(new)] = before.pages[list(old)]
    before.pages[:] = 0xFF
    assert_same_bits(after.run(chunk(0, ids, pause, LENGTH, new))[0], alone[-1])


def continue_in_batch(
    runner: Runner, prompts: Sequence[Sequence[int]], params: SamplingParams, num_tokens: int, chunk_tokens: int
) -> list[list[int]]:
    """All prompts together, one page table each; outputs of `num_tokens` tokens."""
    num_pages = max(num_pages_for(len(prompt) + num_tokens) for prompt in prompts)
    known = [list(prompt) for prompt in prompts]
    computed = [0] * len(prompts)
    while any(len(ids) < len(prompt) + num_tokens for ids, prompt in zip(known, prompts, strict=True)):
        chunks = []
        for slot, (ids, prompt) in enumerate(zip(known, prompts, strict=True)):
            if len(ids) == len(prompt) + num_tokens:
                continue
            end = min(computed[slot] + chunk_tokens, len(ids))
            sample = SampleSpec(params, len(ids) - len(prompt)) if end == len(ids) else None
            table = tuple(range(slot * num_pages, (slot + 1) * num_pages))
            chunks.append(ChunkPlan(slot, computed[slot], tuple(ids[computed[slot] : end]), table, sample))
            computed[slot] = end
        for slot, token_id in runner.run(StepPlan(0, tuple(chunks))).token_ids.items():
            known[slot].append(token_id)
    return [ids[len(prompt) :] for ids, prompt in zip(known, prompts, strict=True)]


SEEDED = SamplingParams(temperature=0.9, top_k=50, top_p=0.9, seed=2**63 + 7)
GREEDY = SamplingParams(temperature=0.0)


def check_tokens(source: ModelSource, cache_dir: Path, prompts: list[list[int]], num_tokens: int) -> None:
    """The first prompt's tokens: alone, and with the others in batches of 2, 7 and 32, in chunks of several sizes."""
    weights = load_model(source, "int8", FixedShare(2), cache_dir)
    num_pages = 32 * num_pages_for(max(len(prompt) for prompt in prompts) + num_tokens)
    runner = weights.runner_over(poisoned_pages(num_pages, weights.page_geometry.page_bytes))
    for params in (GREEDY, SEEDED):
        (expected,) = continue_in_batch(runner, prompts[:1], params, num_tokens, 1)
        for batch_size, chunk_tokens in ((1, 512), (2, 16), (7, 7), (32, 64)):
            found = continue_in_batch(runner, prompts[:batch_size], params, num_tokens, chunk_tokens)
            assert found[0] == expected, f"batch of {batch_size}, chunks of {chunk_tokens}, {params}"


def test_greedy_and_seeded_tokens_are_those_of_the_sequence_alone(tiny: TinyLlama, cache_dir: Path) -> None:
    prompts = [prompt_ids(40 + 5 * (number % 7), seed=number) for number in range(32)]
    check_tokens(tiny.source, cache_dir, prompts, num_tokens=20)


@pytest.mark.golden
def test_tokens_of_the_built_in_model_are_those_of_the_sequence_alone(cache_dir: Path) -> None:
    try:
        source = resolve_model(SMOLLM2_135M.name)
    except ModelNotFound as error:
        pytest.skip(str(error))
    random = np.random.default_rng(5)
    prompts = [random.integers(0, 49152, random.integers(20, 200)).tolist() for _ in range(32)]
    check_tokens(source, cache_dir, prompts, num_tokens=24)
