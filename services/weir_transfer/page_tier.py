"""What is decided about a tier: which sealed pages are put there, and whether a prefix comes back from there.

Pure: hashes, counts and seconds.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from weir.core.clock import Clock
from weir.kv.prefixes import PrefixIndex

_MARGIN = 2.0
"""A prefix is loaded where that takes half the time of computing it at most; so one that does not come, and is computed
after all, costs half as much again."""
_LEAST_MEASURED = 8
"""Pages of one measurement of computing."""
_NEW_SHARE = 0.3
_MAX_MEASURED = 1024
_LEAST_S = 1e-6


class UnwrittenPages:
    """Hashes of sealed pages that are not in the tier; those that an earlier update brought come before later ones.

    `min_uses`: how many prompts must have used a page: the one that computed it is the first.
    """

    def __init__(self, index: PrefixIndex, is_written: Callable[[bytes], bool], min_uses: int) -> None:
        self._index = index
        self._is_written = is_written
        self._min_uses = min_uses
        self.changes = index.follow()
        self._num_uses: dict[bytes, int] = {}
        self._ready: dict[bytes, None] = {}
        """Those that were used often enough; in the order of this."""
        self.num_lost = 0
        """Left the arena before they were written."""

    def __len__(self) -> int:
        """That are to be written now."""
        return len(self._ready)

    def update(self) -> None:
        """Takes over what has changed in the index."""
        changes = self.changes.take()
        if changes is None:
            self._num_uses = {one: uses for one, uses in self._num_uses.items() if one in self._index.hashes()}
            self._ready = {one: None for one in self._ready if one in self._index.hashes()}
            self._add(self._index.hashes())
            return
        for page_hash in changes.evicted:
            self._num_uses.pop(page_hash, None)
            if page_hash in self._ready:
                del self._ready[page_hash]
                self.num_lost += 1
        self._add(changes.added)

    def note_used(self, hashes: Iterable[bytes]) -> None:
        """A prompt has found these pages in the arena. Those that the tier has lost are wanted there again."""
        self.update()
        for page_hash in hashes:
            if page_hash in self._ready or self._is_written(page_hash):
                continue
            self._num_uses[page_hash] = self._num_uses.get(page_hash, 1) + 1
            self._note_ready(page_hash)

    def take(self, max_pages: int) -> list[bytes]:
        """The next ones, which are not to be written any more from here on."""
        taken = [page_hash for page_hash, _ in zip(self._ready, range(max_pages), strict=False)]
        for page_hash in taken:
            del self._ready[page_hash]
        return taken

    def put_back(self, hashes: Iterable[bytes]) -> None:
        """They could not be written: those that are still in the arena are the next ones again."""
        hashes = list(hashes)
        here = [page_hash for page_hash in hashes if page_hash in self._index.hashes()]
        self.num_lost += len(hashes) - len(here)
        self._ready = dict.fromkeys(here) | self._ready

    def _add(self, hashes: Iterable[bytes]) -> None:
        for page_hash in hashes:
            if page_hash not in self._ready and not self._is_written(page_hash):
                self._num_uses.setdefault(page_hash, 1)
                self._note_ready(page_hash)

    def _note_ready(self, page_hash: bytes) -> None:
        if self._num_uses[page_hash] >= self._min_uses:
            del self._num_uses[page_hash]
            self._ready[page_hash] = None


@dataclass(slots=True)
class _Computing:
    began_s: float
    num_pages: int = 0


class PrefillMeter:
    """How fast prompts are computed, as who waits for one sees it: from its match to the last page that is sealed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._computing: dict[int, _Computing] = {}
        self.pages_per_s: float | None = None
        """None: nothing was measured yet."""

    def begin(self, match_id: int) -> None:
        if len(self._computing) < _MAX_MEASURED:
            self._computing[match_id] = _Computing(self._clock.now_s())

    def add_page(self, match_id: int, *, is_last: bool) -> None:
        """One more page of the match is sealed. `is_last`: of those that it was to compute."""
        computing = self._computing.get(match_id)
        if computing is None:
            return
        computing.num_pages += 1
        if is_last:
            del self._computing[match_id]
            if computing.num_pages >= _LEAST_MEASURED:
                self._note(computing.num_pages / max(self._clock.now_s() - computing.began_s, _LEAST_S))

    def drop(self, match_id: int) -> None:
        """It was given up: nothing is learned of it."""
        self._computing.pop(match_id, None)

    def _note(self, rate: float) -> None:
        """One that is fast counts at once: a slow one may have waited for others."""
        self.pages_per_s = rate if self.pages_per_s is None else max(rate, _mixed(self.pages_per_s, rate))


class LoadRates:
    """Whether a prefix comes from the tier sooner than it is computed. As long as either is not known, it does."""

    def __init__(self, prefill: PrefillMeter) -> None:
        self._prefill = prefill
        self._pages_per_s: float | None = None

    @property
    def is_worth(self) -> bool:
        prefill = self._prefill.pages_per_s
        return self._pages_per_s is None or prefill is None or self._pages_per_s >= _MARGIN * prefill

    def longest_s(self, num_pages: int) -> float | None:
        """After which the rest of a prefix is not waited for. None: it is not known."""
        prefill = self._prefill.pages_per_s
        return None if prefill is None else num_pages / (_MARGIN * prefill)

    def on_loaded(self, num_pages: int, seconds: float) -> None:
        """What has come in so many seconds, be it nothing."""
        rate = num_pages / max(seconds, _LEAST_S)
        self._pages_per_s = rate if self._pages_per_s is None else _mixed(self._pages_per_s, rate)

    def metrics(self) -> Mapping[str, float]:
        """Of what is not known yet, nothing."""
        rates = {"load_rate": self._pages_per_s, "prefill_rate": self._prefill.pages_per_s}
        return {name: rate for name, rate in rates.items() if rate is not None}


def _mixed(old: float, new: float) -> float:
    return (1 - _NEW_SHARE) * old + _NEW_SHARE * new
