"""What the scheduler believes of the pages that each memory has cached.

Two sources: what the owner of a memory says (`PrefixChanged`, numbered; a gap means that a message was lost, and then
the whole is asked for), and what was placed there a moment ago and is being computed. Both may be wrong for a while:
that costs time, never a token. A memory that says nothing has nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from weir.bus.prefix_messages import PrefixChanged, PrefixSnapshot
from weir.kv.geometry import PAGE_TOKENS

_PLACED_S = 10.0
"""For so long at least, at most twice, a prompt that was placed counts as cached although nobody has said so."""
_MAX_PLACED = 65_536
_SILENT_S = 30.0
_ASK_AGAIN_S = 1.0
_MAX_MEMORIES = 4096

Hashes = Sequence[int]
"""Of the full pages of a prompt, chained."""
NO_HASHES: Hashes = ()


def hashes_from(packed: bytes) -> Hashes:
    """SCHEDULER_HASH_BYTES each; a broken last one is left out. No copy."""
    return memoryview(packed)[: len(packed) // 8 * 8].cast("Q") if packed else NO_HASHES


@dataclass(slots=True)
class _Memory:
    heard_at_s: float
    incarnation: int = 0
    sequence: int = -1
    """Of the last message taken in; -1: the whole is needed."""
    told: set[int] = field(default_factory=set)
    placed: set[int] = field(default_factory=set)
    placed_before: set[int] = field(default_factory=set)
    placed_since_s: float = 0.0
    asked_at_s: float = -_ASK_AGAIN_S

    def has(self, page_hash: int) -> bool:
        return page_hash in self.told or page_hash in self.placed or page_hash in self.placed_before


class PrefixView:
    """By memory id: an arena's, or a worker's that has memory of its own."""

    def __init__(self) -> None:
        self._memories: dict[str, _Memory] = {}
        self._num_gaps = 0

    def __len__(self) -> int:
        return len(self._memories)

    def num_cached_tokens(self, arena_id: str, hashes: Hashes) -> int:
        """The longest prefix that is there. A chain goes from its end, so half of what is left is looked at each time:
        a page that is there has those before it."""
        memory = self._memories.get(arena_id)
        if memory is None or not hashes or not memory.has(hashes[0]):
            return 0
        told, placed, before = memory.told, memory.placed, memory.placed_before
        found, missing = 0, len(hashes)
        while missing - found > 1:
            middle = (found + missing) // 2
            page_hash = hashes[middle]
            if page_hash in told or page_hash in placed or page_hash in before:
                found = middle
            else:
                missing = middle
        return (found + 1) * PAGE_TOKENS

    def deepest(self, arena_ids: Sequence[str], hashes: Hashes) -> tuple[str, ...]:
        """Those that have the longest prefix; none if nobody has any of it."""
        holders = [(i, self._memories[i]) for i in arena_ids if i in self._memories]
        holders = [(arena_id, memory) for arena_id, memory in holders if hashes and memory.has(hashes[0])]
        found, missing = 0, len(hashes)
        while missing - found > 1 and holders:
            middle = (found + missing) // 2
            deeper = [(arena_id, memory) for arena_id, memory in holders if memory.has(hashes[middle])]
            if deeper:
                holders, found = deeper, middle
            else:
                missing = middle
        return tuple(arena_id for arena_id, _ in holders)

    def place(self, arena_id: str, hashes: Hashes, now_s: float) -> None:
        """A prompt is about to be computed there: who begins alike should go there too."""
        memory = self._memories.get(arena_id)
        if memory is None or not hashes:
            return
        if now_s - memory.placed_since_s > _PLACED_S or len(memory.placed) > _MAX_PLACED:
            memory.placed_before, memory.placed, memory.placed_since_s = memory.placed, set(), now_s
        memory.placed.update(hashes)

    def change(self, message: PrefixChanged, now_s: float) -> None:
        """What a memory says. One that comes late or twice is passed over; after a gap the whole is wanted."""
        memory = self._memories.get(message.arena_id)
        if memory is None:
            if len(self._memories) >= _MAX_MEMORIES:
                return
            memory = self._memories[message.arena_id] = _Memory(now_s, message.incarnation)
        if message.incarnation < memory.incarnation:
            return
        memory.heard_at_s = now_s
        if message.incarnation == memory.incarnation and message.sequence <= memory.sequence:
            return
        if message.sequence == 0:
            memory.told.clear()
        elif message.incarnation != memory.incarnation or message.sequence != memory.sequence + 1:
            self._num_gaps += memory.sequence >= 0
            memory.incarnation, memory.sequence = message.incarnation, -1
            return
        memory.incarnation, memory.sequence = message.incarnation, message.sequence
        evicted = hashes_from(message.evicted)
        for pages in (memory.told, memory.placed, memory.placed_before):
            pages.difference_update(evicted)
        memory.told.update(hashes_from(message.added))
        if message.num_pages is not None and len(memory.told) != message.num_pages:
            self._num_gaps += 1
            memory.sequence = -1

    def replace(self, snapshot: PrefixSnapshot, now_s: float) -> None:
        """The whole of a memory, as of the message of its number."""
        memory = self._memories.get(snapshot.arena_id)
        if memory is None or snapshot.incarnation < memory.incarnation:
            return
        if snapshot.incarnation == memory.incarnation and snapshot.sequence < memory.sequence:
            return
        memory.incarnation, memory.sequence, memory.heard_at_s = snapshot.incarnation, snapshot.sequence, now_s
        memory.told = set(hashes_from(snapshot.hashes))

    def take_unknown(self, now_s: float) -> tuple[str, ...]:
        """Memories whose whole should be asked for now; the same one not again within a second."""
        unknown = []
        for arena_id, memory in self._memories.items():
            if memory.sequence < 0 and now_s - memory.asked_at_s >= _ASK_AGAIN_S:
                memory.asked_at_s = now_s
                unknown.append(arena_id)
        return tuple(unknown)

    def forget_silent(self, now_s: float) -> None:
        """Drops what nobody has spoken of for long: its owner is gone."""
        for arena_id in [i for i, one in self._memories.items() if now_s - one.heard_at_s > _SILENT_S]:
            del self._memories[arena_id]

    def metrics(self) -> dict[str, float]:
        return {
            "prefix_memories": float(len(self._memories)),
            "prefix_pages_known": float(sum(len(memory.told) for memory in self._memories.values())),
            "prefix_gaps_total": float(self._num_gaps),
        }
