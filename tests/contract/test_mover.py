"""One contract over all movers: that of shared memory, and one that copies, as between hosts."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from weir.kv.movers.mover import Mover, SharedMemoryMover, check_page_ids

_PAGE_BYTES = 512


class CopyingMover:
    """`pages`: the sender's, shape [num_pages, page_bytes]. `receiver_pages`: a second array, as of another host."""

    def __init__(self, pages: NDArray[np.uint8]) -> None:
        self._pages = pages
        self.receiver_pages = np.zeros_like(pages)

    def move(self, page_ids: NDArray[np.int64]) -> int:
        check_page_ids(page_ids, len(self._pages))
        self.receiver_pages[page_ids] = self._pages[page_ids]
        return int(page_ids.size * self._pages.shape[1])


@dataclass
class World:
    """A mover between two parties' pages, shape [num_pages, page_bytes]; they may be the same memory."""

    mover: Mover
    pages: NDArray[np.uint8]
    receiver_pages: NDArray[np.uint8]
    copied_page_bytes: int


def shared_memory(pages: NDArray[np.uint8]) -> World:
    return World(SharedMemoryMover(len(pages)), pages, receiver_pages=pages, copied_page_bytes=0)


def two_memories(pages: NDArray[np.uint8]) -> World:
    mover = CopyingMover(pages)
    return World(mover, pages, mover.receiver_pages, copied_page_bytes=_PAGE_BYTES)


@pytest.fixture(params=[shared_memory, two_memories], ids=lambda make: str(make.__name__))
def world(request: pytest.FixtureRequest) -> World:
    make: Callable[[NDArray[np.uint8]], World] = request.param
    return make(np.random.default_rng(7).integers(0, 256, (32, _PAGE_BYTES), np.uint8))


def _ids(*page_ids: int) -> NDArray[np.int64]:
    return np.array(page_ids, np.int64)


def test_the_receiver_reads_what_the_sender_wrote(world: World) -> None:
    before = world.pages.copy()
    world.mover.move(_ids(31, 4, 17))
    assert (world.receiver_pages[[31, 4, 17]] == before[[31, 4, 17]]).all()
    assert (world.pages == before).all()


def test_moving_again_brings_what_the_sender_wrote_since(world: World) -> None:
    first = world.mover.move(_ids(3, 5))
    world.pages[5] = 0xEE
    assert world.mover.move(_ids(3, 5)) == first
    assert (world.receiver_pages[5] == 0xEE).all()


def test_no_page_is_no_work(world: World) -> None:
    assert world.mover.move(_ids()) == 0


@pytest.mark.parametrize("page_id", [-1, 32])
def test_a_page_that_is_not_there_is_refused_and_nothing_moved(world: World, page_id: int) -> None:
    before = world.receiver_pages.copy()
    with pytest.raises(IndexError, match="there are pages 0 to 31"):
        world.mover.move(_ids(3, page_id))
    assert (world.receiver_pages == before).all()


def test_bytes_are_counted_where_bytes_are_copied(world: World) -> None:
    assert world.mover.move(_ids(1, 2, 3)) == 3 * world.copied_page_bytes
