"""Workers that cannot go on with a request: it goes on after the tokens that it has, under the next dispatch."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.unit.gateway.failing import error_of, request_id_of, run
from tests.unit.gateway.fake_model import EOS, ids_of
from tests.unit.gateway.fake_workers import CANCELLED, LENGTH, STOP, Finish, token_logprobs, update, worker_error
from tests.unit.gateway.world import FAST, World

from weir.bus.messages import Outcome
from weir.client import AsyncWeirClient, Chunk, GenerateOptions
from weir.core.errors import Overloaded, Unavailable
from weir.wire.v1 import worker_pb2


async def begin(world: World, num_tokens: int) -> None:
    """Until the gateway has so many tokens of the one request, and its workers fall silent."""
    await world.until(lambda: world.pair.starts, "started")
    held = world.scheduler.helds
    await world.until(
        lambda: held and [entry.num_output_tokens for entry in held[-1].requests] == [num_tokens], "has its tokens"
    )


async def give_up(world: World, side: str, reason: worker_pb2.WorkerErrorReason.ValueType) -> None:
    """As the worker of the newest dispatch. From here on its successors go on."""
    ending = worker_error(request_id_of(world), reason)
    ending.attempt.dispatch = world.scheduler.submits[-1].dispatch
    world.pair.stops_after = None
    getattr(world, side).send(ending)


def starts(world: World) -> list[tuple[int, str]]:
    """(dispatch, output that it goes on from) of each Start."""
    return [(start.attempt.dispatch, bytes(start.output_token_ids).decode()) for start in world.prefill.named("start")]


async def all_of(chunks: AsyncIterator[Chunk]) -> list[Chunk]:
    return [chunk async for chunk in chunks]


@pytest.mark.parametrize(("side", "num_tokens"), [("prefill", 0), ("decode", 0), ("decode", 4)])
async def test_the_loss_of_a_worker_costs_no_token(world: World, side: str, num_tokens: int) -> None:
    world.pair.stops_after = num_tokens
    running = run(world)
    await begin(world, num_tokens)
    world.scheduler.grants_at_once = False
    await getattr(world, side).stop()
    await world.until(lambda: len(world.scheduler.submits) == 2, "submitted again")
    assert world.scheduler.submits[-1].lost_worker_id == getattr(world, side).worker_id
    world.pair.stops_after = None
    await getattr(world, side).start()
    assert (await world.scheduler.grant(world.scheduler.submits[-1])).accepted
    record = await running
    assert (record.text, record.num_index_errors) == ("hello world", 0)
    assert starts(world)[-1] == (world.scheduler.submits[-1].dispatch, "hello world"[:num_tokens])
    await world.until_idle()
    (finish,) = world.scheduler.finishes
    assert (finish.outcome, finish.num_output_tokens) == (Outcome.FINISHED, 11)


@pytest.mark.parametrize(
    "reason",
    [
        worker_pb2.WORKER_ERROR_REASON_NO_CAPACITY,
        worker_pb2.WORKER_ERROR_REASON_DRAINING,
        worker_pb2.WORKER_ERROR_REASON_HAND_OFF_REFUSED,
        worker_pb2.WORKER_ERROR_REASON_UNKNOWN_REQUEST,
    ],
)
async def test_what_a_worker_gives_up_goes_on_elsewhere(
    world: World, reason: worker_pb2.WorkerErrorReason.ValueType
) -> None:
    world.pair.stops_after = 4
    running = run(world)
    await begin(world, 4)
    await give_up(world, "decode", reason)
    assert (await running).text == "hello world"
    assert starts(world) == [(1, ""), (2, "hell")]
    await world.until(lambda: world.metric("cancels_unconfirmed") == 0, "confirmed")
    assert [cancel.attempt.dispatch for cancel in world.prefill.named("cancel")] == [1]
    await world.until_idle()
    events = [event for span in world.spans.get_finished_spans() for event in span.events]
    (event,) = [event for event in events if event.name == "interrupted"]
    assert event.attributes is not None
    assert (event.attributes["weir.dispatch"], event.attributes["weir.num_output_tokens"]) == (1, 4)


async def test_a_worker_that_cancels_by_itself_interrupts(world: World) -> None:
    world.pair.stops_after = 4
    running = run(world)
    await begin(world, 4)
    world.pair.stops_after = None
    world.decode.send(update(request_id_of(world), 4, finish=CANCELLED))
    assert (await running).text == "hello world"


async def test_what_came_after_a_gap_is_asked_for_again(world: World) -> None:
    """As it comes from the new workers; what is right of the old one may differ where sums depend on the batch."""
    world.pair.stops_after = 2
    running = run(world)
    await begin(world, 2)
    world.decode.send(update(request_id_of(world), 5, ids_of(" other"), finish=LENGTH))
    world.pair.stops_after = 1  # nor does it answer when it is asked for the gap
    await world.until(lambda: world.metric("interruptions_total") == 1, "the gap stayed")
    world.pair.stops_after = None
    record = await running
    assert (record.text, record.num_index_errors) == ("hello world", 0)


async def test_dispatches_that_bring_no_token_are_bounded(world: World) -> None:
    world.pair.stops_after = 4
    failing = asyncio.create_task(error_of(world))
    await begin(world, 4)
    for dispatch in range(1, 2 + FAST.driver.max_fruitless_dispatches):
        await world.until(lambda count=dispatch: len(starts(world)) == count, "started")  # type: ignore[misc]
        await give_up(world, "prefill", worker_pb2.WORKER_ERROR_REASON_NO_CAPACITY)
        world.pair.stops_after = 4
    error, text = await failing
    assert isinstance(error, Unavailable)
    assert error.message.endswith("says the worker; 4 tokens were sent before")
    assert text == "hell"
    assert [start[1] for start in starts(world)] == ["", "hell", "hell", "hell"]


async def test_before_its_first_token_it_ends_with_the_last_workers_reason(world: World) -> None:
    world.pair.stops_after = 0
    failing = asyncio.create_task(error_of(world))
    for dispatch in range(1, 1 + FAST.driver.max_fruitless_dispatches):
        await world.until(lambda count=dispatch: len(starts(world)) == count, "started")  # type: ignore[misc]
        await give_up(world, "prefill", worker_pb2.WORKER_ERROR_REASON_NO_CAPACITY)
        world.pair.stops_after = 0
    error, _ = await failing
    assert isinstance(error, Overloaded)


async def test_one_that_gets_on_a_token_at_a_time_is_dispatched_as_often_as_allowed(world: World) -> None:
    running = run(world)
    for num_tokens in range(1, 11):
        world.pair.stops_after = num_tokens
        await world.until(lambda count=num_tokens: len(starts(world)) == count, "started")  # type: ignore[misc]
        await begin(world, num_tokens)
        world.pair.stops_after = num_tokens + 1
        ending = worker_error(request_id_of(world), worker_pb2.WORKER_ERROR_REASON_DRAINING)
        ending.attempt.dispatch = num_tokens
        world.decode.send(ending)
    assert (await running).text == "hello world"
    assert starts(world) == [(index + 1, "hello world"[:index]) for index in range(11)]


@pytest.mark.parametrize(
    ("answer", "max_tokens", "text", "finish"),
    [(ids_of("hello world"), 4, "hell", LENGTH), ([*ids_of("hel"), EOS], 11, "hel", STOP)],
)
async def test_an_end_that_was_lost_after_the_last_token_is_found_without_workers(
    world: World, answer: list[int], max_tokens: int, text: str, finish: Finish
) -> None:
    world.pair.answer = answer
    world.pair.stops_after = 3
    running = run(world, max_tokens)
    await begin(world, 3)
    world.decode.send(update(request_id_of(world), 3, world.pair.answer[3:4]))
    await begin(world, 4)
    await give_up(world, "decode", worker_pb2.WORKER_ERROR_REASON_UNKNOWN_REQUEST)
    record = await running
    assert (record.text, record.finish_reasons) == (text, [finish])
    assert len(starts(world)) == 1


async def test_every_token_keeps_its_log_probability(world: World) -> None:
    world.pair.stops_after = 4
    options = GenerateOptions(max_tokens=11, logprobs=2)
    async with AsyncWeirClient(world.grpc_address) as client:
        running = asyncio.ensure_future(all_of(client.generate("x", options)))
        await begin(world, 4)
        await give_up(world, "decode", worker_pb2.WORKER_ERROR_REASON_UNKNOWN_REQUEST)
        logprobs = [entry.logprob for chunk in await running for entry in chunk.logprobs]
    assert logprobs == [token_logprobs(token_id, 2).logprob for token_id in ids_of("hello world")]


async def test_while_it_waits_for_its_next_dispatch_it_can_be_cancelled(world: World) -> None:
    world.pair.stops_after = 4
    running = run(world)
    await begin(world, 4)
    world.scheduler.grants_at_once = False
    await give_up(world, "decode", worker_pb2.WORKER_ERROR_REASON_UNKNOWN_REQUEST)
    await world.until(lambda: len(world.scheduler.submits) == 2, "submitted again")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await world.until_idle()
    assert [cancel.request_id for cancel in world.scheduler.cancels] == [request_id_of(world)]
    assert len(starts(world)) == 1


async def test_a_decode_worker_that_no_longer_waits_for_a_long_prompt_does_not_interrupt(world: World) -> None:
    world.pair.stops_after = 0
    running = run(world)
    await world.until(lambda: world.pair.starts, "started")
    world.decode.send(worker_error(request_id_of(world), worker_pb2.WORKER_ERROR_REASON_UNKNOWN_REQUEST))
    await asyncio.sleep(0.1)
    assert world.metric("interruptions_total") == 0
    world.prefill.send(update(request_id_of(world), 0, ids_of("h"), handed_off=True))
    world.decode.send(update(request_id_of(world), 1, ids_of("ello world"), finish=LENGTH))
    assert (await running).text == "hello world"
