"""One contract over all movers."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from weir.kv.movers.in_memory import InMemoryMover
from weir.kv.movers.protocol import HostMover
from weir.kv.movers.same_host import SameHostMover

_PAGE_BYTES = 512
_MakeMover = Callable[[NDArray[np.uint8]], HostMover]


@pytest.fixture
def pages() -> NDArray[np.uint8]:
    return np.random.default_rng(7).integers(0, 256, (32, _PAGE_BYTES), np.uint8)


@pytest.fixture(params=[SameHostMover, InMemoryMover])
def make_mover(request: pytest.FixtureRequest) -> _MakeMover:
    make: _MakeMover = request.param
    return make


def _ids(*page_ids: int) -> NDArray[np.int64]:
    return np.array(page_ids, np.int64)


def test_the_receiver_reads_what_the_sender_wrote(pages: NDArray[np.uint8], make_mover: _MakeMover) -> None:
    mover = make_mover(pages)
    before = pages.copy()
    mover.move(_ids(31, 4, 17))
    assert (mover.receiver_pages[[31, 4, 17]] == before[[31, 4, 17]]).all()
    assert (pages == before).all()


def test_moving_again_brings_what_the_sender_wrote_since(pages: NDArray[np.uint8], make_mover: _MakeMover) -> None:
    mover = make_mover(pages)
    first = mover.move(_ids(3, 5))
    pages[5] = 0xEE
    assert mover.move(_ids(3, 5)) == first
    assert (mover.receiver_pages[5] == 0xEE).all()


def test_no_page_is_no_work(pages: NDArray[np.uint8], make_mover: _MakeMover) -> None:
    assert make_mover(pages).move(_ids()) == 0


@pytest.mark.parametrize("page_id", [-1, 32])
def test_a_page_that_is_not_there_is_refused_and_nothing_moved(
    pages: NDArray[np.uint8], make_mover: _MakeMover, page_id: int
) -> None:
    mover = make_mover(pages)
    before = mover.receiver_pages.copy()
    with pytest.raises(IndexError, match="there are pages 0 to 31"):
        mover.move(_ids(3, page_id))
    assert (mover.receiver_pages == before).all()


def test_bytes_are_counted_where_bytes_are_copied(pages: NDArray[np.uint8]) -> None:
    assert SameHostMover(pages).move(_ids(1, 2, 3)) == 0
    assert InMemoryMover(pages).move(_ids(1, 2, 3)) == 3 * _PAGE_BYTES
