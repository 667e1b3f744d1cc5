"""The paged, chunked, batched forward pass is the one that transformers does in one go."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.model.tiny import GREEDY, LogitsProbe, TinyLlama, chunk, poisoned_pages, prompt_ids

from weir.core.errors import InternalError
from weir.engine.plan import ChunkPlan, StepPlan
from weir.kv.geometry import PAGE_TOKENS, num_pages_for
from weir.model.files.config import load_model_config
from weir.model.torch.runner import TorchRunner
from weir.model.torch.weights import load_weights

TOLERANCE = 1e-4


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 100])
def test_one_chunk_gives_the_logits_of_transformers(length: int, tiny: TinyLlama) -> None:
    ids = prompt_ids(length, seed=length)
    found = LogitsProbe(tiny.source).run(chunk(3, ids, 0, length, tuple(range(40, 50))))
    assert_close(found[3], tiny.logits(ids)[-1])


@settings(max_examples=25, deadline=None)
@given(cuts=st.sets(st.integers(1, 69), max_size=8))
def test_any_cut_into_chunks_gives_the_same_logits(cuts: set[int], tiny: TinyLlama) -> None:
    ids = prompt_ids(70, seed=1)
    expected = tiny.logits(ids)
    probe = LogitsProbe(tiny.source)
    start = 0
    for end in [*sorted(cuts), len(ids)]:
        found = probe.run(chunk(0, ids, start, end, (9, 2, 31, 4, 17)))
        assert_close(found[0], expected[end - 1])
        start = end


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=9),
    fresh=st.lists(st.integers(1, 40), min_size=9, max_size=9),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_mix_of_decodes_and_prefills_in_one_step_leaves_each_sequence_alone(
    lengths: list[int], fresh: list[int], seed: int, tiny: TinyLlama
) -> None:
    probe = LogitsProbe(tiny.source)
    free = torch.randperm(64, generator=torch.Generator().manual_seed(seed)).tolist()
    step: list[ChunkPlan] = []
    expected = {}
    for slot, (length, num_fresh) in enumerate(zip(lengths, fresh, strict=False)):
        ids = prompt_ids(length, seed=seed + slot)
        table = tuple(free.pop() for _ in range(num_pages_for(length)))
        start = max(0, length - num_fresh)
        if start:
            probe.run(chunk(slot, ids, 0, start, table))
        step.append(chunk(slot, ids, start, length, table))
        expected[slot] = tiny.logits(ids)[-1]
    found = probe.run(*step)
    for slot, logits in expected.items():
        assert_close(found[slot], logits)


def test_what_lies_behind_a_sequences_end_in_its_last_page_never_matters(tiny: TinyLlama) -> None:
    ids = prompt_ids(21, seed=4)
    clean, dirty = LogitsProbe(tiny.source), LogitsProbe(tiny.source)
    clean.pages[:] = 0
    logits = []
    for probe in (clean, dirty):
        probe.run(chunk(0, ids, 0, 20, (5, 6)))
        logits.append(probe.run(chunk(0, ids, 20, 21, (5, 6)))[0])
    assert torch.equal(logits[0], logits[1])


def keys_and_values(probe: LogitsProbe) -> torch.Tensor:
    """The pages as [pages, layers, 2, kv heads, tokens, head_dim], from the layout that the page geometry names."""
    config = probe.config
    shape = (64, config.num_layers, 2, config.num_kv_heads)
    pages = torch.from_numpy(probe.pages).view(torch.float32)
    keys = pages.view(*shape, config.head_dim, PAGE_TOKENS)[:, :, 0].transpose(-1, -2)
    return torch.stack([keys, pages.view(*shape, PAGE_TOKENS, config.head_dim)[:, :, 1]], dim=2)


def test_a_step_writes_its_own_positions_and_nothing_else(tiny: TinyLlama) -> None:
    probe = LogitsProbe(tiny.source)
    ids = prompt_ids(30, seed=5)
    probe.run(chunk(0, ids, 0, 18, (7, 3)))
    pages = keys_and_values(probe)
    written = ~torch.isnan(pages).any(dim=-1)
    expected = torch.zeros_like(written)
    expected[7] = True
    expected[3, :, :, :, :2] = True
    assert torch.equal(written, expected)


def test_pages_hold_what_the_page_geometry_says(tiny: TinyLlama) -> None:
    probe = LogitsProbe(tiny.source)
    ids = prompt_ids(18, seed=6)
    probe.run(chunk(0, ids, 0, 18, (7, 3)))
    with torch.inference_mode():
        cache = tiny.model(torch.tensor([ids]), use_cache=True).past_key_values
    pages = keys_and_values(probe)
    for layer in range(probe.config.num_layers):
        for kind, reference in enumerate((cache.layers[layer].keys[0], cache.layers[layer].values[0])):
            assert_close(pages[7, layer, kind], reference[:, :16])
            assert_close(pages[3, layer, kind, :, :2], reference[:, 16:])


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (ChunkPlan(4, 0, (1, 2), (64,), GREEDY), "64 pages"),
        (ChunkPlan(4, 0, (1, 2), (-1,), GREEDY), "block table"),
        (ChunkPlan(4, 15, (1, 2), (3,), GREEDY), "1 pages for 17 positions"),
        (ChunkPlan(4, 0, (1, 160), (3,), GREEDY), "vocabulary of 160"),
        (ChunkPlan(4, 0, (-1,), (3,), GREEDY), "vocabulary"),
        (ChunkPlan(4, 0, (), (3,), GREEDY), "0 tokens"),
        (ChunkPlan(4, 256, (1,), tuple(range(17)), GREEDY), "context is 256"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused_before_anything_is_written(
    bad: ChunkPlan, problem: str, tiny: TinyLlama
) -> None:
    probe = LogitsProbe(tiny.source)
    good = ChunkPlan(1, 0, (1, 2, 3), (0,), GREEDY)
    with pytest.raises(InternalError, match=f"slot 4.*{problem}"):
        probe.run(good, bad)
    assert (probe.pages == 0xFF).all()


def test_a_slot_with_two_chunks_is_refused(tiny: TinyLlama) -> None:
    with pytest.raises(InternalError, match="two chunks"):
        LogitsProbe(tiny.source).run(ChunkPlan(1, 0, (1,), (0,), None), ChunkPlan(1, 1, (1,), (0,), GREEDY))


def make_runner(tiny: TinyLlama, *, spoil: bool = False) -> TorchRunner:
    config = load_model_config(tiny.source)
    weights = load_weights(tiny.source, config)
    if spoil:
        weights.layers[1].down[3, 3] = float("nan")
    return TorchRunner(config, weights, poisoned_pages(64, config.page_geometry.page_bytes))


def test_the_runner_samples_for_sampling_chunks_only(tiny: TinyLlama) -> None:
    ids = prompt_ids(20, seed=8)
    runner = make_runner(tiny)
    silent = ChunkPlan(5, 0, (1, 2, 3), (9,), None)
    result = runner.run(StepPlan(0, (silent, chunk(2, ids, 0, 20, (0, 1)))))
    assert dict(result.token_ids) == {2: int(tiny.logits(ids)[-1].argmax())}
    assert dict(runner.run(StepPlan(1, (ChunkPlan(5, 3, (4,), (9,), None),))).token_ids) == {}
    assert dict(runner.run(StepPlan(2, ())).token_ids) == {}


def test_logits_that_are_not_numbers_are_an_error_and_never_a_token(tiny: TinyLlama) -> None:
    runner = make_runner(tiny, spoil=True)
    with pytest.raises(InternalError, match="NaN or infinite logits in 1 of 1 rows"):
        runner.run(StepPlan(0, (ChunkPlan(0, 0, (1, 2, 3), (0,), GREEDY),)))


def test_warming_up_touches_no_page(tiny: TinyLlama) -> None:
    config = load_model_config(tiny.source)
    pages = poisoned_pages(3, config.page_geometry.page_bytes)
    TorchRunner(config, load_weights(tiny.source, config), pages).warm_up()
    assert (pages == 0xFF).all()


def test_pages_of_another_geometry_are_refused(tiny: TinyLlama) -> None:
    config = load_model_config(tiny.source)
    with pytest.raises(ValueError, match="expected"):
        TorchRunner(config, load_weights(tiny.source, config), poisoned_pages(3, 4096))
