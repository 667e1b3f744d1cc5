"""Sampling over rows of several blocks, and where a draw falls on the edge between two tokens."""

import numpy as np
import numpy.typing as npt
import pytest

from weir.ops.cpu.sampling import most_likely, sample_token
from weir.ops.cpu.sampling_scan import BLOCK

Row = npt.NDArray[np.float32]
NUM_BLOCKS = 40


def row_with(peaks: dict[int, float]) -> Row:
    values = np.full(NUM_BLOCKS * BLOCK, -20.0, np.float32)
    for token_id, value in peaks.items():
        values[token_id] = value
    return values


def drawn(values: Row, uniforms: list[float], *, top_k: int = 0, top_p: float = 1.0) -> list[int]:
    maxima = np.array([block.max() for block in np.split(values, range(BLOCK, len(values), BLOCK))])
    keys = np.empty((2, len(values)), np.uint64)
    return [
        int(sample_token(values, maxima, values.max(), 1.0, top_k, top_p, 0.0, uniform, keys)) for uniform in uniforms
    ]


@pytest.mark.parametrize("top_k", [1, 2, 6, 30, NUM_BLOCKS])
def test_the_top_k_may_lie_in_a_block_each(top_k: int) -> None:
    ids = [block * BLOCK + (37 * block) % BLOCK for block in range(NUM_BLOCKS)]
    values = row_with(dict.fromkeys(ids, 5.0))
    uniforms = [(number + 0.5) / top_k for number in range(top_k)]
    assert drawn(values, uniforms, top_k=top_k) == ids[:top_k]


@pytest.mark.parametrize("count", [1, 2, 6, 30, NUM_BLOCKS])
def test_the_most_likely_may_lie_in_a_block_each(count: int) -> None:
    order = np.random.default_rng(0).permutation(NUM_BLOCKS)
    ids = [int(block) * BLOCK + 3 for block in order]
    values = row_with({token_id: 5.0 - place / 8 for place, token_id in enumerate(ids)})
    maxima = values.reshape(NUM_BLOCKS, BLOCK).max(1)
    assert most_likely(values, maxima, count).tolist() == ids[:count]


def test_a_draw_on_the_edge_between_two_tokens_is_the_second_and_top_p_on_it_keeps_the_first_alone() -> None:
    values = np.zeros(8, np.float32)  # of four equal ones a fourth each: sums without rounding
    assert drawn(values, [0.0, 0.25, 0.5, 0.75], top_k=4) == [0, 1, 2, 3]
    assert drawn(values, [0.0, 0.49, 0.5, 0.99], top_k=4, top_p=0.5) == [0, 0, 1, 1]
    assert drawn(values, [0.0, 0.99], top_k=4, top_p=0.25) == [0, 0]
