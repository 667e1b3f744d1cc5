"""Steps in which everybody decodes are cut by a short way, which is the long way's equal."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weir.core.sampling import SamplingParams
from weir.engine.plan import ChunkPlan, SampleSpec
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
