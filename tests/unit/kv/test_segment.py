"""The segment file: made whole or not at all, taken over when it fits, replaced when it does not."""

import logging
import os
import re
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from weir.kv.arena.segment import Segment, SegmentError, claim_segment, segment_path
from weir.kv.geometry import ArenaGeometry
from weir.kv.layout import ANNEX_BYTES, LAYOUT_VERSION, PageState, SegmentMismatch, geometry_within, layout_of


def test_a_segment_is_private_zeroed_and_as_large_as_its_layout(segment: Segment, geometry: ArenaGeometry) -> None:
    status = segment.path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == segment.total_bytes == layout_of(geometry).total_bytes
    assert segment.pages.shape == (40, 4096)
    assert not segment.pages.any()
    assert status.st_blocks * 512 == layout_of(geometry).memory_bytes
    assert list(segment.path.parent.iterdir()) == [segment.path]


def test_two_mappings_see_the_same_pages_and_tables(segment: Segment) -> None:
    other = Segment.open(segment.path)
    segment.pages[3, 17] = 200
    segment.page_rows["owner"][3] = 9
    assert other.pages[3, 17] == 200
    assert other.page_rows["owner"][3] == 9
    assert (other.arena_id, other.geometry) == (segment.arena_id, segment.geometry)
    other.close()


def test_parts_of_the_layout_do_not_overlap(segment: Segment) -> None:
    segment.pages[:] = 0xAA
    segment.page_rows.view("u1")[:] = 0xBB
    segment.slot_rows.view("u1")[:] = 0xCC
    segment.lease_rows.view("u1")[:] = 0xDD
    assert (segment.pages == 0xAA).all()
    assert (segment.page_rows.view("u1") == 0xBB).all()
    assert (segment.slot_rows.view("u1") == 0xCC).all()
    assert all(segment.record(slot).read() is None for slot in range(6))
    assert Segment.open(segment.path).arena_id == segment.arena_id


def test_views_outlive_the_segment_object(segment: Segment) -> None:
    pages = segment.pages
    segment.close()
    pages[0, 0] = 1
    assert pages[0, 0] == 1


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this machine has no /dev/shm")
def test_too_little_memory_is_an_error_with_sizes_and_advice_and_leaves_no_file() -> None:
    path = segment_path(f"test-{os.getpid()}")
    vast = ArenaGeometry(page_bytes=1 << 30, num_pages=1 << 20, num_slots=1, max_context_tokens=64)
    with pytest.raises(SegmentError, match=r"/dev/shm is too small: the arena needs \d+ MiB, free are \d+ MiB; make"):
        Segment.create(path, vast, "digest")
    assert not list(path.parent.glob(path.name + "*"))


def test_a_segment_of_the_same_layout_is_taken_over_as_it_is(segment: Segment, geometry: ArenaGeometry) -> None:
    segment.pages[7, 0] = 42
    segment.close()
    claimed = claim_segment(segment.path, geometry, "digest")
    assert not claimed.is_new
    assert claimed.segment.arena_id == segment.arena_id
    assert claimed.segment.pages[7, 0] == 42
    claimed.segment.close()


def _write_text(path: Path) -> None:
    path.write_bytes(b"not a segment" * 1000)


def _write_other_version(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(8)
        file.write(b"\xff\xff\xff\xff")


def _write_earlier_version(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(8)
        file.write((LAYOUT_VERSION - 1).to_bytes(4, "little"))


def _write_wrong_checksum(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(24)
        file.write(b"\xff")


def _cut(path: Path) -> None:
    os.truncate(path, 8192)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_write_text, "no magic number"),
        (_write_other_version, "version 4294967295"),
        (
            _write_earlier_version,
            f"version {LAYOUT_VERSION - 1} with 256 leases, this program has version {LAYOUT_VERSION}",
        ),
        (_write_wrong_checksum, "checksum of its header"),
        (_cut, "8192 bytes where its header says"),
    ],
)
def test_a_left_over_that_cannot_be_used_is_named_in_the_log_and_replaced(
    segment: Segment, geometry: ArenaGeometry, damage: object, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    segment.close()
    assert callable(damage)
    damage(segment.path)
    with pytest.raises(SegmentMismatch, match=reason):
        Segment.open(segment.path)
    with caplog.at_level(logging.WARNING):
        claimed = claim_segment(segment.path, geometry, "digest")
    assert claimed.is_new
    assert reason in caplog.text
    assert claimed.segment.arena_id != segment.arena_id
    claimed.segment.close()


@pytest.mark.parametrize(
    ("rows", "field", "value", "reason"),
    [
        ("lease_rows", "state", 9, "a lease cannot be read (9 is not a valid LeaseState)"),
        ("page_rows", "state", 5, "page 3 has state 5, which does not exist"),
        ("page_rows", "state", PageState.SHARED | 8, "page 3 has state 12"),
        ("slot_rows", "state", 128, "slot 3 has state 128"),
    ],
)
def test_tables_in_which_bits_have_turned_are_named_in_the_log_and_replaced(
    segment: Segment,
    geometry: ArenaGeometry,
    caplog: pytest.LogCaptureFixture,
    rows: str,
    field: str,
    value: int,
    reason: str,
) -> None:
    getattr(segment, rows)[field][3] = value
    segment.close()
    with caplog.at_level(logging.WARNING):
        claimed = claim_segment(segment.path, geometry, "digest")
    assert claimed.is_new
    assert f"its tables are damaged: {reason}" in caplog.text
    claimed.segment.close()


def test_a_segment_of_another_geometry_or_model_is_named_in_the_log_and_replaced(
    segment: Segment, geometry: ArenaGeometry, caplog: pytest.LogCaptureFixture
) -> None:
    segment.close()
    larger = claim_segment(segment.path, replace(geometry, num_pages=41), "digest")
    assert larger.is_new
    assert "num_pages=40" in caplog.text
    larger.segment.close()
    other_model = claim_segment(segment.path, replace(geometry, num_pages=41), "another digest")
    assert other_model.is_new
    assert "it is of model 'digest', wanted is 'another digest'" in caplog.text
    other_model.segment.close()


def test_a_segment_in_use_is_not_touched(segment: Segment, geometry: ArenaGeometry) -> None:
    segment.pages[0, 0] = 5
    with pytest.raises(SegmentError, match="in use by another transfer service"):
        claim_segment(segment.path, replace(geometry, num_pages=41), "digest")
    assert Segment.open(segment.path).pages[0, 0] == 5


def test_each_process_that_takes_a_segment_has_a_higher_incarnation(segment: Segment, geometry: ArenaGeometry) -> None:
    seen = [segment.begin_incarnation()]
    segment.close()
    for _ in range(2):
        taken = claim_segment(segment.path, geometry, "digest").segment
        seen.append(taken.begin_incarnation())
        taken.close()
    assert seen == [1, 2, 3]


def test_a_segment_that_cannot_be_finished_leaves_nothing(
    tmp_path: Path, geometry: ArenaGeometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("weir.kv.arena.segment.populate", die)
    with pytest.raises(KeyboardInterrupt):
        Segment.create(tmp_path / "arena", geometry, "digest")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_appears_meanwhile_is_not_replaced(tmp_path: Path, geometry: ArenaGeometry) -> None:
    (tmp_path / "arena").write_bytes(b"x")
    with pytest.raises(SegmentError, match="arena exists: another transfer service has just made it"):
        Segment.create(tmp_path / "arena", geometry, "digest")
    assert (tmp_path / "arena").read_bytes() == b"x"


def test_the_largest_geometry_within_a_size_stays_within_it() -> None:
    page_bytes = 30 * 2 * 3 * 16 * 64 * 4
    for arena_bytes in (600 << 20, (600 << 20) + 12345, 2 << 30):
        geometry = geometry_within(arena_bytes, page_bytes, num_slots=512, max_context_tokens=8192)
        layout = layout_of(geometry)
        assert arena_bytes - 2 * page_bytes < layout.memory_bytes <= arena_bytes
        assert layout.total_bytes - layout.memory_bytes == 512 * ANNEX_BYTES


def test_a_size_in_which_no_sequence_fits_is_refused_with_the_least_that_would_do() -> None:
    with pytest.raises(ValueError, match=r"arena_bytes 1000000: too small .* give at least (\d+)") as caught:
        geometry_within(1_000_000, 65536, num_slots=4, max_context_tokens=1024)
    named = re.search(r"give at least (\d+)", str(caught.value))
    assert named is not None
    least = int(named[1])
    assert geometry_within(least, 65536, 4, 1024).num_pages >= 64
