"""The sequence of a worker that is gone is at another one that shares its memory: the request goes on there."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from tests.unit.gateway.failing import request_id_of, run
from tests.unit.gateway.fake_model import ids_of
from tests.unit.gateway.fake_scheduler import INSTANCE
from tests.unit.gateway.fake_workers import LENGTH, FakeWorker, update, worker_error
from tests.unit.gateway.world import FAST, World, open_world

from weir.bus.codec import encode
from weir.bus.messages import WorkerRecord
from weir.bus.subjects import WORKER_TTL_S, Subjects
from weir.client import AsyncWeirClient, Chunk, GenerateOptions
from weir.wire.v1 import worker_pb2
from weir_gateway.driving.adoption import AdoptionSettings

SHORT_WAIT_S = 0.4
NOBODY_ADOPTS = pytest.mark.parametrize("wait_s", [SHORT_WAIT_S])


@pytest.fixture
def wait_s() -> float:
    """Nobody waits for it where somebody adopts."""
    return 60.0


@pytest.fixture
async def world(wait_s: float) -> AsyncIterator[World]:
    adoption = AdoptionSettings(wait_s=wait_s, successor_wait_s=60.0)
    driver = replace(FAST.driver, no_progress_s=60.0)  # which ends the search too
    async with open_world(replace(FAST, adoption=adoption, driver=driver)) as made:
        yield made


async def register(world: World, *workers: FakeWorker, host_id: str = "host") -> None:
    bucket = await world.hub.connect().bucket(Subjects(INSTANCE).workers_bucket, ttl_s=WORKER_TTL_S)
    for worker in workers:
        record = WorkerRecord(
            worker_id=worker.worker_id,
            role="decode",
            model="bytes",
            address=worker.address,
            host_id=host_id,
            max_context_tokens=4096,
            page_tokens=16,
            num_arena_pages=100,
            max_num_seqs=8,
            num_running=0,
            num_waiting=0,
        )
        await bucket.put(worker.worker_id, encode(record))
        known = world.gateway._decode_workers
        await world.until(lambda: worker.worker_id in known, "the gateway has heard of it")  # noqa: B023


@asynccontextmanager
async def another(worker_id: str = "decode-1-cccccccc") -> AsyncIterator[FakeWorker]:
    worker = FakeWorker(worker_id)
    await worker.start()
    try:
        yield worker
    finally:
        await worker.stop()


def adopts(worker: FakeWorker, answer: str = "hello world", adoption: int = 1) -> None:
    """It goes on with whatever is asked for, and ends it."""

    def on_command(command: worker_pb2.ServeRequest) -> None:
        if command.HasField("resume"):
            index = command.resume.next_index
            sent = update(command.resume.request_id, index, ids_of(answer)[index:], finish=LENGTH)
            sent.attempt.adoption = adoption
            worker.send(sent)

    worker.on_command = on_command


async def read_all(chunks: AsyncIterator[Chunk]) -> None:
    async for _ in chunks:
        pass


async def begin(world: World, num_tokens: int = 4) -> None:
    await world.until(lambda: world.pair.starts, "started")
    held = world.scheduler.helds
    await world.until(
        lambda: held and [entry.num_output_tokens for entry in held[-1].requests] == [num_tokens], "has its tokens"
    )


async def test_it_goes_on_where_its_sequence_is_with_nothing_submitted_again(world: World) -> None:
    world.pair.stops_after = 4
    async with another() as adopter:
        await register(world, world.decode, adopter)
        adopts(adopter)
        running = run(world)
        await begin(world)
        await world.decode.stop()
        record = await running
        assert (record.text, record.num_index_errors) == ("hello world", 0)
        (resume,) = adopter.named("resume")
        assert (resume.attempt.dispatch, resume.next_index, resume.awaits_hand_off) == (1, 4, True)
        assert len(world.scheduler.submits) == 1
        assert (world.metric("adoptions_total"), world.metric("interruptions_total")) == (1, 0)
        await world.until_idle()
    events = [event for span in world.spans.get_finished_spans() for event in span.events if event.name == "adopted"]
    assert [dict(event.attributes or {})["weir.num_output_tokens"] for event in events] == [4]


async def test_the_scheduler_hears_where_it_runs_now(world: World) -> None:
    world.pair.stops_after = 4
    async with another() as adopter:
        await register(world, world.decode, adopter)
        adopter.on_command = lambda command: None
        running = run(world)
        await begin(world)
        await world.decode.stop()
        await world.until(lambda: adopter.named("resume"), "asked")
        sent = update(request_id_of(world), 4, ids_of("o"))
        sent.attempt.adoption = 1
        adopter.send(sent)

        def is_there() -> bool:
            (held,) = world.scheduler.helds[-1].requests or (None,)
            return (
                held is not None and held.placement is not None and held.placement.decode_worker_id == adopter.worker_id
            )

        await world.until(is_there, "told of the new worker")
        adopts(adopter)
        rest = update(request_id_of(world), 5, ids_of(" world"), finish=LENGTH)
        rest.attempt.adoption = 1
        adopter.send(rest)
        assert (await running).text == "hello world"


@NOBODY_ADOPTS
async def test_with_no_other_worker_it_waits_for_a_successor(world: World) -> None:
    world.pair.stops_after = 4
    async with another() as successor:
        await register(world, world.decode)
        adopts(successor)
        running = run(world)
        await begin(world)
        await world.decode.stop()
        await asyncio.sleep(SHORT_WAIT_S + 0.2)
        assert len(world.scheduler.submits) == 1
        await register(world, successor)
        assert (await running).text == "hello world"
        assert len(world.scheduler.submits) == 1


@NOBODY_ADOPTS
async def test_where_nobody_has_it_the_next_dispatch_goes_on_and_a_late_adoption_is_cancelled(world: World) -> None:
    world.pair.stops_after = 4
    async with another() as peer:
        await register(world, world.decode, peer)
        running = run(world)
        await begin(world)
        world.scheduler.grants_at_once = False
        await world.decode.stop()
        await world.until(lambda: len(world.scheduler.submits) == 2, "submitted again")
        world.pair.stops_after = None
        await world.decode.start()
        assert (await world.scheduler.grant(world.scheduler.submits[-1])).accepted
        assert (await running).text == "hello world"
        await world.until(lambda: peer.named("cancel"), "it is cancelled")
        (cancel,) = peer.named("cancel")
        assert cancel.attempt.dispatch == 1
        assert world.metric("adoptions_total") == 0


@NOBODY_ADOPTS
async def test_memory_of_another_host_is_not_looked_into_but_shows_that_waiting_is_not_worth_it(world: World) -> None:
    world.pair.stops_after = 4
    async with another() as elsewhere:
        await register(world, world.decode)
        await register(world, elsewhere, host_id="another host")
        running = run(world)
        await begin(world)
        world.scheduler.grants_at_once = False
        await world.decode.stop()
        await world.until(lambda: len(world.scheduler.submits) == 2, "submitted again")
        assert elsewhere.commands == []
        world.pair.stops_after = None
        await world.decode.start()
        await world.scheduler.grant(world.scheduler.submits[-1])
        assert (await running).text == "hello world"


async def test_an_adopter_that_is_lost_too_is_followed_by_the_next(world: World) -> None:
    world.pair.stops_after = 4
    async with another() as first, another("decode-2-dddddddd") as second:
        await register(world, world.decode, first)
        running = run(world)
        await begin(world)
        await world.decode.stop()
        await world.until(lambda: first.named("resume"), "asked")
        sent = update(request_id_of(world), 4, ids_of("o w"))
        sent.attempt.adoption = 1
        first.send(sent)
        await world.until(lambda: world.metric("adoptions_total") == 1, "adopted")
        adopts(second, adoption=2)
        await register(world, second)
        await first.stop()
        record = await running
        assert (record.text, record.num_index_errors) == ("hello world", 0)
        assert [resume.next_index for resume in second.named("resume")] == [7]
        assert len(world.scheduler.submits) == 1


async def test_an_adopter_that_cannot_keep_it_makes_the_next_dispatch_go_on(world: World) -> None:
    world.pair.stops_after = 4
    async with another() as adopter:
        await register(world, world.decode, adopter)
        running = run(world)
        await begin(world)
        world.scheduler.grants_at_once = False
        await world.decode.stop()
        await world.until(lambda: adopter.named("resume"), "asked")
        refusal = worker_error(request_id_of(world), worker_pb2.WORKER_ERROR_REASON_NO_CAPACITY)
        refusal.attempt.adoption = 1
        adopter.send(refusal)
        await world.until(lambda: len(world.scheduler.submits) == 2, "submitted again")
        world.pair.stops_after = None
        await world.decode.start()
        await world.scheduler.grant(world.scheduler.submits[-1])
        assert (await running).text == "hello world"


async def test_a_client_that_leaves_meanwhile_has_it_cancelled_wherever_it_may_be(world: World) -> None:
    world.pair.stops_after = 4
    async with another() as peer, AsyncWeirClient(world.grpc_address) as client:
        await register(world, world.decode, peer)
        reading = asyncio.create_task(read_all(client.generate("hi")))
        await begin(world)
        await world.decode.stop()
        await world.until(lambda: peer.named("resume"), "asked")
        reading.cancel()
        await world.until(lambda: peer.named("cancel"), "cancelled")
        await world.until_idle()


def gives_up(world: World, adoption: int = 0, token: str = "o") -> worker_pb2.SequenceUpdate:
    """What a worker that is being emptied says of a sequence that goes on elsewhere, with the last token."""
    sent = update(request_id_of(world), 4, ids_of(token))
    sent.attempt.adoption = adoption
    sent.handed_off = True
    sent.error.reason = worker_pb2.WORKER_ERROR_REASON_DRAINING
    return sent


async def test_what_a_worker_gives_up_goes_on_where_it_is_even_if_that_worker_ends_at_once(world: World) -> None:
    world.pair.stops_after = 4
    async with another() as adopter:
        await register(world, world.decode, adopter)
        running = run(world)
        await begin(world)
        adopter.on_command = lambda command: None
        world.decode.send(gives_up(world))
        await world.until(lambda: adopter.named("resume"), "asked")
        await world.decode.stop()
        await asyncio.sleep(0.1)
        (resume,) = adopter.named("resume")
        assert (resume.next_index, resume.awaits_hand_off, resume.is_search) == (5, True, True)
        rest = update(request_id_of(world), 5, ids_of(" world"), finish=LENGTH)
        rest.attempt.adoption = 1
        adopter.send(rest)
        record = await running
        assert (record.text, record.num_index_errors) == ("hello world", 0)
        assert len(world.scheduler.submits) == 1
        assert (world.metric("adoptions_total"), world.metric("interruptions_total")) == (1, 0)
        await world.until_idle()


async def test_an_adopter_that_gives_it_up_too_before_it_was_asked_is_followed_by_the_next(world: World) -> None:
    world.pair.stops_after = 4
    async with another() as first, another("decode-2-dddddddd") as second:
        await register(world, world.decode, first)
        running = run(world)
        await begin(world)
        world.decode.send(gives_up(world))
        await world.until(lambda: first.named("resume"), "asked")
        adopts(second, adoption=2)
        first.send(gives_up(world, adoption=1))
        await register(world, second)
        assert (await running).text == "hello world"
        assert len(world.scheduler.submits) == 1
        await world.until_idle()


async def leave(world: World) -> None:
    """A client comes, has four tokens, and goes."""
    world.pair.stops_after = 4
    async with AsyncWeirClient(world.grpc_address) as client:
        reading = asyncio.create_task(read_all(client.generate("hi")))
        await begin(world)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    await world.until(lambda: world.decode.named("cancel"), "its worker is told")


async def test_what_a_worker_had_given_away_when_its_client_left_is_cancelled_where_it_is(world: World) -> None:
    world.decode.confirms_cancels = False
    async with another() as adopter:
        await register(world, world.decode, adopter)
        await leave(world)
        assert adopter.commands == []
        world.decode.send(gives_up(world))
        await world.until(lambda: adopter.named("cancel"), "the adopter is told")
        assert [cancel.request_id for cancel in adopter.named("cancel")] == [request_id_of(world)]
        await world.until(lambda: world.metric("cancels_unconfirmed") == 0, "confirmed")


async def test_what_a_worker_may_have_left_when_its_client_left_is_cancelled_at_each_that_may_get_it(
    world: World,
) -> None:
    """Once at each: also where those are gone as well."""
    async with another() as adopter, another("decode-2-dddddddd") as gone:
        world.decode.confirms_cancels = adopter.confirms_cancels = False  # what is confirmed may be sent again
        await register(world, world.decode, adopter, gone)
        await gone.stop()
        await leave(world)
        await world.decode.stop()
        await world.until(lambda: adopter.named("cancel"), "the adopter is told")
        await world.until(lambda: world.metric("worker_connections") == 2, "those that are gone are not tried again")
        await asyncio.sleep(0.3)
        assert world.metric("worker_connections") == 2
        assert len(adopter.named("cancel")) == 1


async def test_a_stop_string_that_ends_what_a_worker_gave_away_ends_it_where_it_is(world: World) -> None:
    world.pair.stops_after = 4
    async with another() as adopter, AsyncWeirClient(world.grpc_address) as client:
        await register(world, world.decode, adopter)
        reading = asyncio.create_task(read_all(client.generate("hi", GenerateOptions(stop=("o",)))))
        await begin(world)
        world.decode.send(gives_up(world))
        await reading
        await world.until(lambda: adopter.named("cancel"), "the adopter is told")


@NOBODY_ADOPTS
async def test_what_nobody_adopts_of_that_goes_on_under_the_next_dispatch(world: World) -> None:
    world.pair.stops_after = 4
    async with another() as peer:
        await register(world, world.decode, peer)
        running = run(world)
        await begin(world)
        world.pair.stops_after = None
        world.decode.send(gives_up(world))
        assert (await running).text == "hello world"
        assert len(world.scheduler.submits) == 2
        assert world.metric("adoptions_total") == 0


async def test_an_entry_of_the_registry_that_cannot_be_read_is_counted_and_the_others_are_found(world: World) -> None:
    world.pair.stops_after = 4
    bucket = await world.hub.connect().bucket(Subjects(INSTANCE).workers_bucket, ttl_s=WORKER_TTL_S)
    await bucket.put("decode-9-99999999", b"no record")
    async with another() as adopter:
        await register(world, world.decode, adopter)
        adopts(adopter)
        running = run(world)
        await begin(world)
        await world.decode.stop()
        assert (await running).text == "hello world"
    assert world.metric("registry_malformed_total") == 1
