"""Headers of page streams come back as they were sent, or not at all."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weir.core.life import Attempt
from weir.kv.movers.frames import (
    HEADER_BYTES,
    MAX_PAGE_BYTES,
    FrameHeader,
    FrameKind,
    MalformedFrame,
    pack_header,
    unpack_header,
    unpack_numbers,
)


@given(
    header=st.builds(
        FrameHeader,
        kind=st.just(FrameKind.PAGE),
        transfer_id=st.binary(min_size=16, max_size=16),
        attempt=st.builds(Attempt, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)),
        number=st.integers(0, 2**32 - 1),
        generation=st.integers(0, 2**32 - 1),
        num_bytes=st.integers(0, MAX_PAGE_BYTES),
        checksum=st.integers(0, 2**64 - 1),
    ),
    bit=st.integers(0, 8 * HEADER_BYTES - 1),
)
def test_a_header_comes_back_as_it_was_and_with_any_bit_changed_not_at_all(header: FrameHeader, bit: int) -> None:
    packed = bytearray(pack_header(header))
    assert unpack_header(packed) == header
    packed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(MalformedFrame):
        unpack_header(packed)


@settings(max_examples=200)
@given(raw=st.binary(min_size=0, max_size=80))
def test_no_bytes_are_a_header_but_those_that_were_packed(raw: bytes) -> None:
    with pytest.raises(MalformedFrame):
        unpack_header(raw)
    if not raw or len(raw) % 4:
        with pytest.raises(MalformedFrame):
            unpack_numbers(raw)
