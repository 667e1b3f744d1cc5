"""What the scheduler believes of the pages that each arena has cached.

Two sources: what the owner of an arena reports (`PrefixChanged`, numbered; a gap means that a message was lost, and
then a snapshot is asked for), and what was placed there a moment ago and is being computed. Both may be wrong for a
while: that costs time, never a token. An arena that is silent has nothing.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from weir.bus.messages import PrefixChanged, PrefixSnapshot
from weir.kv.geometry import PAGE_TOKENS

_PLACED_S = 10.0
"""For so long at least, at most twice, a prompt that was placed counts as cached although nobody has said so."""
_MAX_PLACED = 65_536
_SILENT_S = 30.0
_ASK_AGAIN_S = 1.0
_MAX_ARENAS = 4096

Hashes = Sequence[int]
"""Of the full pages of a prompt, chained."""
NO_HASHES: Hashes = ()


def hashes_from(packed: bytes) -> Hashes:
    """SCHEDULER_HASH_BYTES each; a broken last one is left out. No copy."""
    return memoryview(packed)[: len(packed) // 8 * 8].cast("Q") if packed else NO_HASHES


@dataclass(slots=True)
class _ArenaPrefixes:
    heard_at_s: float
    incarnation: int = 0
    sequence: int = -1
    """Of the last message taken in; -1: a snapshot is needed."""
    reported: set[int] = field(default_factory=set)
    placed: set[int] = field(default_factory=set)
    placed_before: set[int] = field(default_factory=set)
    placed_since_s: float = 0.0
    asked_at_s: float = -_ASK_AGAIN_S

    def has(self, page_hash: int) -> bool:
        return page_hash in self.reported or page_hash in self.placed or page_hash in self.placed_before


class PrefixView:
    """By arena id: a host's, or a worker's that has memory of its own."""

    def __init__(self) -> None:
        self._arenas: dict[str, _ArenaPrefixes] = {}
        self._num_gaps = 0

    def __len__(self) -> int:
        return len(self._arenas)

    def num_cached_tokens(self, arena_id: str, hashes: Hashes) -> int:
        """The longest prefix that is there. A chain goes from its end, so half of what is left is looked at each time:
        a page that is there has those before it."""
        arena = self._arenas.get(arena_id)
        if arena is None or not hashes or not arena.has(hashes[0]):
            return 0
        reported, placed, before = arena.reported, arena.placed, arena.placed_before
        found, missing = 0, len(hashes)
        while missing - found > 1:
            middle = (found + missing) // 2
            page_hash = hashes[middle]
            if page_hash in reported or page_hash in placed or page_hash in before:
                found = middle
            else:
                missing = middle
        return (found + 1) * PAGE_TOKENS

    def num_reported_tokens(self, arena_id: str, hashes: Hashes) -> int:
        """As `num_cached_tokens`, without what is only about to be computed there."""
        arena = self._arenas.get(arena_id)
        if arena is None:
            return 0
        return PAGE_TOKENS * bisect_left(hashes, True, key=lambda page_hash: page_hash not in arena.reported)

    def deepest(self, arena_ids: Sequence[str], hashes: Hashes) -> tuple[str, ...]:
        """Those that have the longest prefix; none if nobody has any of it."""
        holders = [(i, self._arenas[i]) for i in arena_ids if i in self._arenas]
        holders = [(arena_id, arena) for arena_id, arena in holders if hashes and arena.has(hashes[0])]
        found, missing = 0, len(hashes)
        while missing - found > 1 and holders:
            middle = (found + missing) // 2
            deeper = [(arena_id, arena) for arena_id, arena in holders if arena.has(hashes[middle])]
            if deeper:
                holders, found = deeper, middle
            else:
                missing = middle
        return tuple(arena_id for arena_id, _ in holders)

    def place(self, arena_id: str, hashes: Hashes, now_s: float) -> None:
        """A prompt is about to be computed there: who begins alike should go there too."""
        arena = self._arenas.get(arena_id)
        if arena is None or not hashes:
            return
        if now_s - arena.placed_since_s > _PLACED_S or len(arena.placed) > _MAX_PLACED:
            arena.placed_before, arena.placed, arena.placed_since_s = arena.placed, set(), now_s
        arena.placed.update(hashes)

    def change(self, message: PrefixChanged, now_s: float) -> None:
        """A KV event. One that comes late or twice is passed over; after a gap a snapshot is needed."""
        arena = self._arenas.get(message.arena_id)
        if arena is None:
            if len(self._arenas) >= _MAX_ARENAS:
                return
            arena = self._arenas[message.arena_id] = _ArenaPrefixes(now_s, message.incarnation)
        if message.incarnation < arena.incarnation:
            return
        arena.heard_at_s = now_s
        if message.incarnation == arena.incarnation and message.sequence <= arena.sequence:
            return
        if message.sequence == 0:
            arena.reported.clear()
        elif message.incarnation != arena.incarnation or message.sequence != arena.sequence + 1:
            self._num_gaps += arena.sequence >= 0
            arena.incarnation, arena.sequence = message.incarnation, -1
            return
        arena.incarnation, arena.sequence = message.incarnation, message.sequence
        evicted = hashes_from(message.evicted)
        for pages in (arena.reported, arena.placed, arena.placed_before):
            pages.difference_update(evicted)
        arena.reported.update(hashes_from(message.added))
        if message.num_pages is not None and len(arena.reported) != message.num_pages:
            self._num_gaps += 1
            arena.sequence = -1

    def replace(self, snapshot: PrefixSnapshot, now_s: float) -> None:
        """A snapshot, as of the event of its number."""
        arena = self._arenas.get(snapshot.arena_id)
        if arena is None or snapshot.incarnation < arena.incarnation:
            return
        if snapshot.incarnation == arena.incarnation and snapshot.sequence < arena.sequence:
            return
        arena.incarnation, arena.sequence, arena.heard_at_s = snapshot.incarnation, snapshot.sequence, now_s
        arena.reported = set(hashes_from(snapshot.hashes))

    def take_unknown(self, now_s: float) -> tuple[str, ...]:
        """Arenas whose snapshot should be asked for now; the same one not again within a second."""
        unknown = []
        for arena_id, arena in self._arenas.items():
            if arena.sequence < 0 and now_s - arena.asked_at_s >= _ASK_AGAIN_S:
                arena.asked_at_s = now_s
                unknown.append(arena_id)
        return tuple(unknown)

    def forget_silent(self, now_s: float) -> None:
        """Drops what nobody has spoken of for long: its owner is gone."""
        for arena_id in [i for i, one in self._arenas.items() if now_s - one.heard_at_s > _SILENT_S]:
            del self._arenas[arena_id]

    def metrics(self) -> dict[str, float]:
        return {
            "prefix_arenas": float(len(self._arenas)),
            "prefix_pages_known": float(sum(len(arena.reported) for arena in self._arenas.values())),
            "prefix_gaps_total": float(self._num_gaps),
        }
