"""Norms of heads, rotary embedding and the write into pages on CPUs: what the fp32 path does, and then bfloat16."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from weir.kv.geometry import PAGE_TOKENS
from weir.model.architecture import ModelConfig, rotary_frequencies
from weir.model.torch.decoder import Rotary
from weir.model.torch.paged_kv import PagedKv
from weir.ops import reference
from weir.ops.cpu.head_norm import norm_heads
from weir.ops.cpu.rotary_kv_write import rotary_kv_write

NUM_PAGES, LAYER = 24, 1


def make_config(num_heads: int, num_kv_heads: int, head_dim: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=10,
        hidden_size=num_heads * head_dim,
        intermediate_size=8,
        num_layers=3,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        max_context_tokens=4096,
        tie_word_embeddings=True,
        eos_token_ids=(),
        bos_token_id=None,
    )


def poisoned_pages(config: ModelConfig) -> NDArray[np.uint8]:
    return np.full((NUM_PAGES, config.page_geometry.page_bytes), 0xFF, np.uint8)


@pytest.mark.parametrize("num_tokens", [1, 2, 35])
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("shape", [(9, 3, 64), (4, 4, 128), (8, 1, 8), (14, 2, 80)], ids=str)
def test_a_step_rotates_and_writes_as_the_fp32_path_does(
    shape: tuple[int, int, int], num_threads: int, num_tokens: int
) -> None:
    config = make_config(*shape)
    random = np.random.default_rng(num_tokens)
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    qkv = random.standard_normal((num_tokens, width), dtype=np.float32)
    places = random.choice(NUM_PAGES * PAGE_TOKENS, num_tokens, replace=False)  # no two tokens share one
    positions = (random.integers(0, 4096 // PAGE_TOKENS, num_tokens) * PAGE_TOKENS + places % PAGE_TOKENS).astype("i4")
    page_ids = (places // PAGE_TOKENS).astype(np.int32)

    rotary, num_rotated = Rotary(rotary_frequencies(config)), config.num_heads + config.num_kv_heads
    heads = torch.from_numpy(qkv.copy()).view(num_tokens, -1, config.head_dim)
    rotated = rotary.rotate(heads[:, :num_rotated], rotary.tables(torch.from_numpy(positions)))
    expected_pages = poisoned_pages(config)
    kv = PagedKv(config.page_geometry, expected_pages)
    index = kv.row_index(torch.from_numpy(page_ids).long(), torch.from_numpy(positions).long() % PAGE_TOKENS)
    kv.write(LAYER, index, rotated[:, config.num_heads :], heads[:, num_rotated:])

    expected = torch.from_numpy(expected_pages).view(torch.float32).bfloat16().view(torch.uint8).numpy()
    pages = np.full(expected.shape, 0xFF, np.uint8)
    blocks = pages.view(np.uint16).reshape(NUM_PAGES, config.num_layers, 2, config.num_kv_heads, -1)
    cosines, sines = tables_by_position(rotary, config)
    for thread in range(num_threads):
        rotary_kv_write(qkv, positions, page_ids, cosines, sines, blocks, LAYER, thread, num_threads)
    written = ~np.isnan(expected_pages.view(np.float32))
    assert np.array_equal(pages.view(np.uint16)[written], expected.view(np.uint16)[written])
    assert (pages.view(np.uint16)[~written] == 0xFFFF).all()
    assert np.array_equal(qkv.reshape(num_tokens, -1, config.head_dim)[:, :num_rotated], rotated.numpy())


@pytest.mark.parametrize("epsilon", [1e-6, 0.5])
@pytest.mark.parametrize("shape", [(9, 3, 64), (4, 4, 128), (8, 1, 8), (14, 2, 80)], ids=str)
def test_each_head_of_queries_and_keys_is_normed_by_itself(shape: tuple[int, int, int], epsilon: float) -> None:
    num_heads, num_kv_heads, head_dim = shape
    random = np.random.default_rng(7)
    qkv = random.standard_normal((6, (num_heads + 2 * num_kv_heads) * head_dim), dtype=np.float32)
    qkv[3] *= 1e-4  # epsilon counts
    weights = random.uniform(0.5, 1.5, (2, head_dim)).astype(np.float32)
    norms = reference.HeadNorms(torch.from_numpy(weights[0]), torch.from_numpy(weights[1]), epsilon)
    heads = torch.from_numpy(qkv.copy()).view(6, -1, head_dim)
    queries, keys, values = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    expected = torch.cat([*reference.norm_heads(queries, keys, norms), values], dim=1)
    expected[[0, 5]] = heads[[0, 5]]
    norm_heads(qkv, weights, num_heads, num_kv_heads, epsilon, 1, 5)
    torch.testing.assert_close(torch.from_numpy(qkv).view(6, -1, head_dim), expected, rtol=1e-6, atol=1e-7)


def tables_by_position(rotary: Rotary, config: ModelConfig) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """[positions, head_dim / 2], from one call a position, as a step of one token makes it."""
    half = config.head_dim // 2
    tables = [rotary.tables(torch.tensor([position])) for position in range(config.max_context_tokens)]
    cosines, signed_sines = (torch.cat(tensors)[:, 0, half:].numpy() for tensors in zip(*tables, strict=True))
    return np.ascontiguousarray(cosines), np.ascontiguousarray(signed_sines)
