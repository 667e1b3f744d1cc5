"""Memory of another arena of this machine, where both have their pages on devices: mapped here as long as a pull is.

Whether the other arena is on this machine is not configured: its offer names a socket and an arena, and only where that
socket answers for that arena is it so.
"""

import asyncio
import logging
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from weir.kv.memory.cuda import CudaDriverError
from weir.kv.memory.device import DeviceMemory
from weir.kv.memory.server import MEMORY_SOCKET, MemoryNotReady, fetch_memory
from weir.wire.v1 import pages_pb2

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_MAX_KNOWN = 64
_TRIED_AGAIN_S = 60.0
"""What could not be mapped: the other arena may just have been starting."""


class PeerMemories:
    """Of one arena. `open_memory`: maps such memory to be read by this arena's device; None: its pages are on none."""

    def __init__(self, open_memory: Callable[[int, int], DeviceMemory] | None) -> None:
        self._open_memory = open_memory
        self._mapped: dict[str, str] = {}
        """Arenas that could be mapped the last time, by the addresses of their `Pages`."""
        self._refused_until_s: dict[str, float] = {}
        """Arenas that could not, and of `time.monotonic` when that is tried again."""

    def is_known(self, address: str) -> bool:
        """Whether its memory is to be counted on."""
        return address in self._mapped

    def doubt(self, address: str, *, is_wrong: bool) -> None:
        """Pages did not come from there: the next ones have checksums again. `is_wrong`: what was mapped was not its
        memory, and is not mapped for a while."""
        arena_id = self._mapped.pop(address, None)
        if arena_id is not None and is_wrong:
            _log.error(
                "the memory of arena %s at %s is not what it is taken for: its pages come over streams",
                arena_id,
                address,
            )
            self._refuse(arena_id)

    async def try_map(self, address: str, offer: pages_pb2.OfferResponse) -> DeviceMemory | None:
        """To be closed. None: it is on another machine, or not on a device, or cannot be mapped by this one."""
        if self._open_memory is None or not offer.memory_socket_path or self._is_refused(offer.arena_id):
            return None
        mapping = asyncio.ensure_future(asyncio.to_thread(self._map, Path(offer.memory_socket_path), offer.arena_id))
        try:
            memory = await asyncio.shield(mapping)
        except asyncio.CancelledError:
            mapping.add_done_callback(_close_mapped)
            raise
        except (MemoryNotReady, CudaDriverError, OSError, ValueError) as error:
            self._mapped.pop(address, None)
            self._refuse(offer.arena_id)
            _log.info("pages of arena %s at %s come over streams: %s", offer.arena_id, address, error)
            return None
        _remember(self._mapped, address, offer.arena_id)
        return memory

    def _refuse(self, arena_id: str) -> None:
        _remember(self._refused_until_s, arena_id, time.monotonic() + _TRIED_AGAIN_S)

    def _is_refused(self, arena_id: str) -> bool:
        return time.monotonic() < self._refused_until_s.get(arena_id, 0.0)

    def _map(self, path: Path, arena_id: str) -> DeviceMemory:
        assert self._open_memory is not None
        found = path.stat()
        is_own = stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid() and path.name == MEMORY_SOCKET
        if not is_own:
            raise ValueError(f"{path} is no socket of this user that is called {MEMORY_SOCKET}")
        return fetch_memory(path, arena_id, self._open_memory)


def _close_mapped(mapping: "asyncio.Future[DeviceMemory]") -> None:
    if not mapping.cancelled() and mapping.exception() is None:
        mapping.result().close()


def _remember(known: dict[str, _T], name: str, value: _T) -> None:
    known[name] = value
    while len(known) > _MAX_KNOWN:
        del known[next(iter(known))]
