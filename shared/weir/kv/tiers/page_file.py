"""One full page in one file: a header, then the page's bytes.

A file gets its name when it is whole, so that nobody reads half of one; of two writers of one page the last one wins,
with the same bytes. Nothing is synced: what a power cut leaves of a file is found out by its header or its checksum.
"""

import os
import secrets
import stat
from pathlib import Path

from weir.kv.movers.pipes import Buffer
from weir.kv.tiers.page_header import HEADER_BYTES, DamagedPage, PageLayout, check_page, make_header

_FILE_MODE = 0o600
UNFINISHED = ".new"
"""Ends the name of a file that is being written."""


def write_page(path: Path, layout: PageLayout, page_hash: bytes, page: Buffer) -> None:
    """Raises OSError: there is no room, or no folder. Nothing is left then."""
    header = make_header(layout, page_hash, page)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}{UNFINISHED}")
    fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, _FILE_MODE)
    try:
        try:
            num_written = os.writev(fd, [header, page])
            while num_written < layout.stored_bytes:  # what comes next says why
                num_written += os.write(fd, (header + bytes(page))[num_written:])
        finally:
            os.close(fd)
        unfinished.rename(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def read_page(path: Path, layout: PageLayout, page_hash: bytes, memory: memoryview) -> None:
    """Straight into `memory` of a page's length, whose bytes mean nothing if it raises: FileNotFoundError, DamagedPage,
    OSError."""
    header = bytearray(HEADER_BYTES)
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size != layout.stored_bytes:
            raise DamagedPage(f"{path} has {found.st_size} bytes, a page has {layout.stored_bytes}")
        num_read = os.preadv(fd, [header, memory], 0)
    finally:
        os.close(fd)
    if num_read != layout.stored_bytes:
        raise DamagedPage(f"{path} ended after {num_read} bytes")
    check_page(str(path), header, memory, layout, page_hash)
