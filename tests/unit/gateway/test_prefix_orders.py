"""Prompts that a worker of another host computes: asked for at once, waited for by nobody, cancelled with the rest."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from tests.unit.gateway.failing import run
from tests.unit.gateway.fake_workers import CANCELLED, LENGTH, FakeWorker, update
from tests.unit.gateway.test_request_state import ANSWER
from tests.unit.gateway.world import World

from weir.client import AsyncWeirClient, GenerateOptions
from weir.wire.v1 import worker_pb2
from weir_gateway.driving.prefix_orders import order_command, order_id_of


@pytest.fixture
async def elsewhere(world: World) -> AsyncIterator[FakeWorker]:
    """The prefill worker of another host; the decode worker answers what is started there."""
    worker = FakeWorker("prefill-of-another-host")
    await worker.start()
    placement = world.scheduler.placement
    world.scheduler.placement = replace(
        placement,
        prefill_worker_id=placement.decode_worker_id,
        prefill_address=placement.decode_address,
        prefix_worker_id=worker.worker_id,
        prefix_worker_address=worker.address,
        prefix_source="other:7000",
    )
    yield worker
    await worker.stop()


def answer_at_decode(world: World) -> None:
    def answer(command: worker_pb2.ServeRequest) -> None:
        if command.HasField("start"):
            world.decode.send(update(command.start.request_id, 0, ANSWER, finish=LENGTH))

    world.decode.on_command = answer


async def test_both_are_asked_at_once_and_the_answer_is_that_of_the_decode_worker(
    world: World, elsewhere: FakeWorker
) -> None:
    def compute(command: worker_pb2.ServeRequest) -> None:
        if command.HasField("start"):
            elsewhere.send(update(command.start.request_id, 0, (7,), finish=LENGTH))
            answer_at_decode(world)
            for start in world.decode.named("start"):
                world.decode.send(update(start.request_id, 0, ANSWER, finish=LENGTH))

    elsewhere.on_command = compute
    record = await run(world)
    assert record.text == "hello world"
    [start] = world.decode.named("start")
    assert (start.prefix_source, start.prefix_is_expected) == ("other:7000", True)
    await world.until(lambda: elsewhere.named("start"), "asked")
    [order] = elsewhere.named("start")
    assert order.request_id == order_id_of(start.request_id) != start.request_id
    assert order.max_tokens == 1


async def test_a_host_that_is_not_there_costs_nothing_but_its_help(world: World, elsewhere: FakeWorker) -> None:
    await elsewhere.stop()
    running = run(world)
    await world.until(lambda: world.metric("prefix_orders_failed_total") == 1, "given up")
    await world.until(lambda: world.decode.named("start"), "asked")
    world.decode.send(update(world.decode.named("start")[0].request_id, 0, ANSWER, finish=LENGTH))
    assert (await running).text == "hello world"
    assert world.metric("interruptions_total") == 0


async def test_it_is_cancelled_there_when_the_client_goes_away(world: World, elsewhere: FakeWorker) -> None:
    async with AsyncWeirClient(world.grpc_address) as client:
        chunks = client.generate("x", GenerateOptions(max_tokens=11))
        task = asyncio.ensure_future(anext(aiter(chunks)))
        await world.until(lambda: elsewhere.named("start") and world.decode.named("start"), "both are asked")
        task.cancel()
    await world.until(lambda: elsewhere.named("cancel"), "cancelled")
    [order], [cancel] = elsewhere.named("start"), elsewhere.named("cancel")
    assert cancel.request_id == order.request_id


async def test_what_an_earlier_order_says_late_does_not_end_the_next_one(world: World, elsewhere: FakeWorker) -> None:
    async with AsyncWeirClient(world.grpc_address) as client:
        task = asyncio.ensure_future(anext(aiter(client.generate("x", GenerateOptions(max_tokens=11)))))
        await world.until(lambda: elsewhere.named("start") and world.decode.named("start"), "both are asked")
        order_id = elsewhere.named("start")[0].request_id
        world.decode.send(update(world.decode.named("start")[0].request_id, 0, finish=CANCELLED))
        await world.until(lambda: len(elsewhere.named("start")) == 2, "asked again")
        elsewhere.send(update(order_id, 0, (7,), finish=LENGTH, dispatch=1))
        await asyncio.sleep(0.05)
        task.cancel()
    await world.until(lambda: len(elsewhere.named("cancel")) == 2, "cancelled too")
    assert [cancel.attempt.dispatch for cancel in elsewhere.named("cancel")] == [1, 2]


def test_an_order_is_of_the_full_pages_without_the_last_token() -> None:
    start = worker_pb2.Start(
        request_id="0" * 32,
        prompt_token_ids=range(1, 66),
        output_token_ids=[5],
        stop_token_ids=[6],
        max_tokens=50,
        cache_salt="salt",
        prefix_source="a:1",
        prefix_is_expected=True,
        num_reserved_pages=9,
    )
    order = order_command(order_id_of(start.request_id), worker_pb2.ServeRequest(start=start)).start
    assert list(order.prompt_token_ids) == list(range(1, 65))
    assert (order.max_tokens, order.num_reserved_pages, order.cache_salt) == (1, 5, "salt")
    assert (order.prefix_source, order.prefix_is_expected, list(order.output_token_ids)) == ("", False, [])
    assert list(start.prompt_token_ids) == list(range(1, 66)), "the request's own is as it was"
    start.prompt_token_ids.pop()
    order = order_command("8" + "0" * 31, worker_pb2.ServeRequest(start=start)).start
    assert len(order.prompt_token_ids) == 48, "the last token is computed by who answers"
