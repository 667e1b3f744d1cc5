"""Annexes of records: whole or not there, no memory before they are written, and an error where there is none."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weir.kv.arena.segment import Segment
from weir.kv.geometry import ArenaGeometry
from weir.kv.layout import ANNEX_BYTES, layout_of
from weir.kv.records.annex import MAX_ANNEX_CONTENT_BYTES, AnnexFile, AnnexFull, DamagedAnnex
from weir.kv.records.record import SequenceParams


def _taken_bytes(segment: Segment) -> int:
    return segment.path.stat().st_blocks * 512


def _start_of(segment: Segment, slot: int) -> int:
    return layout_of(segment.geometry).annexes + slot * ANNEX_BYTES


def _poke(segment: Segment, offset: int, content: bytes) -> None:
    with segment.path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def test_a_fresh_annex_is_empty_and_reading_it_takes_no_memory(segment: Segment) -> None:
    taken = _taken_bytes(segment)
    assert [segment.annex(slot).read() for slot in range(6)] == [None] * 6
    assert _taken_bytes(segment) == taken == layout_of(segment.geometry).memory_bytes


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(contents=st.lists(st.binary(min_size=1, max_size=500), min_size=1, max_size=4))
def test_what_was_written_last_is_read_in_another_mapping(segment: Segment, contents: list[bytes]) -> None:
    for content in contents:
        segment.annex(3).write(content)
    other = Segment.open(segment.path)
    assert other.annex(3).read() == contents[-1]
    assert other.annex(2).read() is None
    assert other.annex(4).read() is None
    other.close()


def test_the_longest_content_fits_and_a_longer_one_is_refused_and_changes_nothing(segment: Segment) -> None:
    content = os.urandom(MAX_ANNEX_CONTENT_BYTES)
    segment.annex(5).write(content)
    with pytest.raises(ValueError, match=r"content: 65529 bytes, an annex holds at most 65528"):
        segment.annex(5).write(content + b"x")
    assert segment.annex(5).read() == content
    assert not segment.pages.any()


def test_a_record_that_begins_or_is_cleared_empties_its_annex_alone(segment: Segment, params: SequenceParams) -> None:
    for slot in (1, 2):
        segment.annex(slot).write(b"grammar")
    segment.record(1).begin(params)
    assert segment.annex(1).read() is None
    segment.annex(1).write(b"its own")
    segment.record(1).clear()
    assert segment.annex(1).read() is None
    assert segment.annex(2).read() == b"grammar"


def test_a_cleared_annex_gives_its_memory_back(segment: Segment) -> None:
    before = _taken_bytes(segment)
    segment.annex(0).write(b"x" * 20_000)
    assert _taken_bytes(segment) >= before + 20_000
    segment.annex(0).clear()
    segment.annex(0).clear()
    assert _taken_bytes(segment) == before
    segment.annex(0).write(b"")
    assert _taken_bytes(segment) == before


def test_one_whose_writer_died_before_the_header_is_empty(segment: Segment) -> None:
    _poke(segment, _start_of(segment, 1) + 8, b"half of it")
    assert segment.annex(1).read() is None


@pytest.mark.parametrize("offset", range(14))
def test_damage_at_any_byte_is_found(segment: Segment, offset: int) -> None:
    segment.annex(1).write(b"source")
    start = _start_of(segment, 1)
    with segment.path.open("rb") as file:
        file.seek(start + offset)
        byte = file.read(1)[0]
    _poke(segment, start + offset, bytes([byte ^ 0x10]))
    with pytest.raises(DamagedAnnex, match=r"the checksum of an annex of \d+ bytes is wrong|it holds at most 65528"):
        segment.annex(1).read()
    segment.annex(1).clear()
    assert segment.annex(1).read() is None


def test_a_closed_segment_says_so_and_its_records_still_clear(segment: Segment, params: SequenceParams) -> None:
    annex, record = segment.annex(1), segment.record(1)
    record.begin(params)
    segment.close()
    with pytest.raises(RuntimeError, match="the segment is closed"):
        annex.write(b"late")
    record.clear()


@pytest.fixture
def tiny_shm(tmp_path: Path) -> Iterator[Path]:
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path)]
    mounted = subprocess.run(mount, check=False, capture_output=True)
    if mounted.returncode:
        pytest.skip("this process may not mount a tmpfs")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_full_shm_is_an_error_that_says_what_to_do_and_leaves_all_else_as_it_was(tiny_shm: Path) -> None:
    geometry = ArenaGeometry(page_bytes=4096, num_pages=20, num_slots=20, max_context_tokens=256)
    segment = Segment.create(tiny_shm / "arena", geometry, "digest")
    content, num_written = os.urandom(60_000), 0
    with pytest.raises(AnnexFull) as refused:  # noqa: PT012 - which one it is depends on the machine's page size
        for slot in range(20):
            segment.annex(slot).write(content)
            num_written += 1
    assert 5 < num_written < 20, "the file is larger than the file system"
    assert str(refused.value).startswith("60000 bytes beside a sequence's record: ")
    assert "is full" in str(refused.value)
    assert f"mount -o remount,size=… {tiny_shm}" in str(refused.value)
    assert segment.annex(num_written).read() is None
    assert [segment.annex(slot).read() for slot in range(num_written)] == [content] * num_written
    segment.annex(0).clear()
    segment.annex(num_written).write(content)
    assert segment.annex(num_written).read() == content
    segment.close()


def test_a_write_that_goes_through_in_parts_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    monkeypatch.setattr("os.pwrite", lambda fd, content, start: write(fd, content[:7], start))
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    file = AnnexFile(fd, tmp_path)
    file.write(b"0123456789abcdefghij", 5)
    assert file.read(20, 5) == b"0123456789abcdefghij"
    file.close()
    file.close()
