"""Where everything lies in a segment.

    0       header           magic, version, geometry, arena id, model digest, CRC; written once
    4096    counters         the next lease id and attachment, the starts so far; outlive a restart
            lease table      MAX_LEASES rows of LEASE_DTYPE
            slot table       num_slots rows of SLOT_DTYPE
            page table       num_pages rows of PAGE_DTYPE
            records          num_slots sequence records (`weir.kv.records.record`)
            annexes          num_slots times ANNEX_BYTES (`weir.kv.records.annex`); a hole in the file until written
            pages            num_pages pages of page_bytes; none of them if they are on a device

Every part begins on a 4096-byte boundary. A change of any of this raises LAYOUT_VERSION.
"""

import struct
import zlib
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from weir.core.fields import format_size
from weir.kv.geometry import ArenaGeometry, least_arena_pages, num_reservable_pages

LAYOUT_VERSION = 11
MAX_LEASES = 256
MAX_DIGEST_BYTES = 128
NO_LEASE = 0
"""Owner of what nobody owns."""
TRANSFER_LEASE = (1 << 32) - 1
"""Of the transfer service itself, for pages that pass between hosts: in no lease table."""

PAGE_DTYPE = np.dtype(
    [
        ("owner", "<u4"),
        ("generation", "<u4"),
        ("refcount", "<u4"),
        ("state", "<u4"),
        ("last_use", "<u8"),
        ("hash", "<u8", (2,)),
    ]
)
SLOT_DTYPE = np.dtype(
    [
        ("owner", "<u4"),
        ("acquirer", "<u4"),
        ("generation", "<u4"),
        ("state", "<u4"),
        ("moved_request_id", "S64"),
        ("moved_dispatch", "<u4"),
        ("moved_adoption", "<u4"),
        ("moved_from", "<u4"),
        ("moved_num_pages", "<u4"),
    ]
)
LEASE_DTYPE = np.dtype(
    [
        ("lease_id", "<u4"),
        ("state", "<u4"),
        ("pid", "<u4"),
        ("reserved", "<u4"),
        ("pid_start_ticks", "<u8"),
        ("worker_id", "S64"),
        ("role", "S16"),
    ]
)
COUNTERS_DTYPE = np.dtype([("next_lease_id", "<u4"), ("incarnation", "<u4"), ("next_attachment", "<u8")])

RECORD_HEADER_BYTES = 128
"""One of the two header slots of a sequence record."""
RECORD_PARAMS_BYTES = 4608
"""Room for the parameters of a sequence, of which `weir.kv.records.format.MAX_PARAMS_BYTES` are used at most."""
RECORD_LOGPROBS_BYTES = 2048
"""Room for `weir.kv.records.format.LogprobRing`."""
ANNEX_BYTES = 64 << 10
"""Room beside each record for what few sequences have, its checksum included."""

_MAGIC = b"WEIRARNA"
_ALIGNMENT_BYTES = 4096
_HEADER = struct.Struct("<8sI I Q Q Q Q Q Q Q 32s 128s")
_CRC = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CRC.size


class PageState(IntEnum):
    """State of a page.

        FREE ──acquire──> LEASED ──release──> FREE            owner = the lease
                            ├──orphan──> ORPHANED ──> FREE    its process is dead; or adopted: LEASED
                            └── seal ──> SHARED <──> CACHED ──evict──> FREE

    A sealed page (SHARED or CACHED) is full, computed and never written again. It has a hash and no owner; SHARED as
    long as leases pin it (its reference count), CACHED, a reusable prefix, when none does.
    """

    FREE = 0
    LEASED = 1
    ORPHANED = 2
    CACHED = 3
    SHARED = 4


class SlotState(IntEnum):
    """State of a slot; values as for pages."""

    FREE = 0
    LEASED = 1
    ORPHANED = 2


class SegmentMismatch(Exception):
    """A file is not a segment of this version, or not of the expected geometry or model; the message says which."""


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """The first bytes of a segment. `arena_id` is new with every segment and survives a restart over it.

    `pid_namespace` is the one that the pids in the lease table belong to.
    """

    geometry: ArenaGeometry
    arena_id: str
    model_digest: str
    pid_namespace: int


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """Byte offsets of the parts of a segment."""

    counters: int
    leases: int
    slots: int
    pages: int
    records: int
    record_bytes: int
    annexes: int
    page_data: int
    total_bytes: int

    @property
    def memory_bytes(self) -> int:
        """What a new segment takes: all of the file but the annexes."""
        return self.total_bytes - (self.page_data - self.annexes)


def layout_of(geometry: ArenaGeometry) -> SegmentLayout:
    """The offsets that follow from the geometry."""
    record_bytes = _aligned(
        2 * RECORD_HEADER_BYTES
        + RECORD_PARAMS_BYTES
        + RECORD_LOGPROBS_BYTES
        + 4 * (geometry.max_context_tokens + geometry.max_pages_per_sequence)
    )
    counters = _ALIGNMENT_BYTES
    leases = counters + _ALIGNMENT_BYTES
    slots = leases + _aligned(MAX_LEASES * LEASE_DTYPE.itemsize)
    pages = slots + _aligned(geometry.num_slots * SLOT_DTYPE.itemsize)
    records = pages + _aligned(geometry.num_pages * PAGE_DTYPE.itemsize)
    annexes = records + geometry.num_slots * record_bytes
    page_data = annexes + geometry.num_slots * ANNEX_BYTES
    total_bytes = page_data + (0 if geometry.pages_on_device else geometry.page_memory_bytes)
    return SegmentLayout(counters, leases, slots, pages, records, record_bytes, annexes, page_data, total_bytes)


def geometry_within(
    arena_bytes: int, page_bytes: int, num_slots: int, max_context_tokens: int, *, pages_on_device: bool = False
) -> ArenaGeometry:
    """The geometry with the most pages whose segment, or whose memory on a device, takes at most `arena_bytes`; annexes
    take theirs when they are written. Raises ValueError if no request of `max_context_tokens` could ever reserve what
    it needs.
    """
    if pages_on_device:
        return _geometry_on_device(arena_bytes, page_bytes, num_slots, max_context_tokens)
    smallest = ArenaGeometry(page_bytes, 0, num_slots, max_context_tokens)
    room_bytes = arena_bytes - layout_of(smallest).memory_bytes - _ALIGNMENT_BYTES
    num_pages = room_bytes // (page_bytes + PAGE_DTYPE.itemsize)
    if num_reservable_pages(max(0, num_pages)) < smallest.max_pages_per_sequence:
        raise ValueError(_too_small(arena_bytes, smallest))
    return ArenaGeometry(page_bytes, num_pages, num_slots, max_context_tokens)


def bytes_for_pages(geometry: ArenaGeometry) -> int:
    """The least `arena_bytes` within which `geometry_within` finds at least the pages of `geometry`."""
    if geometry.pages_on_device:
        return geometry.page_memory_bytes
    return layout_of(geometry).memory_bytes + _ALIGNMENT_BYTES


def _too_small(arena_bytes: int, shape: ArenaGeometry) -> str:
    least = replace(shape, num_pages=least_arena_pages(shape.max_pages_per_sequence) + 1)
    least_bytes = bytes_for_pages(least)
    where = " on the device" if shape.pages_on_device else ""
    return (
        f"arena_bytes {arena_bytes}: too small for one sequence of {shape.max_context_tokens} tokens in pages of "
        f"{shape.page_bytes} bytes{where}; give at least {least_bytes} ({format_size(least_bytes)}), or a smaller "
        "max_context_tokens"
    )


def _geometry_on_device(arena_bytes: int, page_bytes: int, num_slots: int, max_context_tokens: int) -> ArenaGeometry:
    num_pages = arena_bytes // page_bytes
    geometry = ArenaGeometry(page_bytes, num_pages, num_slots, max_context_tokens, pages_on_device=True)
    if num_reservable_pages(num_pages) < geometry.max_pages_per_sequence:
        raise ValueError(_too_small(arena_bytes, geometry))
    return geometry


def pack_header(header: SegmentHeader) -> bytes:
    """Raises ValueError for a digest of more than MAX_DIGEST_BYTES bytes."""
    digest = header.model_digest.encode()
    if len(digest) > MAX_DIGEST_BYTES:
        raise ValueError(f"model_digest {header.model_digest!r}: {len(digest)} bytes, at most {MAX_DIGEST_BYTES}")
    geometry = header.geometry
    packed = _HEADER.pack(
        _MAGIC,
        LAYOUT_VERSION,
        MAX_LEASES,
        geometry.page_bytes,
        geometry.num_pages,
        geometry.num_slots,
        geometry.max_context_tokens,
        int(geometry.pages_on_device),
        layout_of(geometry).total_bytes,
        header.pid_namespace,
        header.arena_id.encode(),
        digest,
    )
    return packed + _CRC.pack(zlib.crc32(packed))


def unpack_header(data: bytes, file_bytes: int) -> SegmentHeader:
    """Reads the first HEADER_BYTES of a file that is `file_bytes` long. Raises SegmentMismatch."""
    if len(data) < HEADER_BYTES or not data.startswith(_MAGIC):
        raise SegmentMismatch("it is not a segment of Weir (no magic number)")
    packed = data[: _HEADER.size]
    _, version, max_leases, *sizes, on_device, total_bytes, pid_namespace, arena_id, digest = _HEADER.unpack(packed)
    if (version, max_leases) != (LAYOUT_VERSION, MAX_LEASES):
        raise SegmentMismatch(
            f"its layout has version {version} with {max_leases} leases, this program has version {LAYOUT_VERSION} "
            f"with {MAX_LEASES}: all processes of a host must be of one version of Weir"
        )
    if _CRC.unpack_from(data, _HEADER.size)[0] != zlib.crc32(packed):
        raise SegmentMismatch("the checksum of its header is wrong")
    if file_bytes != total_bytes:
        raise SegmentMismatch(f"it has {file_bytes} bytes where its header says {total_bytes}")
    geometry = replace(ArenaGeometry(*sizes), pages_on_device=bool(on_device))
    if layout_of(geometry).total_bytes != total_bytes:
        raise SegmentMismatch(f"its header says {total_bytes} bytes, and {geometry}, which takes others")
    try:
        return SegmentHeader(geometry, arena_id.decode(), digest.rstrip(b"\0").decode(), pid_namespace)
    except UnicodeDecodeError as error:
        raise SegmentMismatch(f"a name in its header is not UTF-8 ({error.reason})") from error


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
