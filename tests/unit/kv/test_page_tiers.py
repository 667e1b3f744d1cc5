"""Parts of page tiers: when a server that failed is asked again, what a URL says, and slots of memory amid readers."""

import threading

import pytest

from weir.core.clock import ManualClock
from weir.kv.memory.page_access import HostMemoryFull, InPlace, PageMemoryAway
from weir.kv.tiers import memory_store
from weir.kv.tiers.circuit import Circuit
from weir.kv.tiers.memory_store import MIN_PAGES, PageMemoryStore
from weir.kv.tiers.valkey_address import ValkeyAddress, parse_valkey_url

_PAGE_BYTES = 64


def test_a_circuit_is_tried_after_longer_and_longer_until_it_closes() -> None:
    clock = ManualClock()
    circuit = Circuit(clock)
    assert (circuit.is_open, circuit.may_try()) == (False, True)
    waited_s = []
    assert circuit.on_failure(), "it opens"
    for _ in range(6):
        began_s = clock.now_s()
        while not circuit.may_try():
            assert not circuit.on_failure(), "others that fail put nothing off"
            clock.advance(0.5)
        waited_s.append(clock.now_s() - began_s)
        circuit.on_failure()
    assert waited_s == [1, 2, 4, 8, 10, 10]
    assert circuit.is_open
    assert circuit.on_success(), "it closes"
    assert not circuit.on_success()
    circuit.on_failure()
    clock.advance(1.0)
    assert circuit.may_try(), "and begins anew"


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://cache", ValkeyAddress("cache", 6379, 0, "", False)),
        ("rediss://ada@10.0.0.7:7000/3", ValkeyAddress("10.0.0.7", 7000, 3, "ada", True)),
        ("valkeys://[fd00::1]:7000", ValkeyAddress("fd00::1", 7000, 0, "", True)),
        ("valkey://a%40b@cache/", ValkeyAddress("cache", 6379, 0, "a@b", False)),
    ],
)
def test_a_url_says_where_the_server_is(url: str, address: ValkeyAddress) -> None:
    assert parse_valkey_url(url) == address
    assert "ada" not in str(address)


def test_an_address_is_shown_as_a_url() -> None:
    assert str(parse_valkey_url("valkeys://[fd00::1]:7000")) == "rediss://[fd00::1]:7000/0"


@pytest.mark.parametrize(
    "url", ["", "cache:6379", "http://cache", "redis://", "redis:///3", "redis://h/-1", "redis://h?db=3", "redis://h#x"]
)
def test_what_is_no_address_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"must be redis://|names database"):
        parse_valkey_url(url)


@pytest.mark.parametrize("host", ["a..b", "a" * 64, f"{'a' * 60}é.example"])
def test_a_host_that_cannot_be_asked_for_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match="names a host that no name server can be asked for"):
        parse_valkey_url(f"redis://{host}")


@pytest.mark.parametrize("url", ["redis://:secret@h", "redis://u:secret@h:1", "redis://u:@h"])
def test_a_password_in_a_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ValueError, match="has a password in it") as refused:
        parse_valkey_url(url)
    assert "secret" not in str(refused.value)


def hash_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def page_of(number: int) -> bytes:
    return bytes([number]) * _PAGE_BYTES


def slab_of(num_pages: int) -> memoryview:
    return memoryview(bytearray(num_pages * _PAGE_BYTES))


def got(store: PageMemoryStore, number: int) -> bytes | None:
    memory = memoryview(bytearray(_PAGE_BYTES))
    return bytes(memory) if store.try_get(hash_of(number), InPlace(memory)) else None


class SlowPlace:
    """Takes its page when it is told to go on."""

    def __init__(self) -> None:
        self.memory = memoryview(bytearray(_PAGE_BYTES))
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

    def begin(self) -> memoryview:
        return self.memory

    def end(self, memory: memoryview) -> None: ...

    def take(self, page: memoryview) -> None:
        self.has_begun.set()
        assert self.may_go_on.wait(30)
        self.memory[:] = page


@pytest.mark.parametrize("how", ["evicted", "forgotten"])
def test_a_slot_that_is_read_is_not_taken_for_another_page(how: str) -> None:
    num_made = 0

    def make_slab(num_pages: int) -> memoryview:
        nonlocal num_made
        num_made += num_pages
        return slab_of(num_pages)

    store = PageMemoryStore(_PAGE_BYTES, MIN_PAGES * _PAGE_BYTES, make_slab)
    for number in range(MIN_PAGES):
        store.try_put(hash_of(number), page_of(number))
    place = SlowPlace()
    reading = threading.Thread(target=store.try_get, args=(hash_of(0), place))
    reading.start()
    assert place.has_begun.wait(30)
    if how == "forgotten":
        store.forget(hash_of(0))
    for number in range(100, 100 + 2 * MIN_PAGES):
        store.try_put(hash_of(number), page_of(number))
    place.may_go_on.set()
    reading.join(30)
    assert bytes(place.memory) == page_of(0)
    assert num_made == MIN_PAGES, "the others are taken again and again"
    last = 100 + 2 * MIN_PAGES
    for number in range(last, last + 3):
        assert store.try_put(hash_of(number), page_of(number))
    assert num_made == MIN_PAGES


@pytest.mark.parametrize("error", [MemoryError("no more"), HostMemoryFull("no more"), PageMemoryAway("workers")])
def test_memory_that_is_not_to_be_had_takes_no_page(error: Exception) -> None:
    def make_slab(num_pages: int) -> memoryview:
        raise error

    store = PageMemoryStore(_PAGE_BYTES, MIN_PAGES * _PAGE_BYTES, make_slab)
    for _ in range(2):
        with pytest.raises(OSError, match="workers" if type(error) is PageMemoryAway else "no more memory"):
            store.try_put(hash_of(0), page_of(0))
    assert hash_of(0) not in store


@pytest.mark.parametrize("error", [MemoryError("no more"), HostMemoryFull("no more")])
def test_where_the_host_gives_no_more_the_page_used_longest_ago_makes_room(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory_store, "_SLAB_BYTES", 20 * _PAGE_BYTES)
    asked: list[int] = []

    def make_slab(num_pages: int) -> memoryview:
        asked.append(num_pages)
        if len(asked) > 2:
            raise error
        return slab_of(num_pages)

    store = PageMemoryStore(_PAGE_BYTES, 100 * _PAGE_BYTES, make_slab)
    for number in range(150):
        assert store.try_put(hash_of(number), page_of(number))
    assert asked == [20, 20, 20], "it is not asked again"
    assert [got(store, number) for number in range(150)] == [None] * 110 + [page_of(n) for n in range(110, 150)]
    assert caplog.text.count("has memory for 40 pages") == 1


def test_while_workers_have_the_memory_of_the_device_no_page_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_store, "_SLAB_BYTES", 20 * _PAGE_BYTES)
    is_away = False

    def make_slab(num_pages: int) -> memoryview:
        if is_away:
            raise PageMemoryAway("workers")
        return slab_of(num_pages)

    store = PageMemoryStore(_PAGE_BYTES, 40 * _PAGE_BYTES, make_slab)
    for number in range(20):
        store.try_put(hash_of(number), page_of(number))
    is_away = True
    with pytest.raises(PageMemoryAway):
        store.try_put(hash_of(20), page_of(20))
    is_away = False
    assert store.try_put(hash_of(20), page_of(20))
    assert got(store, 0) == page_of(0)


def test_a_large_bound_is_made_of_few_allocations() -> None:
    asked: list[int] = []

    def make_slab(num_pages: int) -> memoryview:
        asked.append(num_pages)
        return memoryview(bytearray(num_pages << 20))

    store = PageMemoryStore(1 << 20, 70 << 20, make_slab)
    for number in range(80):
        store.try_put(hash_of(number), bytes(1 << 20))
    assert asked == [64, 6]


def test_a_bound_of_too_few_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="page_memory_bytes 100: holds 1 pages of this model; give at least 2048"):
        PageMemoryStore(_PAGE_BYTES, 100, slab_of)
