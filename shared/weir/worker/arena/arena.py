"""The arena as a worker sees it: what it can ask for, and the sequences that come to its lease."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from weir.core.life import Attempt
from weir.engine.messages import Arrival
from weir.kv.arena.segment import Segment
from weir.kv.memory.device import ArenaMemory
from weir.kv.messages import Acquired, HandedOff, HandOffReceipt, PageChain, PrefixMatch, PrefixSource


class Arena(Protocol):
    """What a worker needs of `weir.rpc.arena.client.ArenaClient`, where each call is described."""

    @property
    def lost(self) -> asyncio.Event: ...

    @property
    def segment(self) -> Segment: ...

    @property
    def memory(self) -> ArenaMemory: ...

    @property
    def keeps_prefixes(self) -> bool: ...

    @property
    def pages_address(self) -> str: ...

    async def start(self) -> None: ...

    def set_draining(self, *, is_draining: bool) -> None: ...

    async def match(
        self,
        hashes: Sequence[bytes],
        num_pages: int,
        num_slots: int,
        most_pages_ahead: int | None = None,
        source: PrefixSource | None = None,
    ) -> PrefixMatch: ...

    async def seal(self, chain: PageChain) -> None: ...

    async def acquire(self, num_pages: int, num_slots: int) -> Acquired: ...

    async def release(
        self,
        page_ids: Sequence[int],
        slots: Sequence[int],
        chains: Sequence[PageChain] = (),
        match_ids: Sequence[int] = (),
    ) -> None: ...

    async def hand_off(
        self, slot: int, request_id: str, attempt: Attempt, to_worker_id: str, hashes: Sequence[bytes] = ()
    ) -> HandOffReceipt: ...

    def stage(self, request_id: str, pages_address: str) -> AsyncGenerator[int]: ...

    async def close(self) -> None: ...


class UnreadableRecord(Exception):
    """The record of a handed-off sequence is not there, or is that of another one: a defect."""


def read_arrival(segment: Segment, handed_off: HandedOff) -> Arrival:
    """The sequence as its record has it; who gets the arrival goes on writing its record. Raises UnreadableRecord."""
    record = segment.record(handed_off.slot)
    snapshot = record.read()
    if snapshot is None:
        problem = record.why_unreadable()
        raise UnreadableRecord(f"request {handed_off.request_id}: the record in slot {handed_off.slot}: {problem}")
    params = snapshot.params
    if (params.request_id, params.attempt) != (handed_off.request_id, handed_off.attempt):
        raise UnreadableRecord(
            f"request {handed_off.request_id}, {handed_off.attempt}: "
            f"slot {handed_off.slot} has {params.request_id}, {params.attempt}"
        )
    return Arrival.of_record(handed_off.slot, record, snapshot)
