"""The swap file: pages come back as they left, wrong bytes are known, and a full file system is an answer."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from weir.kv.geometry import ArenaGeometry
from weir.kv.memory.swap import SwapFile, num_swap_slots

PAGE_BYTES = 8192


def page(seed: int) -> "np.typing.NDArray[np.uint8]":
    return np.random.default_rng(seed).integers(0, 256, PAGE_BYTES, np.uint8)


def empty() -> "np.typing.NDArray[np.uint8]":
    return np.zeros(PAGE_BYTES, np.uint8)


def num_bytes_taken(directory: Path) -> int:
    """Room that the open files of `directory` take of their file system; they have no names."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]  # that of this listing is gone
    return max(link.stat().st_blocks * 512 for link in links if str(link.readlink()).startswith(str(directory)))


def test_pages_come_back_as_they_left(tmp_path: Path) -> None:
    swap_file = SwapFile(tmp_path, PAGE_BYTES, 3)
    for slot in (0, 1, 2):
        assert swap_file.try_store(slot, page(slot))
    assert swap_file.try_store(1, page(7)), "a slot is used again"
    for slot, seed in ((0, 0), (1, 7), (2, 2)):
        found = empty()
        assert swap_file.try_load(slot, found)
        assert np.array_equal(found, page(seed))


def test_one_wrong_bit_is_noticed(tmp_path: Path) -> None:
    swap_file = SwapFile(tmp_path, PAGE_BYTES, 2)
    swap_file.try_store(0, page(1))
    swap_file.slots[0, PAGE_BYTES - 1] ^= 1
    assert not swap_file.try_load(0, empty())


def test_a_slot_that_nothing_was_stored_in_has_no_page(tmp_path: Path) -> None:
    assert not SwapFile(tmp_path, PAGE_BYTES, 2).try_load(1, empty())


def test_the_file_has_no_name_and_takes_room_only_for_what_was_stored(tmp_path: Path) -> None:
    swap_file = SwapFile(tmp_path, PAGE_BYTES, 1000)
    assert list(tmp_path.iterdir()) == []
    assert num_bytes_taken(tmp_path) < 10 * PAGE_BYTES
    swap_file.try_store(3, page(3))
    assert PAGE_BYTES <= num_bytes_taken(tmp_path) < 20 * PAGE_BYTES


def test_a_file_system_without_room_is_an_answer_and_what_is_there_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    swap_file = SwapFile(tmp_path, PAGE_BYTES, 4)
    assert swap_file.try_store(0, page(0))

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert not swap_file.try_store(1, page(1))
    assert not swap_file.try_store(2, page(2))
    assert swap_file.try_store(0, page(5)), "its room is there already"
    assert len(caplog.records) == 1, "logged once"


def test_another_error_of_the_file_system_is_not_taken_for_a_full_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.EIO, "I/O error")

    swap_file = SwapFile(tmp_path, PAGE_BYTES, 1)
    monkeypatch.setattr(os, "posix_fallocate", broken)
    with pytest.raises(OSError, match="I/O error"):
        swap_file.try_store(0, page(0))


def test_its_size_is_a_quarter_of_the_arena_or_what_is_asked_for() -> None:
    geometry = ArenaGeometry(PAGE_BYTES, num_pages=103, num_slots=1, max_context_tokens=64)
    assert num_swap_slots(-1, geometry) == 25
    assert num_swap_slots(0, geometry) == 0
    assert num_swap_slots(3 * PAGE_BYTES - 1, geometry) == 2
