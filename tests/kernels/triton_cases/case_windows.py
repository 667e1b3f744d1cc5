"""What a sequence gives back once its window has passed may hold anything: kernels and a whole model read none of it,
and results are the same to the bit."""

from dataclasses import replace

import pytest
import torch
from tests.kernels.triton_cases.case_paged_decode import SMALL as SMALL_DECODE
from tests.kernels.triton_cases.case_paged_decode import decoded
from tests.kernels.triton_cases.case_paged_prefill import SMALL as SMALL_PREFILL
from tests.kernels.triton_cases.case_paged_prefill import prefilled
from tests.kernels.triton_cases.case_runner import CONFIG, GREEDY, LIMITS, NUM_PAGES, random_weights
from tests.kernels.triton_cases.support import COMPUTE_CAPABILITY, DEVICE, Cache, Heads, filled_cache, normal
from tests.unit.model.device_model import empty_pages, weights_on

from weir.engine.plan import ChunkPlan, SampleSpec, StepPlan, StepResult
from weir.kv.geometry import ATTENTION_BLOCK_TOKENS, first_page_read, num_pages_for
from weir.model.architecture import SlidingWindow
from weir.model.triton.runner import TritonRunner
from weir.ops.gpu.decode_work import decode_tiles
from weir.ops.gpu.paged_prefill import prefill_tiles
from weir.ops.head_dims import TRITON_HEAD_DIMS

DTYPES = [torch.float32, torch.bfloat16, torch.int8]
# first_page_read is 0, and just not any more; of windows within a block, and over several
EDGES = [
    (40, 167),
    (40, 168),
    (1, 128),
    (1, 129),
    *(
        pytest.param(*edge, marks=pytest.mark.long)
        for edge in ((40, 166), (160, 286), (160, 287), (160, 420), (300, 700))
    ),
]


def without_first_pages(cache: Cache, position: int, window: int) -> Cache:
    """All that is given back is NaN, and no table names it: these entries name a page that is NaN all over."""
    tables, pages = cache.block_tables.clone(), cache.pages.clone()
    num_given_back = first_page_read(position, window)
    pages[tables[0, :num_given_back].long()] = float("nan")
    tables[0, :num_given_back] = 0
    return Cache(pages, tables, cache.lengths)


@pytest.mark.parametrize("is_small", [True, False], ids=["small-tiles", "default-tiles"])
@pytest.mark.parametrize(("window", "length"), EDGES)
def test_decode_reads_no_page_that_is_given_back(window: int, length: int, is_small: bool) -> None:
    torch.manual_seed(length)
    heads = Heads(4, 2, 64, window)
    tiles = SMALL_DECODE if is_small else decode_tiles(heads.head_dim, torch.float32)
    cache = filled_cache(heads, [length], torch.float32)
    queries = normal(1, heads.num_heads, heads.head_dim)
    whole = decoded(queries, cache, heads, tiles)
    assert torch.equal(decoded(queries, without_first_pages(cache, length - 1, window), heads, tiles), whole)
    assert bool(whole.isfinite().all())


@pytest.mark.parametrize("num_queries", [1, 35])
@pytest.mark.parametrize("is_small", [True, False], ids=["small-tiles", "default-tiles"])
@pytest.mark.parametrize(("window", "length"), EDGES)
def test_a_chunk_reads_no_page_that_its_first_query_has_passed(
    window: int, length: int, is_small: bool, num_queries: int
) -> None:
    torch.manual_seed(length)
    heads = Heads(4, 2, 64, window)
    tiles = SMALL_PREFILL if is_small else None
    cache = filled_cache(heads, [length], torch.float32)
    queries = normal(num_queries, heads.num_heads, heads.head_dim)
    whole = prefilled(queries, cache, [num_queries], heads, tiles)
    rest = without_first_pages(cache, length - num_queries, window)
    assert torch.equal(prefilled(queries, rest, [num_queries], heads, tiles), whole)
    assert bool(whole.isfinite().all())


def test_a_page_that_is_still_seen_is_read() -> None:
    """The two above would pass for kernels that read nothing."""
    heads = Heads(4, 2, 64, 40)
    cache = filled_cache(heads, [300], torch.float32)
    queries = normal(1, heads.num_heads, heads.head_dim)
    cache.pages[cache.block_tables[0, (300 - 40) // 16].long()] = float("nan")
    assert not bool(decoded(queries, cache, heads, SMALL_DECODE).isfinite().any())
    assert not bool(prefilled(queries, cache, [1], heads, SMALL_PREFILL).isfinite().any())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", range(TRITON_HEAD_DIMS[0], TRITON_HEAD_DIMS[1] + 1, 8))
def test_blocks_of_every_shape_fit_into_those_that_are_given_back(head_dim: int, dtype: torch.dtype) -> None:
    """A block that began before one of them and ended in it would read what is given back."""
    sizes = {decode_tiles(head_dim, dtype).block_tokens}
    if dtype is not torch.int8:  # queries are not
        capabilities = (80, 90, 100, 120, COMPUTE_CAPABILITY)
        sizes |= {prefill_tiles(4, 2, head_dim, dtype, capability).block_tokens for capability in capabilities}
    assert all(ATTENTION_BLOCK_TOKENS % size == 0 for size in sizes), sizes


@pytest.mark.long
def test_a_model_with_windows_only_samples_the_same_over_pages_that_were_given_back() -> None:
    torch.manual_seed(4)
    window = 21
    config = replace(CONFIG, window=SlidingWindow(window, (True,) * CONFIG.num_layers))
    weights = weights_on(random_weights(config), DEVICE, torch.float32)
    found: list[list[dict[int, int]]] = []
    for gives_back in (False, True):
        pages = empty_pages(config, NUM_PAGES, DEVICE, torch.float32).fill_(float("nan"))
        runner = TritonRunner(config, weights, pages, LIMITS)
        table = tuple(torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(1)).tolist())
        tokens = [7 * index % 1024 for index in range(150)]
        sampled = []
        start = 0
        for length in (60, 60, 29, 1, *[1] * 8):
            if gives_back:
                pages[list(table[: first_page_read(start, window)])] = float("nan")
            result = step(runner, tokens, start, length, table)
            sampled.append(dict(result.token_ids))
            tokens += result.token_ids.values()
            start += length
        assert first_page_read(start, window) == 8
        found.append(sampled)
    assert found[0] == found[1]
    assert len({token_id for sampled in found[0] for token_id in sampled.values()}) > 3


def step(runner: TritonRunner, tokens: list[int], start: int, length: int, table: tuple[int, ...]) -> StepResult:
    end = start + length
    sample = SampleSpec(GREEDY, max(0, start - 149)) if end == len(tokens) else None
    chunk = ChunkPlan(0, start, tuple(tokens[start:end]), table[: num_pages_for(end)], sample)
    return runner.run(StepPlan(0, (chunk,)))
