"""One contract over stores of pages: what is got is what was put, whoever else writes, removes and damages there; and
the bound holds."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from tests.contract.page_places import (
    HASHES,
    LAYOUT,
    MAX_BYTES,
    FilesPlace,
    MemoryPlace,
    Place,
    ValkeyPlace,
    got,
    page_of,
    put,
)
from tests.contract.valkey_server import ValkeyServer, running

from weir.core.trusted_folder import UntrustedFolder
from weir.kv.tiers.file_store import PageFileStore
from weir.kv.tiers.page_header import PageLayout


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with running(tmp_path_factory.mktemp("valkey")) as server:
        yield server


def open_place(name: str, folder: Path, request: pytest.FixtureRequest) -> Place:
    if name == "files":
        return FilesPlace(folder)
    if name == "memory":
        return MemoryPlace()
    server: ValkeyServer = request.getfixturevalue("server")
    return ValkeyPlace(server)


@pytest.fixture(params=["files", "valkey", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with open_place(request.param, tmp_path, request) as place:
        yield place


@pytest.fixture(params=["files", "valkey"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A place of several processes."""
    with open_place(request.param, tmp_path, request) as place:
        yield place


@pytest.fixture(params=["files", "memory"])
def bounded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A place whose bound the store itself keeps to."""
    with open_place(request.param, tmp_path, request) as place:
        yield place


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_what_one_puts_another_finds_once_it_looks(shared: Place) -> None:
    one, other = shared.open(), shared.open()
    put(one, *HASHES[:5])
    assert one.num_leading(HASHES) == 5
    assert other.num_leading(HASHES) == 0
    other.refresh()
    assert [other.num_leading(HASHES), other.num_pages] == [5, 5]
    assert [got(other, page_hash) for page_hash in HASHES[:6]] == [*map(page_of, HASHES[:5]), None]


def test_what_was_put_is_got(place: Place) -> None:
    store = place.open()
    put(store, *HASHES[:50])
    assert [store.num_pages, store.num_leading(HASHES)] == [50, 50]
    assert [got(store, page_hash) for page_hash in HASHES[:51]] == [*map(page_of, HASHES[:50]), None]
    assert (store.counters.missing_total, store.counters.damaged_total) == (1, 0)
    assert store.num_bytes >= 50 * LAYOUT.page_bytes or not isinstance(place, MemoryPlace | FilesPlace)


def test_a_folder_that_changes_twice_within_a_tick_of_its_clock_is_listed_again(tmp_path: Path) -> None:
    one, other = (PageFileStore(tmp_path, LAYOUT, MAX_BYTES) for _ in range(2))
    put(one, HASHES[0])
    other.refresh()
    folder = files_in(tmp_path)[0].parent
    ticked_ns = folder.stat().st_mtime_ns
    put(one, HASHES[3])
    os.utime(folder, ns=(ticked_ns, ticked_ns))
    other.refresh()
    assert HASHES[3] in other


def test_a_page_that_is_there_is_not_written_again(shared: Place) -> None:
    one, other = shared.open(), shared.open()
    assert one.try_put(HASHES[0], page_of(HASHES[0]))
    assert not one.try_put(HASHES[0], page_of(HASHES[0]))
    assert not other.try_put(HASHES[0], page_of(HASHES[0]))
    assert HASHES[0] in other


def test_a_page_that_vanished_is_a_miss(place: Place) -> None:
    store = place.open()
    put(store, *HASHES[:2])
    place.remove(HASHES[0])
    assert got(store, HASHES[0]) is None
    assert (store.counters.missing_total, store.counters.damaged_total) == (1, 0)
    assert HASHES[0] not in store
    assert got(store, HASHES[1]) == page_of(HASHES[1])


def test_a_damaged_page_is_a_miss_and_goes(place: Place) -> None:
    store = place.open()
    put(store, HASHES[0])
    place.overwrite(HASHES[0], place.stored()[HASHES[0]][:-1] + b"?")
    assert got(store, HASHES[0]) is None
    assert (store.counters.missing_total, store.counters.damaged_total) == (0, 1)
    assert place.stored() == {}
    assert HASHES[0] not in store
    put(store, HASHES[0])
    assert got(store, HASHES[0]) == page_of(HASHES[0])


@pytest.mark.parametrize("change", ["empty", "cut", "longer", "of another page", "of another layout", "no header"])
def test_what_somebody_plants_is_not_taken_for_a_page(shared: Place, change: str) -> None:
    store = shared.open()
    put(store, *HASHES[:2])
    raw = shared.stored()[HASHES[0]]
    foreign = shared.open(PageLayout("another", LAYOUT.page_bytes))
    put(foreign, HASHES[0])
    planted = {
        "empty": b"",
        "cut": raw[:300],
        "longer": raw + b"x",
        "of another page": shared.stored()[HASHES[1]],
        "of another layout": shared.stored(foreign_to=LAYOUT)[HASHES[0]],
        "no header": page_of(HASHES[0]),
    }
    shared.overwrite(HASHES[0], planted[change])
    assert got(store, HASHES[0]) is None
    assert (store.counters.missing_total, store.counters.damaged_total) == (0, 1)
    assert HASHES[0] not in shared.stored()
    assert got(store, HASHES[1]) == page_of(HASHES[1])


def test_what_was_used_longest_ago_goes_first(bounded: Place) -> None:
    store = bounded.open()
    put(store, *HASHES[:85])
    store.touch(HASHES[:10])
    put(store, *HASHES[85:110])
    assert store.counters.evicted_total > 0
    assert store.num_bytes <= bounded.full_share * MAX_BYTES
    assert [page_hash in store for page_hash in HASHES[:10]] == [True] * 10
    assert HASHES[10] not in store
    assert got(store, HASHES[109]) == page_of(HASHES[109])


def test_of_a_prefix_the_end_goes_first(bounded: Place) -> None:
    store = bounded.open()
    put(store, *HASHES[:90])
    store.touch(HASHES[:90])
    put(store, *HASHES[90:105])
    left = store.num_leading(HASHES[:90])
    assert 0 < left < 90
    assert all(page_hash not in store for page_hash in HASHES[left:90])


def test_pages_of_an_earlier_model_make_room(tmp_path: Path) -> None:
    earlier = PageFileStore(tmp_path, PageLayout("earlier", 500), MAX_BYTES)
    put(earlier, *HASHES[:85])
    store = PageFileStore(tmp_path, LAYOUT, MAX_BYTES)
    assert (store.num_pages, store.num_bytes) == (0, 85 * LAYOUT.stored_bytes)
    put(store, *HASHES[100:112])
    assert store.num_pages == 12
    assert sum(path.stat().st_size for path in files_in(tmp_path)) <= 0.92 * MAX_BYTES


def test_what_others_keep_in_the_folder_stays(tmp_path: Path) -> None:
    strange = [tmp_path / "notes.txt", tmp_path / "ab" / "cd" / "x", tmp_path / LAYOUT.digest.hex() / "00" / "notes"]
    for path in strange:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_bytes(b"x" * 2 * MAX_BYTES)
    put(PageFileStore(tmp_path, LAYOUT, MAX_BYTES), *HASHES[:95])
    assert all(path.exists() for path in strange)


def test_what_a_writer_that_died_left_goes_after_an_hour(tmp_path: Path) -> None:
    put(PageFileStore(tmp_path, LAYOUT, MAX_BYTES), HASHES[0])
    [path] = files_in(tmp_path)
    old, new = path.with_name(f".{path.name}.a.new"), path.with_name(f".{path.name}.b.new")
    for one in (old, new):
        one.write_bytes(b"half")
    os.utime(old, (1, 1))
    PageFileStore(tmp_path, LAYOUT, MAX_BYTES)
    assert sorted(files_in(tmp_path)) == sorted([path, new])


def test_folders_are_for_their_user_alone(tmp_path: Path) -> None:
    put(PageFileStore(tmp_path / "pages", LAYOUT, MAX_BYTES), HASHES[0])
    modes = {oct(path.stat().st_mode & 0o777) for path in (tmp_path / "pages").rglob("*") if path.is_dir()}
    assert modes == {"0o700"}


def test_a_folder_where_others_may_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages").chmod(0o777)
    with pytest.raises(UntrustedFolder, match="set page_files_dir to a folder of your own"):
        PageFileStore(tmp_path / "pages", LAYOUT, MAX_BYTES)


def test_a_bound_of_too_few_pages_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=f"page_files_bytes 5000: holds 8 pages of this model; give at least {MAX_BYTES}"
    ):
        PageFileStore(tmp_path, LAYOUT, 5000)


class SharedStores(RuleBasedStateMachine):
    """Two stores on one place, and somebody who damages and removes what lies there."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self._closing = ExitStack()
        self.place = self._closing.enter_context(place)
        self.damaged: set[bytes] = set()

    @initialize(num_before=st.integers(0, 95))
    def begin(self, num_before: int) -> None:
        first = self.place.open()
        put(first, *HASHES[:num_before])
        self.stores = (first, self.place.open())

    @rule(who=st.integers(0, 1), first=st.integers(0, 199), count=st.integers(1, 40))
    def put_some(self, who: int, first: int, count: int) -> None:
        for page_hash in HASHES[first : first + count]:
            put(self.stores[who], page_hash)

    @rule(who=st.integers(0, 1), number=st.integers(0, 199))
    def get(self, who: int, number: int) -> None:
        page_hash, store = HASHES[number], self.stores[who]
        found = got(store, page_hash)
        assert found in (None, page_of(page_hash)), "never other bytes"
        assert (found is not None) <= (page_hash not in self.damaged)
        if found is None:
            assert page_hash not in store
            self.damaged.discard(page_hash)

    @rule(number=st.integers(0, 1000), how=st.sampled_from(["gone", "torn", "flipped", "empty"]))
    def harm(self, number: int, how: str) -> None:
        stored = self.place.stored()
        if not stored:
            return
        page_hash = sorted(stored)[number % len(stored)]
        if page_hash in self.damaged:  # the same bit twice would mend it
            return
        raw = stored[page_hash]
        if how == "gone" or len(raw) < LAYOUT.stored_bytes:
            self.place.remove(page_hash)
            return
        flipped = bytearray(raw)
        flipped[number % (len(raw) - 4)] ^= 1 + number % 255
        self.place.overwrite(
            page_hash, {"torn": raw[: number % len(raw)], "flipped": bytes(flipped), "empty": b""}[how]
        )
        if bytes(flipped) != raw:
            self.damaged.add(page_hash)

    @rule(who=st.integers(0, 1))
    def refresh(self, who: int) -> None:
        store = self.stores[who]
        store.refresh()
        assert {page_hash for page_hash in HASHES if page_hash in store} == set(self.place.stored())

    @rule(who=st.integers(0, 1), first=st.integers(0, 199), count=st.integers(1, 40))
    def touch(self, who: int, first: int, count: int) -> None:
        self.stores[who].touch(HASHES[first : first + count])

    @invariant()
    def the_bound_holds(self) -> None:
        if isinstance(self.place, FilesPlace):
            num_bytes = sum(map(len, self.place.stored().values()))
            assert num_bytes <= 0.95 * MAX_BYTES, "each of the two looks after every fiftieth part of it"

    def teardown(self) -> None:
        self._closing.close()


@pytest.mark.parametrize("name", ["files", "valkey"])
def test_shared_stores(name: str, request: pytest.FixtureRequest) -> None:
    """Whatever two stores do, and whoever harms what lies there."""
    with tempfile.TemporaryDirectory() as folder:

        class Opened(SharedStores):
            def __init__(self) -> None:
                super().__init__(open_place(name, Path(tempfile.mkdtemp(dir=folder)), request))

        few = settings(max_examples=25, stateful_step_count=25, deadline=None)
        run_state_machine_as_test(Opened, settings=few)


_HAMMER = """
import random, sys
from pathlib import Path
from tests.contract.page_places import FilesPlace, HASHES, got, page_of, put
store, draw = FilesPlace(Path(sys.argv[1])).open(), random.Random(sys.argv[2])
num_got = 0
for _ in range(1500):
    page_hash = draw.choice(HASHES)
    if draw.random() < 0.5:
        put(store, page_hash)
    found = got(store, page_hash)
    assert found in (None, page_of(page_hash)), "other bytes"
    num_got += found is not None
    if draw.random() < 0.02:
        store.refresh()
assert not store.counters.damaged_total, "nobody damaged anything"
print(num_got)
"""


def test_processes_that_write_read_and_evict_at_once_get_only_what_was_put(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HAMMER, str(tmp_path)]
    running = [subprocess.Popen([*command, seed], stdout=subprocess.PIPE, text=True) for seed in "ab"]
    told = [process.communicate(timeout=120)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert all(int(one) > 100 for one in told)
    paths = files_in(tmp_path)
    assert sum(path.stat().st_size for path in paths) <= 0.95 * MAX_BYTES
    assert not [path for path in paths if path.name.endswith(".new")]
