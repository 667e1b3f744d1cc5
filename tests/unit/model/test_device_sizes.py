"""How a GPU is shared between workers and pages where nobody has said."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.model.device_sizes import (
    StepBounds,
    arena_bytes_on_gpu,
    max_num_seqs_on_gpu,
    weight_bytes_on_gpu,
    worker_bytes_on_gpu,
)
from weir.model.errors import ModelError
from weir.model.files.dummy import shape_named
from weir.model.precision import page_geometry

GIB = 1 << 30
BOUNDS = StepBounds(max_num_batched_tokens=2048, max_num_seqs=128, max_context_tokens=131_072)
LLAMA_8B = shape_named("llama-3.1-8b")


def test_an_8b_model_in_two_workers_leaves_most_of_a_large_gpu_to_pages() -> None:
    arena_bytes = arena_bytes_on_gpu(LLAMA_8B, "bf16", BOUNDS, 79 * GIB, num_workers=2)
    assert 45 * GIB < arena_bytes < 60 * GIB
    one_sequence = 131_072 // 16 * page_geometry(LLAMA_8B, "bf16").page_bytes
    assert arena_bytes > one_sequence, "the longest sequence fits, where the old default of 2 GiB had room for none"


def test_weights_are_counted_once_and_what_a_worker_has_of_its_own_for_each() -> None:
    assert weight_bytes_on_gpu(LLAMA_8B, "bf16") == 2 * 8_030_261_248
    own_bytes = worker_bytes_on_gpu(LLAMA_8B, "bf16", BOUNDS)
    assert GIB < own_bytes < 5 * GIB
    one, two = (arena_bytes_on_gpu(LLAMA_8B, "bf16", BOUNDS, 79 * GIB, num_workers) for num_workers in (1, 2))
    assert one - two == pytest.approx(own_bytes, abs=2 * page_geometry(LLAMA_8B, "bf16").page_bytes)


def test_weights_of_one_byte_are_counted_as_they_are_laid_out() -> None:
    weights = pytest.importorskip("weir.model.torch.weights")
    torch = pytest.importorskip("torch")
    for name in ("llama-3.1-8b", "llama-3.2-1b"):
        config = shape_named(name)
        laid_out = weights.weights_bytes(config, weights.WeightFormat(torch.bfloat16, is_fp8=True))
        assert weight_bytes_on_gpu(config, "fp8") == pytest.approx(laid_out, rel=1e-4)
    assert weight_bytes_on_gpu(LLAMA_8B, "fp8") < 0.57 * weight_bytes_on_gpu(LLAMA_8B, "bf16")


def test_the_sums_of_a_long_row_have_the_bound_that_the_kernel_keeps() -> None:
    decode = pytest.importorskip("weir.ops.gpu.decode_work", reason="Triton is installed on Linux only")
    most = decode.MAX_SPLITS * 256
    half, at_most, beyond = (
        worker_bytes_on_gpu(LLAMA_8B, "bf16", replace(BOUNDS, max_context_tokens=tokens))
        for tokens in (most // 2, most, 8 * most)
    )
    assert half < at_most == beyond


def test_larger_gpus_decode_more_sequences_at_a_time() -> None:
    assert [max_num_seqs_on_gpu(gib * GIB) for gib in (8, 15, 16, 24, 40, 80, 141)] == [32, 32, 64, 64, 128, 128, 128]


def test_a_model_for_which_there_is_no_room_is_named_with_what_to_do() -> None:
    with pytest.raises(ModelError, match=r"GPU 0 has 16\.0 GiB; weights take 15\.0 of them .*fewer"):
        arena_bytes_on_gpu(LLAMA_8B, "bf16", BOUNDS, 16 * GIB, num_workers=2)


@given(free_gib=st.integers(1, 200), num_workers=st.integers(1, 8), name=st.sampled_from(["tiny", "llama-3.2-1b"]))
def test_pages_and_workers_together_never_take_more_than_is_free(free_gib: int, num_workers: int, name: str) -> None:
    config = shape_named(name)
    taken = weight_bytes_on_gpu(config, "bf16") + num_workers * worker_bytes_on_gpu(config, "bf16", BOUNDS)
    try:
        arena_bytes = arena_bytes_on_gpu(config, "bf16", BOUNDS, free_gib * GIB, num_workers)
    except ModelError:
        assert taken > free_gib * GIB * 0.9
        return
    assert 0 < arena_bytes <= free_gib * GIB * 0.95 - taken
    assert arena_bytes % page_geometry(config, "bf16").page_bytes == 0
