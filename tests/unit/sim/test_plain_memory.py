"""The page memory of simulated workers that keeps no prefixes."""

import pytest

from weir.engine.messages import PageBundle
from weir.sim.memory import MemoryIsTight, PlainMemory


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


def test_lacking_spare_pages_and_slots_are_an_error_before_they_are_taken() -> None:
    memory = PlainMemory(20, 2)
    memory.keep_spare(9)
    assert memory.try_acquire(1, 11, 1) is not None
    with pytest.raises(MemoryIsTight, match="8 pages"):
        memory.try_acquire(1, 1, 0)
    with pytest.raises(MemoryIsTight, match="1 slots"):
        memory.try_acquire(1, 0, 2)


def test_counted_pages_are_used_without_ids() -> None:
    memory = PlainMemory(20, 2)
    memory.keep_spare(5)
    memory.count_used(15)
    with pytest.raises(MemoryIsTight, match="4 pages and 2 slots"):
        memory.try_acquire(1, 1, 0)
    with pytest.raises(MemoryIsTight, match="4 pages are left"):
        memory.count_used(1)
    memory.count_used(-4)
    assert memory.num_free_pages == 8
    assert memory.integrity_errors() == ["12 pages are counted at the end"]
    memory.release_all(1)
    assert memory.integrity_errors() == []
