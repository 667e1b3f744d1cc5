"""Pages that cross between the hosts of a world: what each must hold, who may be writing, and when one side dies."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.simulation.arenas import PAGE_BYTES
from tests.simulation.clients import BrokenPromise, RequestSpec, expected_output
from tests.simulation.grpc_client import SimChannel
from tests.simulation.loop import PROCESS, SimProcess
from tests.simulation.network import SimDialer
from tests.simulation.page_streams import PageTraffic
from weir.kv.geometry import PAGE_TOKENS
from weir.kv.layout import TRANSFER_LEASE, PageState
from weir.kv.prefixes import page_hashes, prefix_seed
from weir.rpc.identities import Party
from weir_transfer.service import TransferService

if TYPE_CHECKING:
    from tests.simulation.roles import Place
    from tests.simulation.world import World

PAGES_PORT = 6000
_POSITION_FACTOR = 1_000_003


class PageLedger:
    """What the pages of all sequences of a world hold, by their hashes: however they came to where they are."""

    def __init__(self, model_digest: str) -> None:
        self._seed = prefix_seed(model_digest)
        self._words: dict[bytes, np.ndarray[tuple[int], np.dtype[np.int64]]] = {}

    def add(self, specs: Sequence[RequestSpec]) -> None:
        for spec in specs:
            tokens = np.array((*spec.prompt, *expected_output(spec)), np.int64)
            written = np.arange(1, len(tokens) + 1) * _POSITION_FACTOR + tokens
            hashes = page_hashes(tokens.tolist(), self._seed)
            pages = written[: len(hashes) * PAGE_TOKENS].reshape(-1, PAGE_TOKENS)
            self._words.update(zip(hashes, pages, strict=True))

    def check(self, place: "Place") -> None:
        """Every page with a hash, of those that anybody asked for, holds what that hash is of."""
        segment = place.host.segment
        assert segment is not None
        rows = np.asarray(segment.page_rows)
        sealed = np.flatnonzero(rows["state"] >= PageState.CACHED)
        names = [row.tobytes() for row in np.ascontiguousarray(rows["hash"][sealed])]
        known = [(page_id, name) for page_id, name in zip(sealed.tolist(), names, strict=True) if name in self._words]
        if not known:
            return
        held = segment.pages.view(np.int64)[[page_id for page_id, _ in known], :PAGE_TOKENS]
        wrong = np.flatnonzero((held != np.stack([self._words[name] for _, name in known])).any(axis=1))
        if wrong.size:
            page_id, name = known[wrong[0]]
            raise BrokenPromise(f"P4: {place.name}: page {page_id} does not hold what {name.hex()} is the hash of")


class Exchange:
    """Of one world. `begin_death` has the sender or the receiver of the next transfer die so many of their callbacks
    after it began."""

    def __init__(self, world: "World", traffic: PageTraffic) -> None:
        self._world = world
        self.traffic = traffic
        self.num_begun = self.num_fetches = 0
        self._num_bytes = 0
        self._is_sender_to_die: bool | None = None
        self._num_events_before = 0
        self._pair: tuple[SimProcess, SimProcess] | None = None
        """(sender, receiver) of the transfer in which one of them dies."""
        self.num_pair_events = 0
        """Of the newest such transfer."""
        self._num_events_to_last_page = 0
        self.on_death: Callable[[], None] = lambda: None
        traffic.on_written = self._check_writer

    def begin_death(self, num_events: int, *, of_sender: bool, on_death: Callable[[], None]) -> None:
        self._is_sender_to_die, self._num_events_before, self.on_death = of_sender, num_events, on_death

    @property
    def figures(self) -> dict[str, int]:
        sequences = self.num_begun - self.num_fetches
        return {"prefixes": self.num_fetches, "sequences": sequences, "pages": self._num_bytes // PAGE_BYTES}

    @property
    def num_events(self) -> int:
        """Of both sides of the transfer in which one was to die, until pages came last."""
        return self._num_events_to_last_page

    @property
    def is_death_due(self) -> bool:
        return self._is_sender_to_die is not None

    def call_off(self) -> None:
        self._is_sender_to_die = self._pair = None

    def on_begin(self, receiver: SimProcess, address: str) -> None:
        """One more transfer, of which the receiver knows only where the sender is to be found."""
        self.num_begun += 1
        listener = self._world.network.try_find(address)
        if self._is_sender_to_die is not None and self._pair is None and listener is not None:
            self._pair = listener.process, receiver
            self.num_pair_events = 0

    def after_event(self, process: SimProcess | None) -> None:
        if self._pair is None or process not in self._pair:
            return
        self.num_pair_events += 1
        if self.num_pair_events <= self._num_events_before:
            return
        sender, receiver = self._pair
        victim = sender if self._is_sender_to_die else receiver
        self.call_off()
        if not victim.is_dead:
            self._world.note(f"{victim} dies as pages cross from {sender} to {receiver}")
            self.on_death()
            self._world.crash(victim)

    def _check_writer(self, process: SimProcess, memory: memoryview) -> None:
        """Bytes that come go into reserved pages only, as long as these are."""
        place = next(place for place in self._world.places if place.process is process)
        segment = place.host.segment
        assert segment is not None
        offset = np.frombuffer(memory, np.uint8).ctypes.data - segment.pages.ctypes.data
        page_id = offset // segment.geometry.page_bytes
        if not 0 <= page_id < segment.geometry.num_pages:
            return
        self._num_bytes += len(memory)
        self._num_events_to_last_page = self.num_pair_events
        row = segment.page_rows[page_id]
        if (row["state"], row["owner"]) != (PageState.LEASED, TRANSFER_LEASE):
            self._world.fail(f"P4: {place.name}: bytes came into page {page_id}, which is owner {row['owner']}'s")


class PagesDialer(SimDialer):
    """Of a transfer service, which dials others of its kind only."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange.traffic.network, SimChannel)
        self._exchange = exchange

    def open(self, address: str, party: Party) -> Any:
        self._exchange.on_begin(PROCESS.get(), address)
        return super().open(address, party)


class CountedFetches:
    """Of one transfer service: how many it began, each of which ends once."""

    def __init__(self, world_exchange: Exchange, service: TransferService) -> None:
        exchange = service._exchange
        assert exchange is not None
        self.num_begun = 0
        begin = exchange.fetcher.begin

        def count(*args: object, **more: object) -> bool:
            has_begun = begin(*args, **more)  # type: ignore[arg-type]
            self.num_begun += has_begun
            world_exchange.num_fetches += has_begun
            return has_begun

        exchange.fetcher.begin = count  # type: ignore[method-assign]


def check_books(place: "Place") -> None:
    """What is pinned and reserved for transfers is what the service counts."""
    service, segment = place.component, place.host.segment
    assert isinstance(service, TransferService)
    assert segment is not None
    rows, remote = segment.page_rows, service._core.remote.metrics()
    num_reserved = int(np.count_nonzero((rows["state"] == PageState.LEASED) & (rows["owner"] == TRANSFER_LEASE)))
    num_pinned = int(service._core.prefixes.pins_of(TRANSFER_LEASE).sum())
    counted = remote["remote_pages_reserved"], remote["remote_pages_pinned"]
    if (num_reserved, num_pinned) != counted:
        raise BrokenPromise(
            f"P3: {place.name} counts {counted} pages reserved and pinned: {num_reserved}, {num_pinned}"
        )


def unrest_of_exchange(place: "Place", num_threads: int) -> str:
    """What a transfer service still has to do with others. Empty: nothing."""
    service = place.component
    assert isinstance(service, TransferService)
    exchange = service._exchange
    if exchange is None:
        return ""
    metrics = service.describe().metrics
    kept = {name: metrics[name] for name in ("remote_pages_reserved", "remote_pages_pinned") if metrics[name]}
    if kept:
        return f"P3: {place.name} has {kept}"
    num_fetches = len(exchange.fetcher._tasks) + len(exchange.fetcher._settling)
    num_stages, num_offers = exchange.stager._num_stages, exchange._servicer._num_offers
    if num_fetches or num_stages or num_offers or num_threads:
        return (
            f"{place.name} has {num_fetches} fetches, {num_stages} stages, {num_offers} offers, {num_threads} threads"
        )
    assert place.fetches is not None
    num_begun, num_ended = place.fetches.num_begun, metrics["remote_prefixes_total"]
    return f"{place.name} began {num_begun} fetches, of which {num_ended:g} ended" if num_begun != num_ended else ""
