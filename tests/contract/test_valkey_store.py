"""A Valkey that dies, stands still, is full, holds what somebody planted, or lets nobody in: its pages are missing
then, nobody waits for it longer than said, and it is used again once it answers."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from tests.contract.page_places import HASHES, LAYOUT, ValkeyPlace, got, page_of, put
from tests.contract.valkey_server import ValkeyServer, running
from tests.e2e.certified import Lab

from weir.core.clock import ManualClock
from weir.kv.memory.page_access import InPlace
from weir.kv.tiers.page_header import PageLayout
from weir.kv.tiers.valkey_address import parse_valkey_url
from weir.kv.tiers.valkey_client import ValkeySettings
from weir.kv.tiers.valkey_store import ValkeyPageStore

_ANSWER_S = 0.3
_LARGE = PageLayout("digest", 64 << 10)


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with running(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def server(shared_server: ValkeyServer) -> ValkeyServer:
    shared_server.client.flushdb()
    return shared_server


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def open_store(
    server: ValkeyServer, clock: ManualClock, answer_s: float = 30.0, layout: PageLayout = LAYOUT, ttl_s: int = 1000
) -> ValkeyPageStore:
    return ValkeyPageStore(ValkeySettings(parse_valkey_url(server.url), ttl_s=ttl_s, answer_s=answer_s), layout, clock)


@pytest.fixture
def store(server: ValkeyServer, clock: ManualClock) -> Iterator[ValkeyPageStore]:
    store = open_store(server, clock)
    yield store
    store.close()


def test_one_that_died_is_not_asked_again_until_it_is_tried(tmp_path: Path, clock: ManualClock) -> None:
    with running(tmp_path) as server:
        store = open_store(server, clock)
        put(store, *HASHES[:20])
        server.kill()
        assert got(store, HASHES[0]) is None
        assert (store.is_away, store.num_leading(HASHES), HASHES[0] in store) == (True, 0, True)
        server.start()
        store.refresh()
        assert store.is_away, "its time has not come"
        with pytest.raises(ConnectionError, match="is away"):
            store.try_put(HASHES[30], page_of(HASHES[30]))
        clock.advance(1.0)
        store.refresh()
        assert (store.is_away, store.num_pages) == (False, 0), "it had nothing on a disk"
        put(store, HASHES[0])
        assert got(store, HASHES[0]) == page_of(HASHES[0])
        assert store.counters.failed_reads_total == 1
        store.close()


def test_one_that_is_not_there_at_the_start_is_found_later(tmp_path: Path, clock: ManualClock) -> None:
    server = ValkeyServer(tmp_path)
    store = open_store(server, clock)
    seen = [store.is_away]
    try:
        server.start()
        clock.advance(1.0)
        put(store, HASHES[0])
        assert [*seen, store.is_away] == [True, False]
        assert got(store, HASHES[0]) == page_of(HASHES[0])
    finally:
        store.close()
        server.close()


def test_one_that_stands_still_holds_nobody_up(tmp_path: Path, clock: ManualClock) -> None:
    with running(tmp_path) as server:
        store = open_store(server, clock, _ANSWER_S)
        put(store, *HASHES[:20])
        server.pause()
        assert got(store, HASHES[0]) is None
        assert store.is_away
        asked = [got(store, page_hash) for page_hash in HASHES[1:20] for _ in range(100)]
        assert set(asked) == {None}, "it would take ten minutes if each waited"
        clock.advance(1.0)
        with pytest.raises(ConnectionError):
            store.try_put(HASHES[30], page_of(HASHES[30]))
        server.go_on()
        clock.advance(2.0)
        store.refresh()
        assert [got(store, page_hash) for page_hash in HASHES[:20]] == list(map(page_of, HASHES[:20]))
        store.close()


def test_one_that_sends_a_byte_now_and_then_is_left(clock: ManualClock) -> None:
    """Each of its bytes comes in time, and all of them never would."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sent: list[int] = []

        def send_slowly() -> None:
            for _ in range(2):  # the look at the start, and the read
                connection, _ = listening.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"$500\r\n")
                    try:
                        for number in range(500):
                            connection.sendall(b"x")
                            sent.append(number)
                            time.sleep(0.05)
                    except OSError:
                        continue

        sending = threading.Thread(target=send_slowly)
        sending.start()
        address = parse_valkey_url(f"redis://127.0.0.1:{listening.getsockname()[1]}")
        store = ValkeyPageStore(ValkeySettings(address, answer_s=_ANSWER_S), LAYOUT, clock)
        assert store.is_away
        store._circuit.on_success()
        assert got(store, HASHES[0]) is None
        assert store.is_away
        sending.join(30)
        store.close()
    assert len(sent) < 100


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """The address of a server that answers everything with the same bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor(4) as threads:

        def answer_all(connection: socket.socket) -> None:
            connection.settimeout(30)
            with connection, suppress(OSError):
                while connection.recv(1 << 16):
                    connection.sendall(answer)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    threads.submit(answer_all, listening.accept()[0])

        threads.submit(accept)
        try:
            yield f"redis://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("answer", [b"$abc\r\n", b":1\r\n", b":x\r\n", b"*x\r\n", b"*1\r\n$1\r\nx\r\n", b"\xff\r\n"])
def test_what_is_no_answer_counts_as_none(clock: ManualClock, answer: bytes) -> None:
    with answering(answer) as url:
        store = ValkeyPageStore(ValkeySettings(parse_valkey_url(url), answer_s=30.0), LAYOUT, clock)
        with closing(store):
            assert store.is_away
            clock.advance(20.0)
            store.refresh()
            assert store.is_away
            with suppress(OSError):
                assert not store.try_put(HASHES[0], page_of(HASHES[0]))
            store._circuit.on_success()
            assert got(store, HASHES[0]) is None
            store._circuit.on_success()
            store.touch(HASHES[:1])


def test_readers_amid_a_kill_get_what_was_put_or_nothing(tmp_path: Path, clock: ManualClock) -> None:
    with running(tmp_path) as server:
        store = open_store(server, clock)
        put(store, *HASHES[:50])
        wrong: list[bytes] = []
        num_got, has_read = [0], threading.Event()

        def read() -> None:
            for number in range(3000):
                page_hash = HASHES[number % 50]
                found = got(store, page_hash)
                if found is not None and found != page_of(page_hash):
                    wrong.append(page_hash)
                num_got[0] += found is not None
                if number == 100:
                    has_read.set()

        readers = [threading.Thread(target=read) for _ in range(4)]
        for reader in readers:
            reader.start()
        assert has_read.wait(60)
        server.kill()
        for reader in readers:
            reader.join(60)
        assert wrong == []
        assert num_got[0] > 0
        assert store.is_away
        store.close()


@pytest.mark.parametrize("call", ["put", "refresh"])
def test_what_was_asked_before_a_reader_failed_does_not_count_as_an_answer_since(
    store: ValkeyPageStore, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    name = "expire" if call == "put" else "info"
    ask: Callable[..., object] = getattr(store._client, name)

    def fails_meanwhile(*arguments: object) -> object:
        store._on_failure(TimeoutError("of a reader"))
        return ask(*arguments)

    monkeypatch.setattr(store._client, name, fails_meanwhile)
    put(store, HASHES[0]) if call == "put" else store.refresh()
    assert store.is_away


def test_a_page_that_is_written_while_it_is_found_missing_stays(
    store: ValkeyPageStore, server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask: Callable[..., object] = store._client.getrange

    def then_written(*arguments: object) -> object:
        answer = ask(*arguments)
        put(store, HASHES[0])
        return answer

    monkeypatch.setattr(store._client, "getrange", then_written)
    assert got(store, HASHES[0]) == page_of(HASHES[0])
    assert len(server.client.keys()) == 1
    assert (store.counters.missing_total, store.counters.damaged_total) == (0, 0)


def test_a_full_one_that_evicts_nothing_takes_no_page_and_still_gives_what_it_has(
    store: ValkeyPageStore, server: ValkeyServer
) -> None:
    put(store, *HASHES[:5])
    server.set("maxmemory-policy", "noeviction")
    server.set("maxmemory", "1")
    try:
        with pytest.raises(OSError, match="is full"):
            put(store, HASHES[5])
        assert not store.is_away
        assert HASHES[5] not in store
        assert [got(store, page_hash) for page_hash in HASHES[:5]] == list(map(page_of, HASHES[:5]))
    finally:
        server.set("maxmemory", "0")
    put(store, HASHES[5])
    assert got(store, HASHES[5]) == page_of(HASHES[5])


def test_of_one_that_evicts_the_pages_that_went_are_missing(server: ValkeyServer, clock: ManualClock) -> None:
    used_bytes = int(server.client.info("memory")["used_memory"])
    server.set("maxmemory-policy", "allkeys-lru")
    server.set("maxmemory", str(used_bytes + 50 * _LARGE.page_bytes))
    store = open_store(server, clock, layout=_LARGE)
    pages = {page_hash: page_hash * (_LARGE.page_bytes // len(page_hash)) for page_hash in HASHES[:150]}
    try:
        for page_hash, page in pages.items():
            assert store.try_put(page_hash, page)
    finally:
        server.set("maxmemory", "0")
        server.set("maxmemory-policy", "noeviction")
    assert store.num_bytes <= used_bytes + 50 * _LARGE.page_bytes
    found = [_got_large(store, page_hash) for page_hash in pages]
    assert 0 < sum(page is not None for page in found) < 60
    assert all(page in (None, pages[page_hash]) for page_hash, page in zip(pages, found, strict=True))
    assert store.counters.missing_total == sum(page is None for page in found)
    store.close()


def _got_large(store: ValkeyPageStore, page_hash: bytes) -> bytes | None:
    memory = bytearray(_LARGE.page_bytes)
    return bytes(memory) if store.try_get(page_hash, InPlace(memoryview(memory))) else None


def test_what_is_no_string_is_no_page(store: ValkeyPageStore, server: ValkeyServer) -> None:
    put(store, HASHES[0])
    [key] = server.client.keys()
    server.client.delete(key)
    server.client.rpush(key, "a", "b")
    assert got(store, HASHES[0]) is None
    assert (store.counters.damaged_total, store.is_away) == (1, False)
    assert server.client.keys() == []


def test_a_page_is_forgotten_that_nobody_uses(store: ValkeyPageStore, server: ValkeyServer) -> None:
    put(store, *HASHES[:2])
    [one, other] = sorted(server.client.keys())
    assert 900 < int(server.client.ttl(one)) <= 1000
    for key in (one, other):
        server.client.expire(key, 50)
    store.touch(HASHES[:1])
    assert sorted(int(server.client.ttl(key)) > 900 for key in (one, other)) == [False, True]
    assert not store.try_put(HASHES[1], page_of(HASHES[1]))
    assert all(int(server.client.ttl(key)) > 900 for key in (one, other))


def test_keys_of_others_are_none_of_its_pages(server: ValkeyServer, clock: ManualClock) -> None:
    own = f"weir:page:{LAYOUT.digest.hex()}:"
    for key in ("other", f"{own}{'0' * 30}", f"{own}{'z' * 32}", f"weir:page:{'0' * 32}:{'0' * 32}"):
        server.client.set(key, b"x")
    with closing(open_store(server, clock)) as store:
        assert store.num_pages == 0


def test_what_one_look_does_not_reach_the_next_one_sees(
    store: ValkeyPageStore, server: ValkeyServer, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weir.kv.tiers.valkey_store._LOOK_S", -1.0)
    server.client.mset({f"other:{number}": b"x" for number in range(20_000)})
    put(store, *HASHES)
    with closing(open_store(server, clock)) as looking:
        assert len(_looked_through(looking)) > 10, "each look has time for some keys alone"
        assert looking.num_leading(HASHES) == len(HASHES)
        server.client.delete(*server.client.keys("weir:*"))
        *before, last = _looked_through(looking)
        assert (set(before), last) == ({len(HASHES)}, 0)


def _looked_through(store: ValkeyPageStore) -> list[int]:
    seen = list[int]()
    while not seen or store._cursor:
        store.refresh()
        seen.append(store.num_pages)
    return seen


def test_it_is_told_what_it_should_have_been_told(
    server: ValkeyServer, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(server, clock)
    store.refresh()
    assert caplog.text.count("has no maxmemory") == 1
    server.set("maxmemory", "1gb")
    store.refresh()
    assert "has maxmemory-policy noeviction" in caplog.text
    server.set("maxmemory", "0")
    store.close()


def test_a_password_comes_from_a_file_and_is_told_nobody(
    tmp_path: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    password = "open sesame"
    path = tmp_path / "password"
    with running(tmp_path, password=password) as server:
        settings = ValkeySettings(parse_valkey_url(server.url), str(path), answer_s=30.0)
        store = ValkeyPageStore(settings, LAYOUT, clock)
        assert store.is_away
        assert f"page_valkey_password_file {path}: No such file or directory" in caplog.text
        path.write_text("another one\n")
        clock.advance(1.0)
        store.refresh()
        assert store.is_away
        path.write_text(f"{password}\n")
        clock.advance(10.0)
        store.refresh()
        put(store, HASHES[0])
        assert got(store, HASHES[0]) == page_of(HASHES[0])
        store.close()
    assert not [word for word in (password, "another one") if word in caplog.text]


def test_a_server_is_believed_by_its_certificate(tmp_path: Path, clock: ManualClock) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "others").mkdir()
    lab, others = Lab(tmp_path / "own"), Lab(tmp_path / "others")
    pair = lab.public()
    tls = ["--tls-cert-file", str(pair.cert), "--tls-key-file", str(pair.key), "--tls-ca-cert-file", str(lab.ca)]
    with running(tmp_path, *tls, "--tls-auth-clients", "no", is_encrypted=True) as server:
        for ca, is_away in ((lab.ca, False), (others.ca, True)):
            settings = ValkeySettings(parse_valkey_url(server.url), ca_file=str(ca), answer_s=30.0)
            store = ValkeyPageStore(settings, LAYOUT, clock)
            assert store.is_away == is_away
            if not is_away:
                put(store, HASHES[0])
                assert got(store, HASHES[0]) == page_of(HASHES[0])
            store.close()


def test_places_of_tests_see_pages_of_one_layout_alone(server: ValkeyServer) -> None:
    with ValkeyPlace(server) as place:
        put(place.open(PageLayout("another", LAYOUT.page_bytes)), HASHES[0])
        assert place.stored() == {}
        assert len(place.stored(foreign_to=LAYOUT)) == 1
