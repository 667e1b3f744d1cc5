"""What both buses promise about buckets."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from nats.aio.client import Client
from tests.contract.worlds import BusWorld, NatsServer, eventually

from weir.bus import nats_kv
from weir.bus.codec import WIRE_VERSION
from weir.bus.nats import NatsBus
from weir.bus.protocol import BucketFull, BucketMismatch, BucketMissing, Bus, KeyConflict, KvEntry

Connect = Callable[[], Awaitable[Bus]]


async def next_entry(watch: AsyncIterator[KvEntry], timeout_s: float = 10.0) -> KvEntry:
    return await asyncio.wait_for(anext(watch), timeout_s)


async def entry_of(watch: AsyncIterator[KvEntry], key: str, value: bytes | None) -> KvEntry:
    async with asyncio.timeout(30):
        async for entry in watch:
            if (entry.key, entry.value) == (key, value):
                return entry
    raise AssertionError("the watch ended")


async def test_what_is_put_can_be_read_by_another_client(connect: Connect, name: str) -> None:
    one, other = await (await connect()).bucket(name), await (await connect()).bucket(name)
    revision = await one.put("a", b"1")
    assert await other.get("a") == KvEntry("a", b"1", revision)
    assert await other.get("b") is None
    assert await one.put("a", b"2") > revision


async def test_entries_are_listed_without_the_deleted_ones(connect: Connect, name: str) -> None:
    bucket = await (await connect()).bucket(name)
    assert await bucket.list_entries() == []
    for key in ("a", "b", "c"):
        await bucket.put(key, key.encode())
    await bucket.delete("b")
    assert sorted((entry.key, entry.value) for entry in await bucket.list_entries()) == [("a", b"a"), ("c", b"c")]
    assert await bucket.get("b") is None


async def test_entries_are_listed_that_arrive_after_the_news_that_all_were_sent(
    nats_server: NatsServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = await NatsBus.connect(nats_server.url, name="contract-test")
    bucket = await bus.bucket(name)
    await bucket.put("a", b"1")
    process_message = Client._process_msg
    delayed: list[asyncio.Task[None]] = []

    async def process_deliveries_late(client: Client, sid: int, subject: bytes, reply: bytes, *rest: bytes) -> None:
        async def process(after_s: float) -> None:
            await asyncio.sleep(after_s)
            await process_message(client, sid, subject, reply, *rest)

        if reply.startswith(b"$JS.ACK."):
            delayed.append(asyncio.create_task(process(after_s=0.4)))
        else:
            await process(after_s=0)

    monkeypatch.setattr(Client, "_process_msg", process_deliveries_late)
    assert [(entry.key, entry.value) for entry in await bucket.list_entries()] == [("a", b"1")]
    await asyncio.gather(*delayed)
    await bus.close()


async def test_an_update_needs_the_revision_that_is_there(connect: Connect, name: str) -> None:
    bucket = await (await connect()).bucket(name)
    first = await bucket.update("leader", b"a", revision=0)
    with pytest.raises(KeyConflict):
        await bucket.update("leader", b"b", revision=0)
    second = await bucket.update("leader", b"b", revision=first)
    with pytest.raises(KeyConflict):
        await bucket.update("leader", b"c", revision=first)
    assert await bucket.get("leader") == KvEntry("leader", b"b", second)


async def test_a_deleted_key_can_be_made_again_as_new(connect: Connect, name: str) -> None:
    bucket = await (await connect()).bucket(name)
    await bucket.put("leader", b"a")
    await bucket.delete("leader")
    await bucket.update("leader", b"b", revision=0)
    entry = await bucket.get("leader")
    assert entry is not None
    assert entry.value == b"b"


async def test_of_many_at_once_one_wins_the_compare_and_set(connect: Connect, name: str) -> None:
    buckets = [await (await connect()).bucket(name) for _ in range(4)]
    outcomes = await asyncio.gather(
        *(bucket.update("leader", b"%d" % index, revision=0) for index, bucket in enumerate(buckets)),
        return_exceptions=True,
    )
    assert sum(isinstance(outcome, int) for outcome in outcomes) == 1
    assert sum(isinstance(outcome, KeyConflict) for outcome in outcomes) == 3


async def test_an_entry_vanishes_after_its_time_unless_put_again(connect: Connect, name: str) -> None:
    bucket = await (await connect()).bucket(name, ttl_s=2)
    await bucket.put("silent", b"")
    async with asyncio.timeout(30):
        while await bucket.get("silent") is not None:
            await bucket.put("living", b"")
            await asyncio.sleep(0.1)
    assert [entry.key for entry in await bucket.list_entries()] == ["living"]
    await bucket.update("silent", b"back", revision=0)


async def test_a_bucket_that_exists_can_be_opened_with_other_words(connect: Connect, name: str) -> None:
    bus = await connect()
    await (await bus.bucket(name, ttl_s=30)).put("a", b"1")
    entry = await (await bus.bucket(name, ttl_s=60, durable=True)).get("a")
    assert entry is not None
    assert entry.value == b"1"


@pytest.mark.parametrize("key", ["", "a b", ".a", "a.", "a..b", "*", ">", "ä"])
async def test_a_key_that_no_server_would_take_is_refused(connect: Connect, name: str, key: str) -> None:
    bucket = await (await connect()).bucket(name)
    with pytest.raises(ValueError, match="key"):
        await bucket.put(key, b"")


async def test_a_watch_tells_what_is_there_and_then_every_change(connect: Connect, name: str) -> None:
    bucket = await (await connect()).bucket(name)
    await bucket.put("old", b"0")
    watch = bucket.watch()
    told = [await next_entry(watch)]
    await bucket.put("new", b"1")
    told.append(await next_entry(watch))
    await bucket.delete("old")
    told.append(await next_entry(watch))
    assert [(entry.key, entry.value) for entry in told] == [("old", b"0"), ("new", b"1"), ("old", None)]
    assert told[0].revision < told[1].revision < told[2].revision


async def test_a_watch_ends_with_its_bus(connect: Connect, name: str) -> None:
    bus = await connect()
    bucket = await bus.bucket(name)

    seen: list[str] = []
    has_seen = asyncio.Event()

    async def watch_all() -> None:
        async for entry in bucket.watch():
            seen.append(entry.key)
            has_seen.set()

    await bucket.put("a", b"")
    watching = asyncio.create_task(watch_all())
    await asyncio.wait_for(has_seen.wait(), 10)
    await bus.close()
    await asyncio.wait_for(watching, 10)
    assert seen == ["a"]


async def test_watch_and_bucket_survive_a_server_that_forgot_everything(
    connect: Connect, world: BusWorld, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch sooner than it looks by itself whether its source still lives."""
    monkeypatch.setattr(nats_kv, "_FEED_CHECK_S", 3600.0)
    bus = await connect()
    bucket, durable = await bus.bucket(name, ttl_s=60), await bus.bucket(f"{name}d", durable=True)
    await bucket.put("before", b"1")
    revision = await durable.put("kept", b"2")
    watch = bucket.watch()
    assert (await next_entry(watch)).key == "before"
    world.stop_server()
    try:
        await eventually(lambda: not bus.is_connected)
    finally:
        world.start_server()
    await eventually(lambda: bus.is_connected)
    await bucket.put("after", b"3")
    await entry_of(watch, "after", b"3")
    assert await bucket.get("before") is None
    assert await durable.get("kept") == KvEntry("kept", b"2", revision)


async def test_a_bucket_of_another_version_is_neither_read_nor_written(
    nats_server: NatsServer, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(nats_kv, "WIRE_VERSION", "99")
        bus = await NatsBus.connect(nats_server.url, name="newer")
        bucket = await bus.bucket(name, durable=True)
        await bucket.put("key", b"of the newer one")
        own = await NatsBus.connect(nats_server.url, name="older")
        newer.setattr(nats_kv, "WIRE_VERSION", WIRE_VERSION)
        with pytest.raises(BucketMismatch, match=rf"{name} is of wire version '99', this process speaks '"):
            await own.bucket(name, durable=True)
        found = await bucket.get("key")
    assert found is not None
    assert found.value == b"of the newer one"
    await own.close()
    await bus.close()


async def test_a_bucket_of_before_there_were_versions_is_taken(nats_server: NatsServer, name: str) -> None:
    bus = await NatsBus.connect(nats_server.url, name="older")
    await bus._client.jetstream().create_key_value(bucket=name)
    await (await bus.bucket(name, durable=True)).put("key", b"value")
    await bus.close()


async def test_a_bucket_takes_no_more_than_it_may_hold(connect: Connect, name: str) -> None:
    bucket = await (await connect()).bucket(name, max_bytes=4000, durable=True)
    revision = await bucket.put("first", bytes(1500))
    await bucket.update("second", bytes(1500), revision=0)
    with pytest.raises(BucketFull):
        await bucket.update("third", bytes(1500), revision=0)
    assert await bucket.get("first") == KvEntry("first", bytes(1500), revision)


async def test_a_bucket_with_a_number_of_entries_drops_the_oldest_ones(connect: Connect, name: str) -> None:
    bucket = await (await connect()).bucket(name, max_entries=3, max_bytes=1 << 20, durable=True)
    for key in ("a", "b", "c", "d"):
        await bucket.put(key, key.encode())
    assert sorted(entry.key for entry in await bucket.list_entries()) == ["b", "c", "d"]
    assert await bucket.get("a") is None
    await bucket.put("b", b"again")
    await bucket.put("e", b"e")
    assert sorted(entry.key for entry in await bucket.list_entries()) == ["b", "d", "e"]


async def test_a_bucket_that_drops_is_never_full_of_bytes(connect: Connect, name: str) -> None:
    bus = await connect()
    bucket = await bus.bucket(name, max_entries=100, max_bytes=4000, durable=True)
    for index in range(6):
        await bucket.put(f"k{index}", bytes(1500))
    assert sorted(entry.key for entry in await bucket.list_entries()) == ["k4", "k5"]
    other = await (await connect()).bucket(name, max_entries=100, max_bytes=4000, durable=True)
    assert await other.get("k5") is not None


async def test_who_opens_a_bucket_waits_for_its_maker(connect: Connect, name: str) -> None:
    maker, opener = await connect(), await connect()
    with pytest.raises(BucketMissing, match=f"bucket {name} is not there"):
        await opener.open_bucket(name)
    await (await maker.bucket(name)).put("a", b"1")
    entry = await (await opener.open_bucket(name)).get("a")
    assert entry is not None
    assert entry.value == b"1"
