"""The page memory of simulated workers, and the instants of their timeline."""

import pytest

from weir.engine.messages import PageBundle
from weir.sim.events import Coincidence, Timeline
from weir.sim.memory.page_memory import MemoryIsTight, PlainMemory


def test_pages_go_from_free_to_a_worker_to_another_and_back() -> None:
    memory = PlainMemory(8, 3)
    bundle = memory.try_acquire(1, 5, 1)
    assert bundle is not None
    assert (len(bundle.page_ids), memory.num_free_pages) == (5, 3)
    assert memory.try_acquire(2, 4, 0) is None
    memory.hand_off(bundle.slots[0], bundle.page_ids, (), (1, 2))
    memory.release_all(1)
    assert memory.num_free_pages == 3
    memory.release(2, PageBundle(bundle.page_ids[:2]), ())
    memory.release_all(2)
    assert memory.num_free_pages == 8
    assert memory.integrity_errors() == []


def test_what_is_free_twice_is_found() -> None:
    memory = PlainMemory(8, 3)
    bundle = memory.take_all(1)
    memory.release(1, bundle, ())
    memory.release(1, PageBundle(bundle.page_ids[:1]), ())
    assert memory.integrity_errors() == ["9 of 8 pages are free at the end, 8 different"]


def test_spare_pages_that_several_want_add_up_and_are_said_to_be_lacking_before_they_are_taken() -> None:
    memory = PlainMemory(20, 2)
    memory.keep_spare("decode-0", 4)
    memory.keep_spare("decode-1", 5)
    memory.keep_spare("decode-0", 4)
    assert memory.try_acquire(1, 11, 1) is not None
    with pytest.raises(MemoryIsTight, match="8 pages"):
        memory.try_acquire(1, 1, 0)
    with pytest.raises(MemoryIsTight, match="1 slots"):
        memory.try_acquire(1, 0, 2)


def test_an_instant_has_room_for_one_event_that_wants_to_be_alone() -> None:
    timeline = Timeline()
    timeline.at(5, timeline.check_alone)
    assert timeline.step()
    timeline.at(7, timeline.check_alone)
    timeline.at(7, lambda: None)
    with pytest.raises(Coincidence, match="7 ns"):
        timeline.step()
    timeline.at(9, lambda: None)
    timeline.at(9, timeline.check_alone)
    assert timeline.step()
    assert timeline.step()
    with pytest.raises(Coincidence, match="9 ns"):
        timeline.step()
