"""Claims an arena: its segment and, where its pages are on a device, their memory."""

import logging
from dataclasses import dataclass

from weir.core.errors import Unavailable
from weir.kv.arena.lease import LeaseTable
from weir.kv.arena.segment import Segment, SegmentError, claim_segment
from weir.kv.geometry import ArenaGeometry
from weir.kv.memory.cuda import CudaDriverError
from weir.kv.memory.device import try_memory_kind
from weir.kv.memory.page_access import DevicePageAccess, HostPageAccess, PageAccess
from weir.kv.memory.server import MemoryServer
from weir.kv.memory.slabs import SlabServer
from weir.model.device_check import check_device
from weir.runtime.config import ConfigError
from weir_transfer.config import TransferConfig, with_model_shape
from weir_transfer.fence import OpenProcess
from weir_transfer.sizing import size_arena

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClaimedArena:
    """`memory_server` and `slab_server` None: the pages are in the segment, and weights are in each worker.

    `size_text`: one line on how large it is.
    """

    segment: Segment
    memory_server: MemoryServer | None
    slab_server: SlabServer | None = None
    size_text: str = ""

    @property
    def pages(self) -> PageAccess:
        if self.memory_server is None:
            return HostPageAccess(self.segment.pages)
        server = self.memory_server
        return DevicePageAccess(lambda: server.memory, self.segment.geometry.page_bytes)


def claim_arena(config: TransferConfig, open_process: OpenProcess) -> ClaimedArena:
    """Takes over what an earlier transfer service left, or makes a new arena. Takes seconds.

    Raises DeviceMissing, ModelError, ConfigError for an arena too small for the model, Unavailable if there is too
    little memory.
    """
    check_device(config.device)
    complete = with_model_shape(config)
    try:
        size = size_arena(config, complete)
    except CudaDriverError as error:
        raise Unavailable(str(error)) from error
    except ValueError as error:
        if not config.arena_bytes:  # of what is free now: it may be more in a moment
            raise Unavailable(str(error)) from error
        raise ConfigError(str(error)) from error
    try:
        segment, memory_server = _claim(complete, size.geometry, open_process)
    except (SegmentError, CudaDriverError) as error:
        raise Unavailable(str(error)) from error
    kind = try_memory_kind(config.device)
    slab_server = SlabServer(config.weights_socket_path, kind) if kind is not None else None
    return ClaimedArena(segment, memory_server, slab_server, size.text)


def _claim(
    config: TransferConfig, geometry: ArenaGeometry, open_process: OpenProcess
) -> tuple[Segment, MemoryServer | None]:
    path, kind = config.segment_path, try_memory_kind(config.device)
    claimed = claim_segment(path, geometry, config.model_digest)
    if kind is None:
        return claimed.segment, None
    if not claimed.is_new and not _has_living_worker(claimed.segment, open_process):
        _log.warning("left-over %s removed: the memory of its pages went with the last of its workers", path)
        claimed.segment.unlink()
        claimed.segment.close()
        claimed = claim_segment(path, geometry, config.model_digest)
    segment, num_bytes = claimed.segment, geometry.page_memory_bytes
    try:
        memory = kind.create(num_bytes) if claimed.is_new else None
    except BaseException:
        segment.unlink()
        segment.close()
        raise
    return segment, MemoryServer(config.memory_socket_path, segment.arena_id, num_bytes, kind.open, memory)


def _has_living_worker(segment: Segment, open_process: OpenProcess) -> bool:
    """Whoever has a lease maps the pages, or is about to."""
    for lease in LeaseTable(segment.lease_rows, segment.counters).all():
        handle = open_process(lease.process)
        if handle is not None:
            handle.close()
            return True
    return False
