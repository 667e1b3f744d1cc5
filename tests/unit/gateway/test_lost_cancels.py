"""A Cancel that a broken stream swallowed, or that came while there was none, still gets to the worker."""

import asyncio
from dataclasses import replace

from tests.unit.gateway.failing import assert_serves, error_of, request_id_of, run
from tests.unit.gateway.fake_model import ids_of
from tests.unit.gateway.fake_workers import update
from tests.unit.gateway.test_adoption import adopts, another, begin, register
from tests.unit.gateway.world import FAST, World, open_world

from weir.core.clock import ManualClock
from weir.core.errors import Unavailable, WeirError
from weir.core.life import Attempt
from weir.rpc.channel import PlainDialer
from weir.wire.v1 import worker_pb2
from weir_gateway.driving.adoption import AdoptionSettings
from weir_gateway.workers.connection import Dialing, WorkerEndpoint
from weir_gateway.workers.connections import WorkerConnections


async def decoding(world: World) -> "asyncio.Task[tuple[WeirError, str]]":
    """A request of which the decode worker has sent four tokens."""
    world.pair.stops_after = 4
    running = asyncio.create_task(error_of(world))
    await world.until(lambda: world.scheduler.prefilled, "runs")
    await asyncio.sleep(0.05)
    return running


async def leave(running: "asyncio.Task[tuple[WeirError, str]]") -> None:
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def cancelled_ids(world: World) -> list[str]:
    return [cancel.request_id for cancel in world.decode.named("cancel")]


async def test_what_is_cancelled_while_the_stream_is_down_is_cancelled_once_it_is_back(world: World) -> None:
    running = await decoding(world)
    world.decode.refuses_streams = True
    world.decode.break_streams()
    await world.until(lambda: world.metric("worker_connections_open") == 1, "the stream is down")
    await leave(running)
    await world.until_idle()
    assert cancelled_ids(world) == []
    world.decode.refuses_streams = False
    await world.until(lambda: cancelled_ids(world) == [request_id_of(world)], "cancelled")
    await world.until(lambda: world.metric("cancels_unconfirmed") == 0, "confirmed")


async def test_a_cancel_is_sent_on_every_new_stream_until_it_is_confirmed(world: World) -> None:
    world.decode.confirms_cancels = False
    await leave(await decoding(world))
    for num_sent in (1, 2, 3):
        await world.until(lambda n=num_sent: len(cancelled_ids(world)) == n, f"sent {num_sent} times")  # type: ignore[misc]
        world.decode.confirms_cancels = num_sent == 2
        world.decode.break_streams()
    await world.until(lambda: world.metric("worker_connections") == 1, "nobody needs the connection any more")
    assert cancelled_ids(world) == [request_id_of(world)] * 3
    assert world.metric("cancels_unconfirmed") == 0


async def test_a_worker_that_was_given_up_and_is_reached_again_gets_what_was_cancelled_meanwhile(
    world: World,
) -> None:
    running = await decoding(world)
    lost_id = request_id_of(world)
    await world.decode.stop()
    error, _ = await running
    assert isinstance(error, Unavailable)
    await world.until_idle()
    assert world.metric("worker_connections") == 1
    await world.decode.start()
    await assert_serves(world)
    kinds = [command.WhichOneof("command") for command in world.decode.commands if command.WhichOneof("command")]
    assert cancelled_ids(world) == [lost_id]
    assert kinds[-3:] == ["hello", "cancel", "resume"], "what it frees may be what the next request waits for"
    await world.until(lambda: world.metric("cancels_unconfirmed") == 0, "confirmed")


async def test_a_request_that_goes_on_after_its_cancel_was_confirmed_is_cancelled_again(world: World) -> None:
    await leave(await decoding(world))
    request_id = request_id_of(world)
    await world.until(lambda: cancelled_ids(world) == [request_id], "cancelled")
    await world.until(lambda: world.metric("cancels_unconfirmed") == 0, "confirmed")
    world.decode.send(update(request_id, 4, [7]))
    await world.until(lambda: len(cancelled_ids(world)) == 2, "again")
    assert world.metric("unexpected_updates_total") == 0


async def test_cancels_for_workers_that_never_come_back_are_not_kept_for_ever() -> None:
    clock = ManualClock()
    connections = WorkerConnections(
        Dialing("gateway-0-00000000", PlainDialer(), FAST.connections),
        clock,
        peers_of=lambda worker_id: [],
        is_wanted=lambda *attempt: False,
    )
    for index in range(3):
        connections.cancel(f"decode-{index}", "a", Attempt())
    assert connections.metrics()["cancels_unconfirmed"] == 3
    clock.advance(FAST.connections.cancel_kept_s)
    assert connections.metrics()["cancels_unconfirmed"] == 0


async def test_what_another_worker_got_before_the_gateway_knows_it_is_not_cancelled() -> None:
    patient = AdoptionSettings(wait_s=30, successor_wait_s=30)
    async with open_world(replace(FAST, adoption=patient)) as world, another("first") as first, another() as next_one:
        world.pair.stops_after = 4
        await register(world, world.decode, first, next_one)
        running = run(world)
        await begin(world)
        await world.decode.stop()
        await world.until(lambda: first.named("resume") and next_one.named("resume"), "both are asked")
        first.send(adopted(world, 4, "o", adoption=1))
        await world.until(lambda: world.metric("adoptions_total") == 1, "the first one has it")
        next_one.send(adopted(world, 5, " ", adoption=2))
        next_one.send(update("0" * 32, 0))
        await world.until(lambda: world.metric("unexpected_updates_total") == 1, "read")
        adopts(next_one, adoption=2)
        await first.stop()
        assert (await running).text == "hello world"
        assert (next_one.named("cancel"), len(world.scheduler.submits)) == ([], 1)


def adopted(world: World, index: int, text: str, *, adoption: int) -> worker_pb2.SequenceUpdate:
    sent = update(request_id_of(world), index, ids_of(text))
    sent.attempt.adoption = adoption
    return sent


async def test_once_they_are_closed_no_connection_is_opened_for_a_cancel() -> None:
    peer = WorkerEndpoint("decode-1", "127.0.0.1:1")
    connections = WorkerConnections(
        Dialing("gateway-0-00000000", PlainDialer(), FAST.connections),
        ManualClock(),
        peers_of=lambda worker_id: [peer],
        is_wanted=lambda *attempt: False,
    )
    await connections.close()
    connections.cancel_at_peers("decode-0", "a", Attempt())
    assert connections.metrics()["worker_connections"] == 0
