"""Cached prefixes: content hashes of full pages, and the index that finds, pins and evicts them.

    hash of page i = blake2b-128(hash of page i - 1 | the 16 token ids of page i, int32)

The hash before page 0 is the seed. Equal hashes mean equal tokens from position 0 on, under one model and one salt; a
chain of hashes names a prompt's prefix without its text.

Rows of sealed pages (`weir.kv.layout.PageState`) are written here alone. Hash, use number and state lie in the segment;
the index and who pins what are derived, after a restart from block tables and from what workers claim.
"""

import hashlib
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weir.kv.geometry import PAGE_TOKENS
from weir.kv.layout import NO_LEASE, PageState

HASH_BYTES = 16
MAX_CHANGES = 40_000
"""Beyond this many, only the fact that there were too many is kept."""

PageIds = NDArray[np.int64]
PinCounts = NDArray[np.uint32]
"""How often each page is pinned, shape [num_pages]."""

_PAGE_TOKEN_BYTES = 4 * PAGE_TOKENS
_MAX_USE = 1 << 62


def prefix_seed(model_digest: str, salt: str = "") -> bytes:
    """HASH_BYTES bytes. Pages are shared only under one seed: another salt keeps tenants apart."""
    parts = (part.encode() for part in (model_digest, salt))
    packed = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return hashlib.blake2b(packed, digest_size=HASH_BYTES).digest()


def page_hashes(token_ids: Sequence[int], seed: bytes) -> tuple[bytes, ...]:
    """The hashes of all pages that `token_ids` fill; about a microsecond each."""
    num_pages = len(token_ids) // PAGE_TOKENS
    packed = array("i", token_ids[: num_pages * PAGE_TOKENS]).tobytes()
    blake2b, previous, hashes = hashlib.blake2b, seed, []
    for start in range(0, num_pages * _PAGE_TOKEN_BYTES, _PAGE_TOKEN_BYTES):
        previous = blake2b(previous + packed[start : start + _PAGE_TOKEN_BYTES], digest_size=HASH_BYTES).digest()
        hashes.append(previous)
    return tuple(hashes)


def split_hashes(packed: bytes, field: str = "page_hashes") -> tuple[bytes, ...]:
    """The hashes that lie one after the other in `packed`, as in this field on the wire. Raises ValueError, which names
    the field, for a part of one."""
    if len(packed) % HASH_BYTES:
        raise ValueError(f"{field}: {len(packed)} bytes, must be a multiple of {HASH_BYTES}")
    return tuple(packed[start : start + HASH_BYTES] for start in range(0, len(packed), HASH_BYTES))


@dataclass(frozen=True, slots=True)
class Changes:
    """No hash is in both."""

    added: Collection[bytes] = ()
    evicted: Collection[bytes] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.evicted)


class PrefixChanges:
    """What an index gained and lost since the last `take`, netted: what came and went in between is in neither."""

    def __init__(self, max_changes: int = MAX_CHANGES) -> None:
        self._max_changes = max_changes
        self._added: set[bytes] = set()
        self._evicted: set[bytes] = set()
        self._is_complete = True
        self._on_change: Callable[[], None] = lambda: None

    def listen(self, on_change: Callable[[], None]) -> None:
        """`on_change`, which costs little, is called at each change from now on."""
        self._on_change = on_change

    def add(self, hashes: Collection[bytes]) -> None:
        """They were not in the index before."""
        returned = self._evicted.intersection(hashes)
        self._evicted -= returned
        self._added.update(hashes if not returned else set(hashes) - returned)
        self._check_bound()
        self._on_change()

    def evict(self, hashes: Collection[bytes]) -> None:
        """They were in the index before."""
        untaken = self._added.intersection(hashes)
        self._added -= untaken
        self._evicted.update(hashes if not untaken else set(hashes) - untaken)
        self._check_bound()
        self._on_change()

    def forget(self) -> None:
        """The index was rebuilt or has changed too much: the next `take` returns None."""
        self._added, self._evicted, self._is_complete = set(), set(), False
        self._on_change()

    def take(self) -> Changes | None:
        """Everything since the last call. None: that is not known any more, look at the whole index."""
        changes = Changes(self._added, self._evicted) if self._is_complete else None
        self._added, self._evicted, self._is_complete = set(), set(), True
        return changes

    def _check_bound(self) -> None:
        if len(self._added) + len(self._evicted) > self._max_changes:
            self.forget()


class PrefixIndex:
    """`page_rows`: PAGE_DTYPE [num_pages]. Page ids that come in are valid, and different within one call."""

    def __init__(self, page_rows: NDArray[Any]) -> None:
        self._rows = page_rows
        self._page_of: dict[bytes, int] = {}
        self._pins: dict[int, PinCounts] = {}
        self._next_use = 1
        self.num_evicted = 0
        self.changes = PrefixChanges()
        self._followers = [self.changes]

    def __len__(self) -> int:
        return len(self._page_of)

    def hashes(self) -> Collection[bytes]:
        """Of all sealed pages. Not to be changed."""
        return self._page_of.keys()

    def follow(self) -> PrefixChanges:
        """For one more who takes changes. The first `take` returns None."""
        changes = PrefixChanges()
        changes.forget()
        self._followers.append(changes)
        return changes

    def find_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """The pages of the longest prefix of `hashes` that is here."""
        pages = []
        for page_hash in hashes:
            page_id = self._page_of.get(page_hash)
            if page_id is None:
                break
            pages.append(page_id)
        return pages

    def is_sealed(self, pages: PageIds) -> NDArray[np.bool_]:
        return self._rows["state"][pages] >= PageState.CACHED

    def pins_of(self, lease_id: int) -> PinCounts:
        """Not to be changed."""
        pins = self._pins.get(lease_id)
        return np.zeros(len(self._rows), np.uint32) if pins is None else pins

    def pin(self, lease_id: int, pages: PageIds) -> None:
        """Sealed pages cannot be evicted as long as somebody pins them."""
        if not pages.size:
            return
        self._pins.setdefault(lease_id, self.pins_of(lease_id))[pages] += 1
        self._rows["refcount"][pages] += 1
        self._rows["state"][pages] = PageState.SHARED

    def unpin(self, lease_id: int, pages: PageIds) -> None:
        """Once for each page, which the lease must have pinned."""
        if pages.size:
            self._pins[lease_id][pages] -= 1
            self._add_references(pages, -1)

    def move_pins(self, from_lease_id: int, to_lease_id: int, pages: PageIds) -> None:
        """What one lease pinned, another does from here on."""
        self.pin(to_lease_id, pages)
        self.unpin(from_lease_id, pages)

    def replace_pins(self, lease_id: int, pins: PinCounts) -> None:
        """The lease pins exactly this; counts of pages that are not sealed must be 0."""
        before = self.pins_of(lease_id)
        changed = np.flatnonzero(before != pins)
        if changed.size:
            self._add_references(changed, pins[changed].astype(np.int64) - before[changed])
        self._pins.pop(lease_id, None)
        if pins.any():
            self._pins[lease_id] = pins.astype(np.uint32)

    def seal(self, lease_id: int, pages: PageIds, hashes: Sequence[bytes]) -> None:
        """Makes `pages` (LEASED or ORPHANED, owned by whom the caller has checked) findable by `hashes`.

        The lease pins them; with NO_LEASE nobody does. A page whose hash is here already, or comes again in
        `hashes`, stays what it is.
        """
        new = {page_hash: index for index, page_hash in enumerate(hashes) if page_hash not in self._page_of}
        if not new:
            return
        sealed, new_hashes = pages[list(new.values())], list(new)
        self._rows["hash"][sealed] = np.frombuffer(b"".join(new_hashes), "<u8").reshape(-1, 2)
        self._rows["refcount"][sealed] = 0
        self._rows["state"][sealed] = PageState.CACHED  # the commit point; `recover` does what follows
        self._rows["owner"][sealed] = NO_LEASE
        self._page_of.update(zip(new_hashes, sealed.tolist(), strict=True))
        for changes in self._followers:
            changes.add(new_hashes)
        if lease_id != NO_LEASE:
            self.pin(lease_id, sealed)

    def touch(self, hashes: Sequence[bytes]) -> None:
        """The prefix `hashes` was used now, as far as it is here without a gap: what cannot be reached grows older. A
        page counts as used after the pages that follow it, so that of a chain the end goes first if nobody pins it."""
        pages = np.array(self.find_prefix(hashes), np.int64)
        self._next_use += len(pages)
        self._rows["last_use"][pages] = self._next_use - 1 - np.arange(len(pages))

    def try_evict(self, num_pages: int) -> PageIds | None:
        """Takes the `num_pages` cached pages that were used longest ago out of the index. The caller frees them.

        None, and nothing is done, if there are fewer.
        """
        cached = np.flatnonzero(self._rows["state"] == PageState.CACHED)
        if len(cached) < num_pages:
            return None
        if len(cached) > num_pages:
            cached = cached[np.argpartition(self._rows["last_use"][cached], num_pages)[:num_pages]]
        evicted = self._hashes_of(cached)
        for page_hash in evicted:
            del self._page_of[page_hash]
        for changes in self._followers:
            changes.evict(evicted)
        self.num_evicted += num_pages
        return cached

    def recover(self) -> None:
        """Reads the index from the rows, after a death of the writer at any point. Nothing is pinned yet."""
        rows = self._rows
        sealed = rows["state"] >= PageState.CACHED
        rows["owner"][sealed] = NO_LEASE
        rows["refcount"][sealed] = 0
        rows["state"][sealed] = PageState.CACHED
        rows["hash"][~sealed] = 0
        pages = np.flatnonzero(sealed)
        self._page_of = dict(zip(self._hashes_of(pages), pages.tolist(), strict=True))
        for changes in self._followers:
            changes.forget()
        self._pins.clear()
        rows["last_use"][rows["last_use"] >= _MAX_USE] = 0  # nobody counts so far: a bit of it turned
        self._next_use = int(rows["last_use"].max(initial=0)) + 1

    def integrity_errors(self) -> Iterator[str]:
        """What is wrong between rows, index and pins, in sentences."""
        rows = self._rows
        sealed = rows["state"] >= PageState.CACHED
        is_shared = rows["state"] == PageState.SHARED
        total = np.zeros(len(rows), np.int64)
        for pins in self._pins.values():
            total += pins
        for page_id in np.flatnonzero(sealed & (rows["refcount"] != total)).tolist():
            yield f"page {page_id} has reference count {rows['refcount'][page_id]} but is pinned {total[page_id]} times"
        for page_id in np.flatnonzero(~sealed & (total > 0)).tolist():
            yield f"page {page_id} is pinned in state {rows['state'][page_id]}"
        for page_id in np.flatnonzero(sealed & (is_shared != (rows["refcount"] > 0))).tolist():
            yield f"page {page_id} has reference count {rows['refcount'][page_id]} in state {rows['state'][page_id]}"
        for page_id in np.flatnonzero(~sealed & rows["hash"].any(axis=1)).tolist():
            yield f"page {page_id} has a hash in state {rows['state'][page_id]}"
        pages = np.flatnonzero(sealed)
        for page_id, page_hash in zip(pages.tolist(), self._hashes_of(pages), strict=True):
            if self._page_of.get(page_hash) != page_id:
                yield f"page {page_id} is sealed but not found by its hash"
        if len(self._page_of) != len(pages):
            yield f"the prefix index has {len(self._page_of)} entries for {len(pages)} sealed pages"

    def _add_references(self, pages: PageIds, change: int | NDArray[np.int64]) -> None:
        references = self._rows["refcount"][pages].astype(np.int64) + change
        self._rows["refcount"][pages] = references
        self._rows["state"][pages] = np.where(references > 0, PageState.SHARED, PageState.CACHED)

    def _hashes_of(self, pages: PageIds) -> list[bytes]:
        return [row.tobytes() for row in np.ascontiguousarray(self._rows["hash"][pages])]
