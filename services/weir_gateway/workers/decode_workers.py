"""The decode workers that the registry shows: where to look for a sequence whose worker has gone."""

import asyncio
import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Never

from weir.bus.codec import MalformedMessage, decode
from weir.bus.messages import WorkerRecord
from weir.bus.protocol import Bus, BusError, KvEntry
from weir.bus.subjects import WORKER_TTL_S, Subjects
from weir.core.clock import Clock
from weir_gateway.workers.connection import WorkerEndpoint

logger = logging.getLogger(__name__)

_RETRY_S = 0.5
_MAX_WORKERS = 1024
_DECODE = "decode"


@dataclass(frozen=True, slots=True)
class _Entry:
    record: WorkerRecord
    heard_at_s: float


class DecodeWorkers:
    """Kept while the bus is away, for just then it may be needed. Whoever is named here may have gone meanwhile."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # heard last: last
        self._changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.num_malformed = 0

    @property
    def changed(self) -> "asyncio.Future[None]":
        """Done when the next worker comes; then there is another one."""
        return self._changed

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._entries

    def serving(self, model: str) -> list[WorkerEndpoint]:
        """Those of the model, as far as they were heard when anybody was heard last."""
        return [_endpoint(entry) for entry in self._heard() if entry.record.model == model]

    def longest_context(self, model: str) -> int | None:
        """Tokens of the longest sequence that one of them takes; None: none is known."""
        return max(
            (entry.record.max_context_tokens for entry in self._heard() if entry.record.model == model), default=None
        )

    def peers_of(self, worker_id: str) -> list[WorkerEndpoint]:
        """The others that share its memory: where its sequences can be. None if it is not known."""
        known = self._entries.get(worker_id)
        return [] if known is None else [_endpoint(one) for one in self._others(known) if _share_memory(one, known)]

    def has_others(self, worker_id: str) -> bool:
        """Whether another worker, wherever it is, serves its model."""
        known = self._entries.get(worker_id)
        return known is not None and bool(self._others(known))

    def put(self, record: WorkerRecord) -> None:
        """A registry entry came."""
        if record.role != _DECODE:
            return
        is_new = record.worker_id not in self._entries
        self._entries[record.worker_id] = _Entry(record, self._clock.now_s())
        self._entries.move_to_end(record.worker_id)
        if len(self._entries) > _MAX_WORKERS:
            self._entries.popitem(last=False)
        if is_new:
            self._changed.set_result(None)
            self._changed = asyncio.get_running_loop().create_future()

    async def follow(self, bus: Bus, subjects: Subjects) -> Never:
        """Runs until it is cancelled. The bus stays the caller's."""
        while True:
            try:
                bucket = await bus.open_bucket(subjects.workers_bucket)
                async for entry in bucket.watch():
                    self._take(entry)
            except BusError as error:
                logger.debug("watching the registry: %s; again", error)
            except Exception:  # the boundary of a task that nobody awaits
                logger.exception("watching the registry failed")
            await asyncio.sleep(_RETRY_S)

    def _take(self, entry: KvEntry) -> None:
        if entry.value is None:
            return
        try:
            self.put(decode(WorkerRecord, entry.value))
        except MalformedMessage as error:
            self.num_malformed += 1
            logger.debug("malformed entry %s of the registry: %s", entry.key, error)

    def _others(self, known: _Entry) -> list[_Entry]:
        """Of its model."""
        return [
            entry
            for entry in self._heard()
            if entry.record.worker_id != known.record.worker_id and entry.record.model == known.record.model
        ]

    def _heard(self) -> list[_Entry]:
        """As far as they were heard when anybody was heard last."""
        newest_s = max((entry.heard_at_s for entry in self._entries.values()), default=0.0)
        return [entry for entry in self._entries.values() if newest_s - entry.heard_at_s <= WORKER_TTL_S]


def _share_memory(one: _Entry, other: _Entry) -> bool:
    return one.record.host_id == other.record.host_id


def _endpoint(entry: _Entry) -> WorkerEndpoint:
    return WorkerEndpoint(entry.record.worker_id, entry.record.address)
