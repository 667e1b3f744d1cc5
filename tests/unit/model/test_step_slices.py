"""Steps in which everybody decodes are cut by a short way, which is the long way's equal."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weir.core.sampling import SamplingParams
from weir.engine.plan import ChunkPlan, SampleSpec, ScoreSpec
from weir.model.cpu.slices import _slice_of, cut_slices
from weir.model.rows import whole

SAMPLE = SampleSpec(SamplingParams(temperature=0.0), 1)


@st.composite
def decodes(draw: st.DrawFn) -> list[ChunkPlan]:
    """In the order in which runners have them, some with more pages than they need."""
    starts = sorted(draw(st.lists(st.integers(0, 90), min_size=1, max_size=9)))
    return [
        ChunkPlan(
            slot,
            start,
            (draw(st.integers(0, 99)),),
            tuple(range(10 * slot, 10 * slot + start // 16 + 1 + draw(st.integers(0, 3)))),
            draw(st.sampled_from([SAMPLE, None])),
        )
        for slot, start in enumerate(starts)
    ]


@given(decodes())
def test_both_ways_make_the_same_arrays(chunks: list[ChunkPlan]) -> None:
    (short,) = cut_slices(chunks, [], 9)
    long = _slice_of(whole(chunks))
    for name in short.arrays._fields:
        made, expected = np.asarray(getattr(short.arrays, name)), np.asarray(getattr(long.arrays, name))
        assert (made.dtype, made.shape) == (expected.dtype, expected.shape), name
        assert made.flags.c_contiguous, name
        if name == "block_tables":  # nothing reads what is behind the page of the last token
            for row, chunk in enumerate(chunks):
                made[row, chunk.start // 16 + 1 :] = expected[row, chunk.start // 16 + 1 :] = 0
        assert np.array_equal(made, expected), name
    assert (short.sampled, short.scored) == (long.sampled, long.scored)


def test_more_rows_than_a_slice_holds_go_the_long_way() -> None:
    chunks = [ChunkPlan(slot, 3, (slot,), (slot,), SAMPLE) for slot in range(5)]
    assert [step_slice.num_rows for step_slice in cut_slices(chunks, [], 2)] == [2, 2, 1]


def test_rows_with_logits_become_decodes_at_their_positions() -> None:
    decodes = [ChunkPlan(4, 20, (7,), (30, 31), None), ChunkPlan(5, 33, (8,), (40, 41, 42), SAMPLE)]
    scored = ScoreSpec((11, 12), 0)
    prefills = [
        ChunkPlan(0, 0, (1, 2, 3), (10,), SAMPLE),
        ChunkPlan(1, 16, (4, 5), (20, 21), None, scored),
        ChunkPlan(2, 2, (6, 7, 8, 9), (50,), SAMPLE),
    ]
    (step_slice,) = cut_slices(decodes, prefills, 20)
    arrays = step_slice.arrays
    assert arrays.logit_rows.tolist() == [1, 4, 10, 5, 6], "sampled ones first"
    narrow = arrays.of_logit_rows()
    assert narrow.token_ids.tolist() == [8, 3, 9, 4, 5]
    assert narrow.positions.tolist() == [33, 2, 5, 16, 17]
    assert narrow.decode_lengths.tolist() == [34, 3, 6, 17, 18]
    assert narrow.block_tables[:, 0].tolist() == [40, 10, 50, 20, 20]
    assert narrow.page_ids.tolist() == [42, 10, 50, 21, 21]
    assert narrow.decode_rows.tolist() == narrow.logit_rows.tolist() == [0, 1, 2, 3, 4]
    assert narrow.ends.size == narrow.num_tokens.size == narrow.first_rows.size == 0
    for name in narrow._fields:
        made, before = getattr(narrow, name), getattr(arrays, name)
        assert (made.dtype, made.ndim) == (before.dtype, before.ndim), name
        assert made.flags.c_contiguous, name
