"""What a faulty stream makes of bytes does not depend on how they are cut, and is what each fault says."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.chaos.stream_faults import Fault, FaultyStream, FlipBit, Repeat, Reset, Stall, Truncate

_NUM_BYTES = 20
_SENT = bytes(range(_NUM_BYTES))
Arrived = list[tuple[bytes, Fault | None]]


def _pass(stream: FaultyStream, *chunks: bytes) -> Arrived:
    """What arrives up to and after each ending, joined between them."""
    arrived: Arrived = [(b"", None)]
    for chunk in chunks:
        for piece, ending in stream.take(chunk):
            arrived[-1] = (arrived[-1][0] + piece, ending)
            if ending is not None:
                arrived.append((b"", None))
    return arrived


def _cut_at(places: list[int]) -> list[bytes]:
    ends = [0, *sorted(places), _NUM_BYTES]
    return [_SENT[begin:end] for begin, end in pairwise(ends)]


@st.composite
def _faults(draw: st.DrawFn) -> list[Fault]:
    faults: list[Fault] = []
    for at_byte in draw(st.sets(st.integers(1, _NUM_BYTES + 3), max_size=5)):
        faults.append(
            draw(
                st.one_of(
                    st.builds(FlipBit, st.just(at_byte), st.integers(0, 7)),
                    st.builds(Repeat, st.just(at_byte), st.integers(1, at_byte)),
                    st.builds(Truncate, st.just(at_byte)),
                    st.builds(Stall, st.just(at_byte)),
                    st.builds(Reset, st.just(at_byte)),
                )
            )
        )
    return faults


@given(_faults(), st.lists(st.integers(0, _NUM_BYTES)))
def test_it_does_not_matter_how_bytes_are_cut(faults: list[Fault], places: list[int]) -> None:
    whole, cut = FaultyStream(), FaultyStream()
    for stream in (whole, cut):
        stream.set_faults(*faults)
    assert _pass(cut, *_cut_at(places)) == _pass(whole, _SENT)


@pytest.mark.parametrize(
    ("fault", "arrived"),
    [
        (FlipBit(2, bit=3), [(b"\x00\x09\x02\x03", None)]),
        (Repeat(3, num_bytes=2), [(b"\x00\x01\x02\x01\x02\x03", None)]),
        (Truncate(1), [(b"\x00", Truncate(1)), (b"\x01\x02\x03", None)]),
        (Stall(4), [(b"\x00\x01\x02\x03", Stall(4)), (b"", None)]),
        (Reset(2), [(b"\x00\x01", Reset(2)), (b"\x02\x03", None)]),
        (FlipBit(5), [(b"\x00\x01\x02\x03", None)]),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, list) else "",
)
def test_each_fault_does_what_it_says(fault: Fault, arrived: Arrived) -> None:
    stream = FaultyStream()
    stream.set_faults(fault)
    assert _pass(stream, _SENT[:4]) == arrived


def test_bytes_are_counted_from_when_faults_are_set_and_a_fault_happens_once() -> None:
    stream = FaultyStream()
    assert _pass(stream, b"before") == [(b"before", None)]
    stream.set_faults(FlipBit(1))
    assert _pass(stream, b"aa", b"a") == [(b"\x60aa", None)]
    stream.set_faults(FlipBit(3))
    stream.set_faults(FlipBit(4))
    assert _pass(stream, b"aaaa") == [(b"aaa\x60", None)]


@pytest.mark.parametrize(
    "faults", [[FlipBit(0)], [FlipBit(1, bit=8)], [Repeat(3, num_bytes=4)], [Stall(2), FlipBit(2)]], ids=str
)
def test_a_fault_that_cannot_happen_is_refused_and_what_was_set_stays(faults: list[Fault]) -> None:
    stream = FaultyStream()
    stream.set_faults(FlipBit(1))
    with pytest.raises(ValueError, match="at_byte="):
        stream.set_faults(*faults)
    assert _pass(stream, b"a") == [(b"\x60", None)]
