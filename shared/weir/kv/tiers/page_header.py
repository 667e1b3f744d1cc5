"""What lies before the bytes of a page wherever it rests outside the arena, so that it is taken for no other one:

header  magic, version, length of the page, layout, hash of the page, XXH3-64 of its bytes, CRC-32 of all before it
"""

import struct
import zlib
from dataclasses import dataclass
from hashlib import blake2b

import xxhash

from weir.kv.geometry import PAGE_TOKENS
from weir.kv.movers.pipes import Buffer
from weir.kv.prefixes import HASH_BYTES

VERSION = 1
_MAGIC = b"WEIRPAGE"
_HEADER = struct.Struct(f"<8sI4xQ{HASH_BYTES}s{HASH_BYTES}sQ")
_CRC = struct.Struct("<I4x")
HEADER_BYTES = _HEADER.size + _CRC.size


class DamagedPage(Exception):
    """What lies there is not, whole and unchanged, the page that its name says."""


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
    def stored_bytes(self) -> int:
        """Of a page with its header."""
        return HEADER_BYTES + self.page_bytes


def make_header(layout: PageLayout, page_hash: bytes, page: Buffer) -> bytes:
    checksum = xxhash.xxh3_64_intdigest(page)
    packed = _HEADER.pack(_MAGIC, VERSION, layout.page_bytes, layout.digest, page_hash, checksum)
    return packed + _CRC.pack(zlib.crc32(packed))


def check_page(where: str, header: Buffer, page: Buffer, layout: PageLayout, page_hash: bytes) -> None:
    """Raises DamagedPage, naming `where`, unless this is the page of this hash with its header."""
    checksum = _checksum_in(bytes(header), layout, page_hash)
    if checksum is None:
        raise DamagedPage(f"the header of {where} is of another page, or changed")
    if xxhash.xxh3_64_intdigest(page) != checksum:
        raise DamagedPage(f"the bytes of {where} have changed")


def _checksum_in(header: bytes, layout: PageLayout, page_hash: bytes) -> int | None:
    """None: it is not the header of this page."""
    packed = header[: _HEADER.size]
    magic, version, page_bytes, digest, named, checksum = _HEADER.unpack(packed)
    wanted = (_MAGIC, VERSION, layout.page_bytes, layout.digest, page_hash)
    is_sound = _CRC.unpack_from(header, _HEADER.size)[0] == zlib.crc32(packed)
    return int(checksum) if is_sound and (magic, version, page_bytes, digest, named) == wanted else None
