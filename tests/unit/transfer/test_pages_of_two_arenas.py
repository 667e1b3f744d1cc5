"""Pages between two arenas in any order of events: whatever is computed, fetched, cut, evicted or started anew at
either, a cached page holds what its hash says, no page is lost, and every fetch has one end."""

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.unit.transfer.conftest import World

from weir.kv.layout import PageState
from weir.kv.messages import Claims, PageChain, PrefixMatch
from weir.kv.movers.pull import PullFigures
from weir.kv.prefixes import page_hashes, prefix_seed
from weir_transfer.messages import Attachment, MatchRequest
from weir_transfer.remote_prefixes import MAX_SHARE, Reservation

_SEED = prefix_seed("digest")
_NUM_PAGES = 40
_TEXTS = [(*range(80), *range(first, first + 80)) for first in (100, 300, 500)]
"""Three prompts of ten pages that begin alike."""
_HASHES = [page_hashes(text, _SEED) for text in _TEXTS]
_hosts = st.integers(0, 1)
_texts = st.integers(0, len(_TEXTS) - 1)
_numbers = st.integers(0, 5)


@dataclass
class Computing:
    """A prompt of a worker: pages that it computes or uses."""

    text: int
    match: PrefixMatch
    num_computed: int

    @property
    def page_ids(self) -> tuple[int, ...]:
        return (*self.match.page_ids, *self.match.acquired.page_ids)


@dataclass
class Fetch:
    """`offered`: by the other host, page by generation and content, as long as it keeps them; None: it has gone."""

    reservation: Reservation
    hashes: tuple[bytes, ...]
    pinned: list[int] = field(default_factory=list)
    offered: list[tuple[int, int]] | None = field(default_factory=list)
    num_here: int = 0


@dataclass
class Side:
    world: World
    worker: Attachment
    computing: list[Computing] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    num_ended: int = 0

    @property
    def held(self) -> Claims:
        page_ids = [page_id for one in self.computing for page_id in one.page_ids]
        return Claims(tuple(page_ids), tuple(slot for one in self.computing for slot in one.match.acquired.slots))


def content_of(page_hash: bytes) -> int:
    return page_hash[0]


class TwoArenas(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.ending = ExitStack()
        self.sides = []
        for _ in range(2):
            folder = self.ending.enter_context(tempfile.TemporaryDirectory())
            world = World(Path(folder, "arena"))
            self.ending.callback(world.segment.close)
            self.sides.append(Side(world, world.core.attach(world.registration("w"))))

    @rule(host=_hosts, text=_texts)
    def begin_prompt(self, host: int, text: int) -> None:
        side = self.sides[host]
        request = MatchRequest(_HASHES[text], len(_HASHES[text]) + 1, 1)
        match = side.world.core.match(side.worker.lease_id, side.worker.number, request, wait_from_pages=None)
        assert match is not None
        for page_id, page_hash in zip(match.page_ids, _HASHES[text], strict=False):
            assert (side.world.segment.pages[page_id] == content_of(page_hash)).all()
        if match.acquired.slots:
            side.computing.append(Computing(text, match, len(match.page_ids)))
        else:
            chain = PageChain(match.page_ids)
            side.world.core.release(side.worker.lease_id, side.worker.number, [chain], (), [match.match_id])

    @rule(host=_hosts, text=_texts)
    def compute_whole(self, host: int, text: int) -> None:
        side = self.sides[host]
        num_before = len(side.computing)
        self.begin_prompt(host, text)
        if len(side.computing) > num_before:
            self.compute(host, num_before, len(_HASHES[text]), is_over=True)

    @rule(host=_hosts, number=_numbers, num_computed=st.integers(0, 10), is_over=st.booleans())
    def compute(self, host: int, number: int, num_computed: int, is_over: bool) -> None:
        side = self.sides[host]
        if not side.computing:
            return
        one, core, worker = side.computing[number % len(side.computing)], side.world.core, side.worker
        hashes, page_ids = _HASHES[one.text], one.page_ids
        for page_id, page_hash in list(zip(page_ids, hashes, strict=False))[one.num_computed : num_computed]:
            side.world.segment.pages[page_id] = content_of(page_hash)
        one.num_computed = max(one.num_computed, num_computed)
        chain = PageChain(page_ids, hashes[: one.num_computed])
        if is_over:
            side.computing.remove(one)
            core.release(worker.lease_id, worker.number, [chain], one.match.acquired.slots, [one.match.match_id])
        else:
            core.seal(worker.lease_id, worker.number, chain)

    @rule(host=_hosts, text=_texts, num_pages=st.sampled_from([10, 10, 6, 2]), is_offered=st.booleans())
    def begin_fetch(self, host: int, text: int, num_pages: int, is_offered: bool) -> None:
        side = self.sides[host]
        reservation = side.world.core.remote.try_reserve(_HASHES[text][:num_pages])
        if reservation is not None:
            side.fetches.append(Fetch(reservation, _HASHES[text][:num_pages]))
            if is_offered:
                self.offer(host, len(side.fetches) - 1)

    @rule(host=_hosts, number=_numbers)
    def offer(self, host: int, number: int) -> None:
        """First or further pages."""
        side, there = self.sides[host], self.sides[1 - host].world
        if side.fetches and (fetch := side.fetches[number % len(side.fetches)]).offered is not None:
            num_held = len(fetch.reservation.earlier_hashes) + len(fetch.offered)
            more = there.core.remote.pin(fetch.hashes, num_held)
            generations = there.segment.page_rows["generation"]
            fetch.pinned += more
            fetch.offered += [(page_id, int(generations[page_id])) for page_id in more]

    @rule(host=_hosts, number=_numbers, num_pages=st.sampled_from([1, 4, 10]))
    def pull(self, host: int, number: int, num_pages: int) -> None:
        """Pages come one after the other; one that is not what was offered ends it."""
        side, there = self.sides[host], self.sides[1 - host].world
        if not side.fetches:
            return
        fetch = side.fetches[number % len(side.fetches)]
        for page_id, generation in (fetch.offered or [])[fetch.num_here : fetch.num_here + num_pages]:
            assert int(there.segment.page_rows["generation"][page_id]) == generation, "a pinned page was given away"
            side.world.segment.pages[fetch.reservation.page_ids[fetch.num_here]] = there.segment.pages[page_id]
            fetch.num_here += 1

    @rule(host=_hosts, number=_numbers, is_offer_first=st.booleans())
    def end_fetch(self, host: int, number: int, is_offer_first: bool) -> None:
        """With what has come; the source hears of it before or after."""
        side = self.sides[host]
        if side.fetches:
            fetch = side.fetches.pop(number % len(side.fetches))
            if is_offer_first:
                self._unpin(host, fetch)
            side.world.core.remote.settle(fetch.reservation, fetch.num_here)
            has_failed = fetch.num_here < len(fetch.reservation.hashes)
            side.world.core.remote.count_received(fetch.num_here, PullFigures(), has_failed=has_failed)
            side.num_ended += 1
            if not is_offer_first:
                self._unpin(host, fetch)

    @rule(host=_hosts)
    def evict(self, host: int) -> None:
        side = self.sides[host]
        num_free = int(side.world.core.metrics()["free_pages"] + side.world.core.metrics()["cached_pages"])
        acquired = side.world.core.acquire(side.worker.lease_id, side.worker.number, num_free, 0)
        side.world.segment.pages[list(acquired.page_ids)] = 255
        side.world.core.release(side.worker.lease_id, side.worker.number, [PageChain(acquired.page_ids)], ())

    @rule(host=_hosts)
    def kill_service(self, host: int) -> None:
        """What it fetched has no end; what is fetched from it comes no further; its worker claims what it holds."""
        side, other = self.sides[host], self.sides[1 - host]
        for fetch in side.fetches:
            self._unpin(host, fetch)
        side.fetches.clear()
        for fetch in other.fetches:
            fetch.pinned, fetch.offered = [], None
        side.world.restart()
        side.num_ended = 0
        side.worker = side.world.core.attach(side.world.registration("w", side.worker.lease_id, side.held))

    @rule(host=_hosts)
    @precondition(lambda self: any(side.computing for side in self.sides))
    def kill_worker(self, host: int) -> None:
        side = self.sides[host]
        side.world.core.end_lease(side.worker.lease_id)
        side.world.core.tick()
        side.computing.clear()
        side.worker = side.world.core.attach(side.world.registration("w"))

    @invariant()
    def cached_pages_hold_what_their_hashes_say(self) -> None:
        for side in getattr(self, "sides", []):
            prefixes = side.world.core.prefixes
            for hashes in _HASHES:
                for page_id, page_hash in zip(prefixes.find_prefix(hashes), hashes, strict=False):
                    assert (side.world.segment.pages[page_id] == content_of(page_hash)).all()

    @invariant()
    def books_are_in_order(self) -> None:
        for index, side in enumerate(getattr(self, "sides", [])):
            core, metrics = side.world.core, side.world.core.metrics()
            assert core.integrity_errors() == ()
            assert metrics["remote_prefixes_total"] == side.num_ended
            reserved = sum(len(fetch.reservation.page_ids) for fetch in side.fetches)
            pinned = sum(len(fetch.pinned) for fetch in self.sides[1 - index].fetches)
            assert metrics["remote_pages_reserved"] == reserved <= MAX_SHARE * _NUM_PAGES
            assert metrics["remote_pages_pinned"] == pinned <= MAX_SHARE * _NUM_PAGES
            assert sum(metrics[f"{state.name.lower()}_pages"] for state in PageState) == _NUM_PAGES

    def teardown(self) -> None:
        if not hasattr(self, "sides"):
            return
        for host, side in enumerate(self.sides):
            while side.fetches:
                self.end_fetch(host, 0, is_offer_first=False)
            while side.computing:
                self.compute(host, 0, 0, is_over=True)
        for side in self.sides:
            metrics = side.world.core.metrics()
            assert metrics["free_pages"] + metrics["cached_pages"] == _NUM_PAGES, "a page leaked"
            assert metrics["prefix_pending"] == metrics["remote_pages_pinned"] == metrics["remote_pages_reserved"] == 0
        self.ending.close()

    def _unpin(self, host: int, fetch: Fetch) -> None:
        self.sides[1 - host].world.core.remote.unpin(fetch.pinned)
        fetch.pinned, fetch.offered = [], None


TestTwoArenas = TwoArenas.TestCase
TestTwoArenas.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
