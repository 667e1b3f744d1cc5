"""One full page in one file: a header, then the page's bytes.

    header  magic, version, length of the page, layout, hash of the page, XXH3-64 of its bytes, CRC-32 of all before it

A file gets its name when it is whole, so that nobody reads half of one; of two writers of one page the last one wins,
with the same bytes. Nothing is synced: what a power cut leaves of a file is found out by its header or its checksum.
"""

import os
import secrets
import stat
import struct
import zlib
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import xxhash

from weir.kv.geometry import PAGE_TOKENS
from weir.kv.movers.pipes import Buffer
from weir.kv.prefixes import HASH_BYTES

VERSION = 1
_MAGIC = b"WEIRPAGE"
_HEADER = struct.Struct(f"<8sI4xQ{HASH_BYTES}s{HASH_BYTES}sQ")
_CRC = struct.Struct("<I4x")
HEADER_BYTES = _HEADER.size + _CRC.size
_FILE_MODE = 0o600
UNFINISHED = ".new"
"""Ends the name of a file that is being written."""


class DamagedPage(Exception):
    """A file does not hold, whole and unchanged, the page that its name says."""


@dataclass(frozen=True, slots=True)
class PageLayout:
    """What pages must have in common to be taken for one another, besides their hashes."""

    model_digest: str
    page_bytes: int

    @property
    def digest(self) -> bytes:
        """HASH_BYTES bytes."""
        parts = (VERSION, self.model_digest, self.page_bytes, PAGE_TOKENS)
        return blake2b(repr(parts).encode(), digest_size=HASH_BYTES).digest()

    @property
    def file_bytes(self) -> int:
        return HEADER_BYTES + self.page_bytes


def write_page(path: Path, layout: PageLayout, page_hash: bytes, page: Buffer) -> None:
    """Raises OSError: there is no room, or no folder. Nothing is left then."""
    checksum = xxhash.xxh3_64_intdigest(page)
    packed = _HEADER.pack(_MAGIC, VERSION, layout.page_bytes, layout.digest, page_hash, checksum)
    header = packed + _CRC.pack(zlib.crc32(packed))
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}{UNFINISHED}")
    fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, _FILE_MODE)
    try:
        try:
            num_written = os.writev(fd, [header, page])
            while num_written < layout.file_bytes:  # what comes next says why
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
        if not stat.S_ISREG(found.st_mode) or found.st_size != layout.file_bytes:
            raise DamagedPage(f"{path} has {found.st_size} bytes, a page has {layout.file_bytes}")
        num_read = os.preadv(fd, [header, memory], 0)
    finally:
        os.close(fd)
    if num_read != layout.file_bytes:
        raise DamagedPage(f"{path} ended after {num_read} bytes")
    checksum = _checksum_in(header, layout, page_hash)
    if checksum is None:
        raise DamagedPage(f"the header of {path} is of another page, or changed")
    if xxhash.xxh3_64_intdigest(memory) != checksum:
        raise DamagedPage(f"the bytes of {path} have changed")


def _checksum_in(header: bytearray, layout: PageLayout, page_hash: bytes) -> int | None:
    """None: it is not the header of this page."""
    packed = header[: _HEADER.size]
    magic, version, page_bytes, digest, named, checksum = _HEADER.unpack(packed)
    wanted = (_MAGIC, VERSION, layout.page_bytes, layout.digest, page_hash)
    is_sound = _CRC.unpack_from(header, _HEADER.size)[0] == zlib.crc32(packed)
    return int(checksum) if is_sound and (magic, version, page_bytes, digest, named) == wanted else None
