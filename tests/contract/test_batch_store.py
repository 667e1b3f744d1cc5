"""What every database of batches does: SQLite, and PostgreSQL where there is one to be started, or WEIR_TEST_POSTGRES
names a server."""

import contextlib
import json
import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.contract.postgres_server import running

from weir.core.errors import AlreadyExists, InvalidRequest, NotFound, QuotaExceeded
from weir_gateway.batches.database import Database
from weir_gateway.batches.files import PART_BYTES, FileStore, PageAsked
from weir_gateway.batches.lines import LineBounds
from weir_gateway.batches.records import BatchRecord, BatchStatus, ClaimedLine, NewBatch
from weir_gateway.batches.results import answered
from weir_gateway.batches.schema import metadata
from weir_gateway.batches.store import BatchBounds, BatchStore

CHAT = "/v1/chat/completions"
BOUNDS = BatchBounds(LineBounds(max_lines=50, max_line_bytes=1000), max_open=2, keeps_s=1000)


class Clock:
    now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


class Store:
    """One gateway's view of the database."""

    def __init__(self, url: str, clock: Clock) -> None:
        self.database = Database(url)
        self.database.create()
        self.files = FileStore(self.database, 3 * PART_BYTES, clock)
        self.batches = BatchStore(self.database, BOUNDS, clock)

    def upload(self, *entries: object, tenant: str = "a") -> str:
        text = "\n".join(entry if isinstance(entry, str) else json.dumps(entry) for entry in entries)
        return self.files.add(tenant, "in.jsonl", "batch", [text.encode()], None).file_id

    def submit(self, *entries: object, tenant: str = "a", window_s: int = 60) -> BatchRecord:
        file_id = self.upload(*entries, tenant=tenant)
        return self.batches.create(NewBatch(tenant, CHAT, file_id, window_s, "1m", None))

    def finish(self, line: ClaimedLine, text: str = "x") -> bool:
        return self.batches.finish(line, answered(line, 200, "r", json.dumps({"text": text}).encode()))

    def lines_of(self, file_id: str | None) -> list[dict[str, Any]]:
        assert file_id is not None
        return [json.loads(line) for line in b"".join(self.files.parts_of(file_id)).splitlines()]


Open = Callable[[], Store]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def postgres_url() -> Iterator[str]:
    named = os.environ.get("WEIR_TEST_POSTGRES", "")
    with contextlib.nullcontext(named) if named else running() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[Open]:
    """Several stores of one database."""
    url = f"sqlite:///{tmp_path}/batches.sqlite"
    if request.param == "postgresql":
        url = request.getfixturevalue("postgres_url")
    opened: list[Store] = []

    def open_one() -> Store:
        opened.append(Store(url, clock))
        return opened[-1]

    yield open_one
    if opened:
        with opened[0].database.begin() as connection:
            metadata.drop_all(connection)
    for one in opened:
        one.database.close()


@pytest.fixture
def store(open_store: Open) -> Store:
    return open_store()


def request(custom_id: str, **changes: object) -> dict[str, object]:
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {"messages": []}, **changes}


def test_every_line_is_claimed_by_one_gateway_and_its_results_are_in_the_lines_order(open_store: Open) -> None:
    stores = [open_store(), open_store()]
    batch = stores[0].submit(*(request(f"r{index}") for index in range(40)))

    def work(name: str, store: Store) -> list[int]:
        seen: list[int] = []
        while claimed := store.batches.claim(name, 3, 10):
            random.Random(len(seen)).shuffle(claimed)
            assert all(store.finish(line) for line in claimed)
            seen += [line.number for line in claimed]
        return seen

    with ThreadPoolExecutor(2) as threads:
        seen = [number for part in threads.map(work, ["g0", "g1"], stores) for number in part]
    assert sorted(seen) == list(range(1, 41)), "none twice, none left"
    ended = [record for store in stores for record in store.batches.end_due()]
    assert [(one.batch_id, one.status, one.num_completed) for one in ended] == [
        (batch.batch_id, BatchStatus.COMPLETED, 40)
    ]
    assert [line["custom_id"] for line in stores[1].lines_of(ended[0].output_file_id)] == [f"r{i}" for i in range(40)]
    assert ended[0].error_file_id is None


def test_a_line_whose_lease_ended_is_claimed_again_and_the_first_answer_comes_too_late(
    open_store: Open, clock: Clock
) -> None:
    dead, alive = open_store(), open_store()
    dead.submit(request("r"))
    [first] = dead.batches.claim("g0", 9, 10)
    clock.now_s += 9
    assert alive.batches.claim("g1", 9, 10) == []
    clock.now_s += 2
    [second] = alive.batches.claim("g1", 9, 10)
    assert (second.fence, second.num_tries) == (2, 2)
    assert dead.batches.renew("g0", [first], 10) == []
    assert not dead.finish(first, "late")
    assert alive.finish(second, "in time")
    assert not alive.finish(second, "twice")
    [ended] = alive.batches.end_due()
    assert [line["response"]["body"]["text"] for line in alive.lines_of(ended.output_file_id)] == ["in time"]
    assert dead.batches.end_due() == []


@pytest.mark.parametrize("finishes", [True, False])
def test_a_lease_that_lapsed_is_no_try_where_its_gateway_lives_to_say_so(
    open_store: Open, clock: Clock, finishes: bool
) -> None:
    slow, other = open_store(), open_store()
    slow.submit(request("r"), window_s=1000)
    for _ in range(20):
        [mine] = slow.batches.claim("g0", 9, 10)
        clock.now_s += 11
        [taken] = other.batches.claim("g1", 9, 10)
        assert (mine.num_tries, taken.num_tries) == (1, 2)
        if finishes:
            assert not slow.finish(mine, "late")
        else:
            slow.batches.release(mine, 0, False)
        other.batches.release(taken, 0, False)


def test_a_lease_that_is_renewed_does_not_end(store: Store, clock: Clock) -> None:
    store.submit(request("r"))
    [line] = store.batches.claim("g0", 9, 10)
    for _ in range(5):
        clock.now_s += 8
        assert store.batches.renew("g0", [line], 10) == [line]
        assert store.batches.claim("g1", 9, 10) == []


def test_a_line_that_is_released_waits_and_counts_its_tries_where_it_should(store: Store, clock: Clock) -> None:
    store.submit(request("r"))
    [line] = store.batches.claim("g", 9, 10)
    store.batches.release(line, 5, False)
    assert store.batches.claim("g", 9, 10) == []
    clock.now_s += 5
    [line] = store.batches.claim("g", 9, 10)
    assert line.num_tries == 1
    store.batches.release(line, 0, True)
    assert [line.num_tries for line in store.batches.claim("g", 9, 10)] == [2]


def test_bad_lines_are_named_by_number_and_the_others_are_answered(store: Store) -> None:
    bad = ["{", {"url": CHAT}, request("r"), request("u", url="/v1/other"), request("b", body=1), "x" * 1001]
    batch = store.submit(request("r"), "", *bad)
    assert [entry["line"] for entry in batch.errors] == [3, 4, 5, 6, 7, 8]
    assert (batch.num_lines, batch.num_failed, batch.status) == (7, 6, BatchStatus.IN_PROGRESS)
    [line] = store.batches.claim("g", 9, 10)
    assert (line.number, line.custom_id) == (1, "r")
    store.finish(line)
    [ended] = store.batches.end_due()
    errors = store.lines_of(ended.error_file_id)
    assert [(entry["error"]["line"], entry["error"]["code"]) for entry in errors] == [
        (3, "invalid_json_line"),
        (4, "missing_required_parameter"),
        (5, "duplicate_custom_id"),
        (6, "invalid_url"),
        (7, "missing_required_parameter"),
        (8, "line_too_long"),
    ]
    assert [entry["custom_id"] for entry in errors] == [None, None, "r", "u", "b", None]
    assert (ended.num_completed, ended.num_failed) == (1, 6)


def test_an_input_without_a_good_line_fails(store: Store) -> None:
    batch = store.submit("nonsense")
    assert (batch.status, batch.json()["failed_at"]) == (BatchStatus.FAILED, batch.created_s)
    assert store.lines_of(batch.error_file_id)[0]["error"]["line"] == 1
    with pytest.raises(InvalidRequest, match="has no line"):
        store.submit("")
    with pytest.raises(InvalidRequest, match="batch_max_lines: 50"):
        store.submit(*(request(f"r{index}") for index in range(51)))
    assert store.batches.count_open() == (0, 0)


def test_a_batch_that_is_cancelled_keeps_what_is_answered_and_tells_of_the_rest(store: Store, clock: Clock) -> None:
    batch = store.submit(*(request(f"r{index}") for index in range(3)))
    first, second = store.batches.claim("g", 2, 10)
    store.finish(first)
    assert store.batches.cancel("a", batch.batch_id).status is BatchStatus.CANCELLING
    assert store.batches.claim("g", 9, 10) == []
    assert store.batches.renew("g", [second], 10) == [], "it is to be let go of"
    assert store.batches.end_due() == [], "somebody may be writing its answer"
    store.batches.release(second, 0, False)
    [ended] = store.batches.end_due()
    assert ended.status is BatchStatus.CANCELLED
    assert [line["custom_id"] for line in store.lines_of(ended.output_file_id)] == ["r0"]
    codes = [(line["custom_id"], line["error"]["code"]) for line in store.lines_of(ended.error_file_id)]
    assert codes == [("r1", "batch_cancelled"), ("r2", "batch_cancelled")]
    with pytest.raises(InvalidRequest, match="is cancelled"):
        store.batches.cancel("a", batch.batch_id)


def test_a_batch_past_its_window_expires_and_a_late_answer_is_not_written(store: Store, clock: Clock) -> None:
    store.submit(request("r0"), request("r1"), window_s=60)
    first, second = store.batches.claim("g", 2, 1000)
    store.finish(first)
    clock.now_s += 60
    [ended] = store.batches.end_due()
    assert (ended.status, ended.num_completed, ended.num_failed) == (BatchStatus.EXPIRED, 1, 1)
    assert not store.finish(second)
    assert [line["error"]["code"] for line in store.lines_of(ended.error_file_id)] == ["batch_expired"]


def test_tenants_see_only_their_own(store: Store) -> None:
    batch = store.submit(request("r"), tenant="a")
    with pytest.raises(NotFound):
        store.batches.get("b", batch.batch_id)
    with pytest.raises(NotFound):
        store.batches.cancel("b", batch.batch_id)
    for refused in (store.files.get, store.files.delete):
        with pytest.raises(NotFound):
            refused("b", batch.input_file_id)
    with pytest.raises(NotFound):
        store.batches.create(NewBatch("b", CHAT, batch.input_file_id, 60, "1m", None))
    assert store.batches.page("b", PageAsked()) == ([], False)
    assert store.files.page("b", PageAsked(), "") == ([], False)


def test_the_bounds_of_a_tenant_are_named_and_are_its_own(store: Store) -> None:
    for _ in range(2):
        store.submit(request("r"))
    with pytest.raises(QuotaExceeded, match="batch_max_open: 2"):
        store.submit(request("r"))
    store.submit(request("r"), tenant="b")
    with pytest.raises(QuotaExceeded, match="batch_tenant_mb"):
        store.files.add("a", "large", "batch", [b"x" * (3 * PART_BYTES)], None)
    assert len(store.files.page("a", PageAsked(), "")[0]) == 3, "nothing of it is left"


def test_a_file_is_read_as_it_was_written_and_not_deleted_under_its_batch(store: Store) -> None:
    content = random.Random(1).randbytes(2 * PART_BYTES + 3)
    made = store.files.add("a", "f", "batch", [content[:5], content[5:]], None)
    assert (made.num_bytes, b"".join(store.files.parts_of(made.file_id))) == (len(content), content)
    store.files.delete("a", made.file_id)
    assert list(store.files.parts_of(made.file_id)) == []
    batch = store.submit(request("r"))
    with pytest.raises(AlreadyExists, match="cancel it"):
        store.files.delete("a", batch.input_file_id)


def test_pages_of_a_list_have_every_entry_once(store: Store, clock: Clock) -> None:
    made = []
    for index in range(7):
        clock.now_s += index % 2  # several in one second
        made.append(store.upload(request("r")))
    for is_newest_first in (True, False):
        seen: list[str] = []
        has_more = True
        while has_more:
            asked = PageAsked(seen[-1] if seen else "", 2, is_newest_first)
            page, has_more = store.files.page("a", asked, "batch")
            seen += [one.file_id for one in page]
        assert sorted(seen) == sorted(made)
    with pytest.raises(InvalidRequest, match="after"):
        store.files.page("a", PageAsked("file-none"), "")


def test_what_is_old_is_dropped_but_no_input_of_a_batch_that_runs(store: Store, clock: Clock) -> None:
    batch = store.submit(request("r"), window_s=5000)
    kept = store.files.add("a", "f", "batch", [b"x"], None)
    store.files.add("a", "f", "batch", [b"x"], 100)
    clock.now_s += 100
    assert store.files.drop_expired() == 1
    [line] = store.batches.claim("g", 1, 10)
    store.finish(line)
    [ended] = store.batches.end_due()
    clock.now_s += BOUNDS.keeps_s
    assert (store.batches.drop_old(), store.files.drop_expired()) == (1, 1)
    assert store.files.get("a", kept.file_id) == kept
    for gone in (ended.output_file_id, batch.batch_id):
        with pytest.raises(NotFound):
            store.files.get("a", gone or "")
