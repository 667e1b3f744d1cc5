"""Workers that take shorter sequences than the model does: every check and answer of the gateway goes by theirs."""

from collections.abc import AsyncIterator

import pytest
from tests.unit.gateway.fake_scheduler import INSTANCE
from tests.unit.gateway.world import World, open_world

from weir.bus.codec import encode
from weir.bus.messages import WorkerRecord
from weir.bus.subjects import WORKER_TTL_S, Subjects
from weir.client import AsyncWeirClient, GenerateOptions
from weir.core.errors import InvalidRequest


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with open_world() as made:
        yield made


async def register(world: World, worker_id: str, max_context_tokens: int) -> None:
    record = WorkerRecord(
        worker_id=worker_id,
        role="decode",
        model="bytes",
        address=world.decode.address,
        host_id="host",
        max_context_tokens=max_context_tokens,
        page_tokens=16,
        num_arena_pages=100,
        max_num_seqs=8,
        num_running=0,
        num_waiting=0,
    )
    bucket = await world.hub.connect().bucket(Subjects(INSTANCE).workers_bucket, ttl_s=WORKER_TTL_S)
    await bucket.put(worker_id, encode(record))
    await world.until(lambda: worker_id in world.gateway._decode_workers, "the gateway has heard of it")


async def test_models_are_listed_with_the_context_of_their_workers(world: World) -> None:
    await register(world, world.decode.worker_id, 64)
    async with AsyncWeirClient(world.grpc_address) as client, world.http_client() as http:
        [model] = await client.list_models()
        shown = (await http.get("/v1/models")).json()["data"]
    assert model.max_context_tokens == 64
    assert [entry["max_model_len"] for entry in shown] == [64]


async def test_a_prompt_that_no_worker_takes_is_refused_at_once_with_what_they_take(world: World) -> None:
    await register(world, world.decode.worker_id, 64)
    async with AsyncWeirClient(world.grpc_address) as client:
        for prompt in ("x" * 64, [1] * 64):
            with pytest.raises(InvalidRequest, match=r"is 64 tokens; bytes takes at most 63"):
                _ = [chunk async for chunk in client.generate(prompt)]
        with pytest.raises(InvalidRequest, match=r"max_tokens: is 65; must be .*64"):
            _ = [chunk async for chunk in client.generate("x", GenerateOptions(max_tokens=65))]
    assert world.scheduler.submits == []


async def test_an_answer_is_asked_for_as_long_as_workers_can_make_it(world: World) -> None:
    await register(world, world.decode.worker_id, 64)
    async with AsyncWeirClient(world.grpc_address) as client:
        _ = [chunk async for chunk in client.generate("x" * 60)]
    assert [submit.max_tokens for submit in world.scheduler.submits] == [4]


async def test_the_longest_of_several_counts_and_never_more_than_the_models(world: World) -> None:
    models = world.gateway.processor.models
    await register(world, world.decode.worker_id, 64)
    await register(world, "decode-1-cccccccc", 128)
    assert models.find("bytes", "model").max_context_tokens == 128
    await register(world, "decode-2-dddddddd", 4096)
    assert models.find("", "model").max_context_tokens == 512
