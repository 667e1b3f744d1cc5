"""What the scheduler believes of the pages that each arena has cached.

Two sources: what the owner of an arena reports (`PrefixChanged`, numbered; a gap means that a message was lost, and
then a snapshot is asked for), and what was placed there a moment ago and is being computed. Both may be wrong for a
while: that costs time, never a token. An arena that is silent has nothing.

Pages are kept by hash, each with a bit for every arena that has it, so that a prompt is looked up once for all arenas.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from weir.bus.prefix_news import PrefixChanged, PrefixSnapshot
from weir.kv.geometry import PAGE_TOKENS

_PLACED_S = 10.0
"""For so long at least, at most twice, a prompt that was placed counts as cached although nobody has said so."""
_MAX_PLACED = 1_000_000
_BLOCK_PAGES = 4
"""What was placed is noted by the last page of each block of so many: it is soon told page by page, and to note a page
is to reach for memory that is in no cache."""
_SILENT_S = 30.0
_ASK_AGAIN_S = 1.0
_MAX_ARENAS = 4096
_MAX_SETS = 1024

Hashes = Sequence[int]
"""Of the full pages of a prompt, chained."""
NO_HASHES: Hashes = ()


def hashes_from(packed: bytes) -> Hashes:
    """SCHEDULER_HASH_BYTES each; a broken last one is left out. No copy."""
    if not packed:
        return NO_HASHES
    num_left = len(packed) % 8
    return memoryview(packed[:-num_left] if num_left else packed).cast("Q")


class PrefixDepths:
    """How much of one prompt each arena has, looked up as it is asked for, each page once; for one decision.

    A page that is somewhere has those before it there, so half of what is left is looked at each time: first of whole
    blocks, then, in the first one that is missing, of the pages that were reported.
    """

    __slots__ = ("_before", "_bits", "_found", "_hashes", "_placed", "_reported", "_view")

    def __init__(
        self,
        view: "PrefixView",
        hashes: Hashes,
        reported: Mapping[int, int],
        placed: Mapping[int, int],
        before: Mapping[int, int],
    ) -> None:
        """The last three: bits of arenas, by hash."""
        self._view = view
        self._hashes = hashes
        self._reported, self._placed, self._before = reported.get, placed.get, before.get
        self._bits: dict[int, int] = {}
        """By the page's place in the prompt: of all three where it is the last of a block, else of those reported."""
        self._found: dict[int, tuple[int, int]] = {}
        """What `_deepest` has found."""

    def num_tokens(self, arena_id: str) -> int:
        """The longest prefix that is there."""
        return self._deepest(self._view.bit_of(arena_id))[0] * PAGE_TOKENS if self._hashes else 0

    def most_tokens(self, arena_ids: frozenset[str]) -> int:
        """That one of them has."""
        return self._deepest(self._view.bits_of(arena_ids))[0] * PAGE_TOKENS if self._hashes else 0

    def deepest(self, arena_ids: frozenset[str], max_ids: int = _MAX_ARENAS) -> tuple[int, tuple[str, ...]]:
        """(tokens, some of those that have as many), the most that one of them has; none if nobody has any of it."""
        if not self._hashes:
            return 0, ()
        num_pages, bits = self._deepest(self._view.bits_of(arena_ids))
        return num_pages * PAGE_TOKENS, tuple(islice(self._view.ids_of(bits), max_ids))

    def _deepest(self, among: int) -> tuple[int, int]:
        """(pages, who has as many)."""
        result = self._found.get(among)
        if result is not None:
            return result
        hashes = self._hashes
        found, missing, middle, held = -1, len(hashes) // _BLOCK_PAGES, 0, among
        while middle > found and middle < missing:
            bits = self._bits_at((middle + 1) * _BLOCK_PAGES - 1) & held
            if bits:
                found, held = middle, bits
            else:
                missing = middle
            middle = (found + missing) // 2
        num_pages = (found + 1) * _BLOCK_PAGES
        for page in range(num_pages, min(num_pages + _BLOCK_PAGES - 1, len(hashes))):
            bits = self._bits_at(page) & held
            if not bits:
                break
            num_pages, held = page + 1, bits
        result = self._found[among] = (num_pages, held) if num_pages else (0, 0)
        return result

    def _bits_at(self, page: int) -> int:
        bits = self._bits.get(page)
        if bits is None:
            page_hash = self._hashes[page]
            bits = self._reported(page_hash, 0)
            if page % _BLOCK_PAGES == _BLOCK_PAGES - 1:
                bits |= self._placed(page_hash, 0) | self._before(page_hash, 0)
            self._bits[page] = bits
        return bits


@dataclass(slots=True)
class _ArenaPrefixes:
    bit: int
    heard_at_s: float
    incarnation: int = 0
    sequence: int = -1
    """Of the last message taken in; -1: a snapshot is needed."""
    reported: set[int] = field(default_factory=set)
    asked_at_s: float = -_ASK_AGAIN_S
    computed_at_s: float = 0.0
    """When all that was placed there is computed, by estimate."""


class PrefixView:
    """By arena id: a host's, or a worker's that has memory of its own."""

    def __init__(self) -> None:
        self._arenas: dict[str, _ArenaPrefixes] = {}
        self._ids: dict[int, str] = {}
        """By bit."""
        self._free_bits: list[int] = []
        self._reported: dict[int, int] = {}
        """hash -> bits of the arenas that say they have it. The same of what was placed: lately, and before that."""
        self._placed: dict[int, int] = {}
        self._placed_before: dict[int, int] = {}
        self._placed_since_s = 0.0
        self._bits: dict[frozenset[str], int] = {}
        """Of sets of arenas; forgotten when an arena comes or goes."""
        self._num_gaps = 0

    def __len__(self) -> int:
        return len(self._arenas)

    def look_up(self, hashes: Hashes) -> PrefixDepths:
        """With what was placed and is being computed."""
        return PrefixDepths(self, hashes, self._reported, self._placed, self._placed_before)

    def look_up_reported(self, hashes: Hashes) -> PrefixDepths:
        """Without what is only about to be computed."""
        return PrefixDepths(self, hashes, self._reported, {}, {})

    def has_reported(self, arena_id: str, page_hash: int) -> bool:
        return bool(self._reported.get(page_hash, 0) & self.bit_of(arena_id))

    def bit_of(self, arena_id: str) -> int:
        """0: nobody spoke of it."""
        arena = self._arenas.get(arena_id)
        return 0 if arena is None else arena.bit

    def bits_of(self, arena_ids: frozenset[str]) -> int:
        bits = self._bits.get(arena_ids)
        if bits is None:
            if len(self._bits) >= _MAX_SETS:
                self._bits.clear()
            bits = self._bits[arena_ids] = sum(self.bit_of(arena_id) for arena_id in arena_ids)
        return bits

    def ids_of(self, bits: int) -> Iterator[str]:
        """Of arenas."""
        while bits:
            yield self._ids[bits & -bits]
            bits &= bits - 1

    def place(
        self, arena_id: str, hashes: Hashes, now_s: float, computed_at_s: float = 0.0, num_cached_pages: int = 0
    ) -> None:
        """A prompt is about to be computed there, until `computed_at_s`: who begins alike should go there too.

        `num_cached_pages`: of it, that are known to be there.
        """
        arena = self._arenas.get(arena_id)
        if arena is None or not hashes:
            return
        if now_s - self._placed_since_s > _PLACED_S or len(self._placed) > _MAX_PLACED:
            self._placed_before, self._placed, self._placed_since_s = self._placed, {}, now_s
        arena.computed_at_s = max(arena.computed_at_s, computed_at_s)
        first = num_cached_pages // _BLOCK_PAGES * _BLOCK_PAGES + _BLOCK_PAGES - 1
        _add(self._placed, hashes[first::_BLOCK_PAGES], arena.bit)

    def wait_ms(self, arena_id: str, now_s: float) -> float:
        """Until what was placed there is computed, by estimate."""
        arena = self._arenas.get(arena_id)
        return 0.0 if arena is None else max(0.0, (arena.computed_at_s - now_s) * 1000)

    def change(self, message: PrefixChanged, now_s: float) -> None:
        """A KV event. One that comes late or twice is passed over; after a gap a snapshot is needed."""
        arena = self._arenas.get(message.arena_id)
        if arena is None:
            if len(self._arenas) >= _MAX_ARENAS:
                return
            bit = self._free_bits.pop() if self._free_bits else 1 << len(self._arenas)
            arena = self._arenas[message.arena_id] = _ArenaPrefixes(bit, now_s, message.incarnation)
            self._ids[bit] = message.arena_id
            self._bits.clear()
        if message.incarnation < arena.incarnation:
            return
        arena.heard_at_s = now_s
        if message.incarnation == arena.incarnation and message.sequence <= arena.sequence:
            return
        if message.sequence == 0:
            self._clear(arena)
        elif message.incarnation != arena.incarnation or message.sequence != arena.sequence + 1:
            self._num_gaps += arena.sequence >= 0
            arena.incarnation, arena.sequence = message.incarnation, -1
            return
        arena.incarnation, arena.sequence = message.incarnation, message.sequence
        evicted, added = hashes_from(message.evicted), hashes_from(message.added)
        arena.reported.difference_update(evicted)
        arena.reported.update(added)
        for pages in (self._reported, self._placed, self._placed_before):
            _discard(pages, evicted, arena.bit)
        _add(self._reported, added, arena.bit)
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
        self._clear(arena)
        arena.reported = set(hashes_from(snapshot.hashes))
        _add(self._reported, arena.reported, arena.bit)

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
            arena = self._arenas.pop(arena_id)
            self._clear(arena)
            for placed in (self._placed, self._placed_before):
                _discard(placed, [page_hash for page_hash, bits in placed.items() if bits & arena.bit], arena.bit)
            del self._ids[arena.bit]
            self._free_bits.append(arena.bit)
            self._bits.clear()

    def metrics(self) -> dict[str, float]:
        return {
            "prefix_arenas": float(len(self._arenas)),
            "prefix_pages_known": float(sum(len(arena.reported) for arena in self._arenas.values())),
            "prefix_gaps_total": float(self._num_gaps),
        }

    def _clear(self, arena: _ArenaPrefixes) -> None:
        _discard(self._reported, arena.reported, arena.bit)
        arena.reported.clear()


def _add(pages: dict[int, int], hashes: Iterable[int], bit: int) -> None:
    get = pages.get
    for page_hash in hashes:
        pages[page_hash] = get(page_hash, 0) | bit


def _discard(pages: dict[int, int], hashes: Collection[int], bit: int) -> None:
    """Where nothing is left of a page it is not kept."""
    for page_hash in hashes if pages else ():
        bits = pages.get(page_hash, 0)
        if bits & bit:
            if bits == bit:
                del pages[page_hash]
            else:
                pages[page_hash] = bits ^ bit
