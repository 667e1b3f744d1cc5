"""A page in a file is read as it was written, or not at all."""

import os
import resource
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from weir.kv.tiers.page_file import read_page, write_page
from weir.kv.tiers.page_header import HEADER_BYTES, DamagedPage, PageLayout

LAYOUT = PageLayout("digest", 3000)
HASH = bytes(range(16))
PAGE = bytes(index * 7 % 251 for index in range(3000))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_page(tmp_path / "page", LAYOUT, HASH, PAGE)
    return tmp_path / "page"


def read(path: Path, layout: PageLayout = LAYOUT, page_hash: bytes = HASH) -> bytes:
    memory = bytearray(layout.page_bytes)
    read_page(path, layout, page_hash, memoryview(memory))
    return bytes(memory)


def test_a_page_comes_back_as_it_was(path: Path) -> None:
    assert read(path) == PAGE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in path.parent.iterdir()] == ["page"], "nothing is left of writing it"


@pytest.mark.parametrize("offset", [*range(HEADER_BYTES - 4), HEADER_BYTES, HEADER_BYTES + 1500, HEADER_BYTES + 2999])
def test_any_changed_byte_is_found(path: Path, offset: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 16
    path.write_bytes(raw)
    with pytest.raises(DamagedPage):
        read(path)


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 2999, HEADER_BYTES + 3001])
def test_a_file_of_another_length_is_no_page(path: Path, length: int) -> None:
    path.write_bytes((path.read_bytes() + b"x")[:length])
    with pytest.raises(DamagedPage, match=f"{length} bytes"):
        read(path)


def test_a_page_of_another_hash_or_layout_is_not_taken(path: Path) -> None:
    for layout, page_hash in ((LAYOUT, HASH[::-1]), (replace(LAYOUT, model_digest="other"), HASH)):
        with pytest.raises(DamagedPage, match="of another page"):
            read(path, layout, page_hash)


def test_links_are_not_followed(path: Path) -> None:
    link = path.with_name("link")
    link.symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"):
        read(link)
    link.unlink()
    link.mkdir()
    with pytest.raises(DamagedPage):
        read(link)


def test_what_is_not_there_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "page")


@contextmanager
def longest_file(num_bytes: int) -> Iterator[None]:
    """Of those that this process writes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("room", [0, 2000])
def test_a_page_for_which_there_is_no_room_leaves_nothing(tmp_path: Path, room: int) -> None:
    with longest_file(room), pytest.raises(OSError, match="File too large"):
        write_page(tmp_path / "page", LAYOUT, HASH, PAGE)
    assert list(tmp_path.iterdir()) == []


def test_two_that_write_one_page_at_a_time_both_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writev = os.writev

    def write_amid_another(fd: int, buffers: Sequence[bytes]) -> int:
        monkeypatch.setattr(os, "writev", writev)
        write_page(tmp_path / "page", LAYOUT, HASH, PAGE)
        return writev(fd, buffers)

    monkeypatch.setattr(os, "writev", write_amid_another)
    write_page(tmp_path / "page", LAYOUT, HASH, PAGE)
    assert read(tmp_path / "page") == PAGE
    assert len(list(tmp_path.iterdir())) == 1


def test_a_page_replaces_one_that_was_damaged(path: Path) -> None:
    path.write_bytes(b"")
    write_page(path, LAYOUT, HASH, PAGE)
    assert read(path) == PAGE
