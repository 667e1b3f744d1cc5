"""The scan of a row under a grammar's mask: to the bit what masking the row and scanning it finds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.model.sampler import MASKED, Logits, scan_of
from weir.ops.cpu.sampling_scan import NOT_A_NUMBER, num_scan_blocks, only_allowed, scan_allowed

SIZES = (1, 31, 32, 33, 255, 256, 257, 1000, 4096 + 7)
SHARES = (0.0, 0.002, 0.5, 0.99, 1.0)


def words_of(bits: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    padded = np.zeros(-(-len(bits) // 32) * 32, np.bool_)
    padded[: len(bits)] = bits
    return np.packbits(padded, bitorder="little").view(np.uint32)


def scan(row: Logits, bits: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> tuple[Logits, Logits, float, int]:
    kept, block_maxima = np.full(len(row), np.nan, np.float32), np.empty(num_scan_blocks(len(row)), np.float32)
    highest, argmax = scan_allowed(row, words_of(bits), MASKED, kept, block_maxima)
    return kept, block_maxima, highest, argmax


@pytest.mark.parametrize("share", SHARES)
@given(size=st.sampled_from(SIZES), seed=st.integers(0, 2**32 - 1))
def test_it_is_that_of_the_masked_row(share: float, size: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    row = random.choice(random.standard_normal(9).astype(np.float32), size)  # the highest comes more than once
    bits = random.random(size) < share
    kept, block_maxima, highest, argmax = scan(row, bits)
    expected = scan_of(np.where(bits, row, MASKED)[None])
    np.testing.assert_array_equal(kept, expected.logits[0])
    np.testing.assert_array_equal(block_maxima, expected.block_maxima[0])
    assert (highest, argmax) == (expected.highest[0], expected.argmax[0])


def test_a_row_may_be_masked_in_place() -> None:
    row = np.arange(500, dtype=np.float32)
    bits = np.arange(500) % 3 == 0
    block_maxima = np.empty(num_scan_blocks(500), np.float32)
    assert scan_allowed(row, words_of(bits), MASKED, row, block_maxima) == (498.0, 498)
    assert row[499] == MASKED


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_told_where_it_is_allowed(wrong: float) -> None:
    row, bits = np.zeros(300, np.float32), np.zeros(300, np.bool_)
    row[270], bits[[3, 270]] = wrong, True
    assert scan(row, bits)[3] == NOT_A_NUMBER
    bits[270] = False
    assert scan(row, bits)[3] == 3


@given(size=st.sampled_from(SIZES), data=st.data())
def test_the_only_token_that_is_allowed_is_found(size: int, data: st.DataObject) -> None:
    allowed = data.draw(st.sets(st.integers(0, size - 1), max_size=2))
    bits = np.zeros(size, np.bool_)
    bits[list(allowed)] = True
    assert only_allowed(words_of(bits)) == (min(allowed) if len(allowed) == 1 else -1)
