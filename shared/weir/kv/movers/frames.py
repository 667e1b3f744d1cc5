"""What goes over a page stream, between the transfer service that has pages and the one that pulls them.

    puller  HELLO        which transfer, with the ticket that its offer named
            ASK          numbers of pages in the offer, in the order in which they are to come
    source  PAGE         one page: header and bytes
            GONE         that page is not what was offered any more

Every frame begins with a header of 64 bytes. A page is named by its number in the offer and by what the offer said of
it, its generation and checksum: whoever sends another page, or the same one written anew, is found out.
"""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from weir.core.life import Attempt, attempt_of

HEADER_BYTES = 64
ID_BYTES = 16
MAX_PAGE_BYTES = 256 << 20
MAX_ASKED = 1024
"""Pages of one ASK."""
MAX_PAGES = 1 << 20
"""Of one transfer."""

_MAGIC = b"WPGS"
_VERSION = 1
_HEADER = struct.Struct("<4sBBxx16sIIIIQQ4xI")
"""Magic, version, kind, transfer, dispatch, adoption, number, generation, length of what follows, checksum, CRC-32 of
all before it."""
_CRC = struct.Struct("<I")
_INDEX_DTYPE = np.dtype("<u4")


class MalformedFrame(ValueError):
    """Nothing that comes after it on this stream can be trusted."""


class FrameKind(IntEnum):
    HELLO = 1
    ASK = 2
    PAGE = 3
    GONE = 4


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """`number`: of a page in its offer, for PAGE and GONE. `num_bytes`: of what follows. `checksum`: XXH3-64 of it."""

    kind: FrameKind
    transfer_id: bytes
    attempt: Attempt
    number: int = 0
    generation: int = 0
    num_bytes: int = 0
    checksum: int = 0


_MAX_NUM_BYTES = {
    FrameKind.HELLO: ID_BYTES,
    FrameKind.ASK: MAX_ASKED * _INDEX_DTYPE.itemsize,
    FrameKind.PAGE: MAX_PAGE_BYTES,
    FrameKind.GONE: 0,
}
assert _HEADER.size == HEADER_BYTES


def pack_header(header: FrameHeader) -> bytes:
    attempt = header.attempt
    fields = (header.transfer_id, attempt.dispatch, attempt.adoption, header.number, header.generation)
    packed = _HEADER.pack(_MAGIC, _VERSION, header.kind, *fields, header.num_bytes, header.checksum, 0)
    return packed[: -_CRC.size] + _CRC.pack(zlib.crc32(packed[: -_CRC.size]))


def unpack_header(raw: bytes | bytearray | memoryview) -> FrameHeader:
    """Raises MalformedFrame, also for one that says more bytes than a frame of its kind may have."""
    if len(raw) != HEADER_BYTES:
        raise MalformedFrame(f"a header has {HEADER_BYTES} bytes, not {len(raw)}")
    magic, version, kind, transfer_id, dispatch, adoption, number, generation, num_bytes, checksum, crc = (
        _HEADER.unpack(raw)
    )
    if magic != _MAGIC or version != _VERSION:
        raise MalformedFrame(
            f"begins with {magic!r} and version {version}: this is no page stream of version {_VERSION}"
        )
    if crc != zlib.crc32(raw[: -_CRC.size]):
        raise MalformedFrame("the header's CRC is wrong")
    if kind not in _MAX_NUM_BYTES:
        raise MalformedFrame(f"there is no frame of kind {kind}")
    known = FrameKind(kind)
    if num_bytes > _MAX_NUM_BYTES[known]:
        raise MalformedFrame(f"{known.name} of {num_bytes} bytes: at most {_MAX_NUM_BYTES[known]}")
    attempt = attempt_of(dispatch, adoption)
    return FrameHeader(known, transfer_id, attempt, number, generation, num_bytes, checksum)


def pack_numbers(numbers: Sequence[int]) -> bytes:
    """Of an ASK."""
    return np.asarray(numbers, _INDEX_DTYPE).tobytes()


def unpack_numbers(raw: bytes | bytearray | memoryview) -> NDArray[np.uint32]:
    """Raises MalformedFrame."""
    if not raw or len(raw) % _INDEX_DTYPE.itemsize:
        raise MalformedFrame(f"an ASK of {len(raw)} bytes: must name pages, four bytes each")
    return np.frombuffer(raw, _INDEX_DTYPE)
