"""From where the prefix of a prompt could come into an arena that lacks it, and how soon it would be there."""

from collections.abc import Mapping
from typing import NamedTuple

from weir.kv.geometry import PAGE_TOKENS
from weir.scheduling.pools import WorkerState
from weir.scheduling.prefix_view import Hashes, PrefixDepths, PrefixView
from weir.scheduling.routing.links import LinkRates

LEAST_FETCHED_TOKENS = 128
"""Services ask for no fewer (`weir_transfer.exchange.prefix_fetcher.LEAST_PAGES`)."""
LONGEST_FETCH_MS = 8000.0
"""By estimate: a match waits for ten seconds, and then the prompt is computed."""
MAX_SHARE = 0.25
"""Of an arena's pages, that a service reserves for what is on its way, and as much that it pins for others."""
_MAX_COMPARED = 4


class Fetch(NamedTuple):
    """The first `num_tokens` of a prompt can be in an arena in `fetch_ms`, from another one."""

    source: str
    """HOST:PORT of its `Pages`."""
    num_tokens: int
    num_missing_tokens: int
    """Of them, that the arena does not have; they come."""
    fetch_ms: float


class PromptSources:
    """Of one prompt, for one decision. What is said of several arenas is looked up once."""

    def __init__(
        self,
        prefixes: PrefixView,
        links: LinkRates,
        addresses: Mapping[str, str],
        exchanging: frozenset[str],
        hashes: Hashes,
        depths: PrefixDepths,
        now_s: float,
    ) -> None:
        """`addresses`: of arenas that exchange pages, which are `exchanging`; `depths`: of `hashes`."""
        self._prefixes = prefixes
        self._links = links
        self._addresses = addresses
        self._hashes = hashes
        self._now_s = now_s
        self._num_tokens, self._holders = depths.deepest(exchanging, _MAX_COMPARED)
        self._is_long_enough = self._num_tokens >= LEAST_FETCHED_TOKENS
        self._last_hash = hashes[self._num_tokens // PAGE_TOKENS - 1]
        self._reported: PrefixDepths | None = None

    @property
    def reported(self) -> PrefixDepths:
        """How much of it each arena has, without what is only about to be computed."""
        if self._reported is None:
            self._reported = self._prefixes.look_up_reported(self._hashes)
        return self._reported

    def try_fetch(self, worker: WorkerState) -> Fetch | None:
        """Into the worker's arena, from the one that has most and from where it comes soonest. What is only about to
        be computed in the worker's does not count: of several prompts that begin alike whichever comes first is to
        bring it."""
        arena_id, page_bytes = worker.arena.arena_id, worker.record.page_bytes
        if not self._is_long_enough or not page_bytes or arena_id not in self._addresses:
            return None
        if self._prefixes.has_reported(arena_id, self._last_hash):
            return None
        num_missing = self._num_tokens - self.reported.num_tokens(arena_id)
        if num_missing < LEAST_FETCHED_TOKENS or num_missing > MAX_SHARE * PAGE_TOKENS * worker.arena.num_pages:
            return None
        best: Fetch | None = None
        for holder in self._holders:
            if holder == arena_id:
                continue
            fetch_ms = self._wait_ms(holder) + self._links.cost(
                self._addresses[holder], arena_id, self._now_s
            ).transfer_ms(num_missing * page_bytes / PAGE_TOKENS)
            if fetch_ms <= LONGEST_FETCH_MS and (best is None or fetch_ms < best.fetch_ms):
                best = Fetch(self._addresses[holder], self._num_tokens, num_missing, fetch_ms)
        return best

    def _wait_ms(self, holder: str) -> float:
        """Until it has what it was given to compute."""
        is_there = self._prefixes.has_reported(holder, self._last_hash)
        return 0.0 if is_there else self._prefixes.wait_ms(holder, self._now_s)
