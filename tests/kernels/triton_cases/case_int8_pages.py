"""Keys and values in int8: what is written, and what attention makes of it."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.kernels.triton_cases import case_paged_decode as decode
from tests.kernels.triton_cases import case_runner as whole
from tests.kernels.triton_cases.case_rotary_kv_write import random_norms, tables
from tests.kernels.triton_cases.support import (
    COMPUTE_CAPABILITY,
    DEVICE,
    DOT_TOLERANCES,
    TOLERANCES,
    Cache,
    Heads,
    filled_cache,
    ints,
    normal,
    poisoned,
)
from tests.unit.model.device_model import weights_on

from benchmarks.quality.formats import Format, int8_heads, log_probabilities
from weir.engine.plan import ChunkPlan, ScoreSpec, StepPlan
from weir.kv.geometry import num_pages_for
from weir.model.files.dummy import shape_named
from weir.model.precision import page_geometry
from weir.model.torch.weights import Weights
from weir.model.triton.memory import DevicePages, LayerPages, layer_pages, page_shape
from weir.model.triton.runner import TritonRunner
from weir.ops import reference, reference_quantized
from weir.ops.gpu.attention import DeviceScoring
from weir.ops.gpu.decode_work import decode_work
from weir.ops.gpu.paged_decode import paged_decode
from weir.ops.gpu.paged_prefill import paged_prefill, prefill_tiles, tiles_of
from weir.ops.gpu.rotary_kv_write import rotary_kv_write

Bytes = npt.NDArray[np.uint8]

SHAPES = [
    pytest.param(Heads(9, 3, 64), id="9on3x64"),
    pytest.param(Heads(16, 4, 128), id="16on4x128", marks=pytest.mark.long),
    pytest.param(Heads(4, 4, 80), id="4on4x80", marks=pytest.mark.long),
]


def empty_int8(heads: Heads, num_pages: int) -> LayerPages:
    """Layer 1 of two; all scales are NaN."""
    config = replace(
        shape_named("tiny"), num_heads=heads.num_heads, num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim
    )
    pages = torch.zeros(page_shape(config, num_pages, torch.int8), dtype=torch.int8, device=DEVICE)
    layers = layer_pages(pages, config)
    for layer in layers:
        assert layer.scales is not None
        layer.scales.keys.fill_(float("nan"))
        layer.scales.values.fill_(float("nan"))
    return layers[1]


def quantized(cache: Cache, heads: Heads) -> tuple[LayerPages, Cache]:
    """What int8 pages hold of a cache in fp32, and that in fp32 again."""
    pages, widened = empty_int8(heads, len(cache.pages)), cache.pages.clone()
    assert pages.scales is not None
    for place, (numbers, scales) in enumerate(((pages.keys, pages.scales.keys), (pages.values, pages.scales.values))):
        values, head_scales = reference_quantized.quantize_heads(cache.pages[:, 1, place].nan_to_num())
        is_written = ~cache.pages[:, 1, place, ..., 0].isnan()
        numbers.copy_(values)
        scales.copy_(torch.where(is_written, head_scales, float("nan")))
        widened[:, 1, place] = reference_quantized.widened(numbers, scales)
    return pages, replace(cache, pages=widened)


@pytest.mark.parametrize(("dtype", "atol", "rtol"), TOLERANCES)
@pytest.mark.parametrize("heads", [*SHAPES, pytest.param(Heads(6, 6, 32), id="6on6x32")])
@pytest.mark.parametrize("has_norms", [False, True], ids=["", "norms"])
def test_what_is_written_is_that_of_the_reference_and_nothing_else_is(
    heads: Heads, dtype: torch.dtype, atol: float, rtol: float, has_norms: bool
) -> None:
    torch.manual_seed(42)
    cos, sin = tables(heads.head_dim)
    positions, slot_mapping = ints([0, 15, 16, 500, 63]), ints([16, 31, 70, 5, -1])
    rows = normal(5, heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim, dtype=dtype)
    rows[1, heads.num_heads] = 0.0
    expected_rows = rows.clone()
    found, expected = empty_int8(heads, 6), empty_int8(heads, 6)
    assert found.scales is not None
    assert expected.scales is not None
    norms = random_norms(heads.head_dim, dtype) if has_norms else None
    rotary_kv_write(rows, cos, sin, positions, slot_mapping, found.keys, found.values, found.scales, norms)
    reference_quantized.rotary_kv_write(
        expected_rows, cos, sin, positions, slot_mapping, expected.keys, expected.values, expected.scales, norms
    )
    torch.testing.assert_close(rows, expected_rows, atol=atol, rtol=rtol)
    for name in ("keys", "values"):
        scales, expected_scales = getattr(found.scales, name), getattr(expected.scales, name)
        torch.testing.assert_close(scales, expected_scales, atol=0, rtol=1e-5, equal_nan=True)
        difference = (getattr(found, name).int() - getattr(expected, name).int()).abs()
        assert int(difference.max()) <= 1
        assert float((difference > 0).float().mean()) < 0.001, "only what lies between two numbers may be either"


@pytest.mark.parametrize(("dtype", "atol", "rtol"), DOT_TOLERANCES)
@pytest.mark.parametrize("heads", SHAPES)
def test_decodes_attend_to_what_the_pages_hold(heads: Heads, dtype: torch.dtype, atol: float, rtol: float) -> None:
    torch.manual_seed(43)
    pages, widened = quantized(filled_cache(heads, decode.ODD_LENGTHS, torch.float32), heads)
    num_rows = len(decode.ODD_LENGTHS)
    queries = normal(num_rows, heads.num_heads, heads.head_dim, dtype=dtype)
    scratch = decode.scratch_of(num_rows, heads, decode.SMALL)
    out = poisoned(*queries.shape, dtype=dtype)
    work = decode_work(widened.block_tables, widened.lengths, decode.SMALL)
    paged_decode(queries, pages.keys, pages.values, work, heads.scoring, out, scratch, decode.SMALL, pages.scales)
    expected = reference.paged_decode(
        queries, widened.keys, widened.values, widened.block_tables, widened.lengths, *heads.bounds
    )
    torch.testing.assert_close(out, expected, atol=2 * atol, rtol=2 * rtol)


@pytest.mark.parametrize(("dtype", "atol", "rtol"), DOT_TOLERANCES)
@pytest.mark.parametrize("heads", SHAPES)
def test_prompts_attend_to_what_the_pages_hold(heads: Heads, dtype: torch.dtype, atol: float, rtol: float) -> None:
    torch.manual_seed(44)
    lengths, chunk_lengths = [70, 5, 130], [33, 5, 1]
    pages, widened = quantized(filled_cache(heads, lengths, torch.float32), heads)
    queries = normal(sum(chunk_lengths), heads.num_heads, heads.head_dim, dtype=dtype)
    tiles = prefill_tiles(heads.num_heads, heads.num_kv_heads, heads.head_dim, dtype, COMPUTE_CAPABILITY)
    first_rows = ints([0, 33, 38, 39])
    tile_list = ints(tiles_of(chunk_lengths, lengths, tiles.queries_per_tile(heads.num_heads, heads.num_kv_heads)))
    out = poisoned(*queries.shape, dtype=dtype)
    index = (widened.block_tables, first_rows, widened.lengths)
    paged_prefill(queries, pages.keys, pages.values, *index, tile_list, heads.scoring, out, tiles, pages.scales)
    expected = reference.paged_prefill(queries, widened.keys, widened.values, *index, *heads.bounds)
    torch.testing.assert_close(out, expected, atol=2 * atol, rtol=2 * rtol)


def test_misfits_are_named() -> None:
    heads = Heads(9, 3, 64)
    cache = filled_cache(heads, [40], torch.float32)
    pages, _ = quantized(cache, heads)
    scratch, queries = decode.scratch_of(1, heads, decode.SMALL), normal(1, 9, 64)
    work, out = decode_work(cache.block_tables, cache.lengths, decode.SMALL), poisoned(1, 9, 64)
    with pytest.raises(ValueError, match="keys are int8, which needs scales"):
        paged_decode(queries, pages.keys, pages.values, work, DeviceScoring(0.1), out, scratch, decode.SMALL)
    with pytest.raises(ValueError, match=r"keys is torch\.float32, expected torch\.int8"):
        paged_decode(
            queries, cache.keys, cache.values, work, DeviceScoring(0.1), out, scratch, decode.SMALL, pages.scales
        )


@pytest.fixture(scope="module")
def weights() -> Weights:
    torch.manual_seed(0)
    return whole.random_weights(whole.CONFIG)


def int8_runner(weights: Weights) -> tuple[TritonRunner, torch.Tensor]:
    """Over pages whose scales are NaN until they are written."""
    shape = page_shape(whole.CONFIG, whole.NUM_PAGES, torch.int8)
    pages = torch.full(shape, -1, dtype=torch.int8, device=DEVICE)
    on_device = weights_on(weights, DEVICE, torch.float32)
    return TritonRunner(whole.CONFIG, on_device, pages, whole.LIMITS), pages


def test_a_page_has_the_size_that_the_arena_gives_it() -> None:
    num_pages, page_bytes = page_shape(whole.CONFIG, 3, torch.int8)
    assert (num_pages, page_bytes) == (3, page_geometry(whole.CONFIG, "fp8-kv8").page_bytes)
    assert page_bytes % 16 == 0, "pages begin where vectors may"


def test_prompts_are_scored_as_the_same_rounding_in_pytorch_scores_them(weights: Weights) -> None:
    prompt = tuple(whole.PROMPTS[0])
    chunk = ChunkPlan(0, 0, prompt, tuple(range(num_pages_for(len(prompt)))), None, ScoreSpec(prompt[1:], num_top=1))
    scored = int8_runner(weights)[0].run(StepPlan(0, (chunk,))).prompt_logprobs[0]
    found = torch.tensor([score.logprob for score in scored])

    def by_torch(used: Format) -> torch.Tensor:
        scores = log_probabilities(whole.CONFIG, weights, torch.tensor(prompt), used)[:-1]
        return scores.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]

    expected, unrounded = by_torch(Format(keys=int8_heads, values=int8_heads)), by_torch(Format())
    error, cost = (found - expected).abs().mean(), (unrounded - expected).abs().mean()
    assert error < cost / 4, "what another order of additions changes is less than what rounding to int8 does"


@pytest.mark.long
def test_decodes_over_int8_pages_say_what_those_over_exact_ones_do(weights: Weights) -> None:
    """By a wide margin of these weights; a page that is moved takes its scales with it."""
    runner, pages = int8_runner(weights)
    exact = whole.Conversation(whole.triton_runner(weights), whole.PROMPTS)
    found = whole.Conversation(runner, whole.PROMPTS)
    params = [whole.GREEDY] * 3
    for number, lengths in enumerate(whole.SCHEDULE):
        assert found.step(params, lengths) == exact.step(params, lengths)
        if number == 2:
            swap_out_and_in(pages)


def swap_out_and_in(pages: torch.Tensor) -> None:
    """Every page through the host's bytes, while the device's are overwritten."""
    access = DevicePages(pages)
    kept = [access.read(page_id).copy() for page_id in range(len(pages))]
    pages.fill_(-1)
    for page_id, content in enumerate(kept):

        def fill(staging: Bytes, content: Bytes = content) -> bool:
            staging[:] = content
            return True

        assert access.fill(page_id, fill)
