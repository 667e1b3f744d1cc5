"""Requests by gRPC, from the first to the last message."""

import asyncio

import grpc
import grpc.aio
import pytest
from tests.unit.gateway.fake_model import ids_of
from tests.unit.gateway.fake_workers import LENGTH, STOP
from tests.unit.gateway.world import World

from weir.bus.messages import Outcome
from weir.client import AsyncWeirClient, GenerateOptions, Turn
from weir.core.errors import Cancelled, InvalidRequest
from weir.testing.load import greedy_request, stream
from weir.wire.v1 import inference_pb2


async def test_a_prompt_is_answered_token_by_token_in_order(world: World) -> None:
    record = await stream(world.stub, greedy_request("Say hello", max_tokens=11))
    assert record.token_ids == ids_of("hello world")
    assert record.text == "hello world"
    assert record.num_index_errors == 0
    assert record.finish_reasons == [LENGTH]


async def test_the_workers_get_the_prompt_and_every_parameter(world: World) -> None:
    request = greedy_request("Say hello", max_tokens=4)
    request.options.sampling.top_k = 7
    request.options.sampling.seed = 2**63 + 9
    request.options.stop_conditions.stop_token_ids.extend([5, 256])
    request.options.cache_salt, request.options.skips_prefix_cache = "team", True
    await stream(world.stub, request)
    [start] = world.prefill.named("start")
    assert list(start.prompt_token_ids) == ids_of("Say hello")
    assert (start.sampling.temperature, start.sampling.top_k, start.sampling.top_p) == (0.0, 7, 1.0)
    assert start.sampling.seed == 2**63 + 9
    assert start.max_tokens == 4
    assert list(start.stop_token_ids) == [256, 5]
    assert (start.cache_salt, start.skips_prefix_cache) == ("team", True)
    assert start.decode_worker_id == world.decode.worker_id
    assert (start.num_reserved_pages, start.scheduling.lane_priority) == (4, 2)
    ranked = start.scheduling
    assert (ranked.rank, ranked.itl_target_ms, ranked.predicted_output_tokens) == (-3.5, 80, 6.25)
    [resume] = world.decode.named("resume")
    assert (resume.request_id, resume.next_index) == (start.request_id, 0)
    [hello] = world.prefill.named("hello")
    assert hello.gateway_id == "gateway-0-00000000"


async def test_the_scheduler_gets_lengths_and_the_end(world: World) -> None:
    request = greedy_request("Say hello", max_tokens=4, lane="batch")
    await stream(world.stub, request, timeout_s=30)
    await world.until_idle()
    [submit] = world.scheduler.submits
    assert (submit.lane, submit.model, submit.num_prompt_tokens, submit.max_tokens) == ("batch", "bytes", 9, 4)
    assert 29_000 < submit.deadline_ms < 31_000  # gRPC rounds a timeout up a little
    [finish] = world.scheduler.finishes
    assert (finish.dispatch, finish.outcome, finish.num_output_tokens) == (1, Outcome.FINISHED, 4)
    assert [hint.request_id for hint in world.scheduler.prefilled] == [submit.request_id]
    assert world.scheduler.cancels == []
    # The prefill worker's token may come after the end, which the other one sends: then it is cancelled there.
    assert world.decode.named("cancel") == []


async def test_a_single_token_is_answered_by_the_prefill_worker_alone(world: World) -> None:
    record = await stream(world.stub, greedy_request("x", max_tokens=1))
    assert record.text == "h"
    assert record.finish_reasons == [LENGTH]


async def test_a_chat_is_rendered_with_the_models_template(world: World) -> None:
    world.pair.answer = ids_of("Hi!")
    async with AsyncWeirClient(world.grpc_address) as client:
        turns = [Turn("system", "Be kind."), Turn("user", "Hello")]
        chunks = [chunk async for chunk in client.chat(turns, GenerateOptions(max_tokens=9))]
    [start] = world.prefill.named("start")
    assert bytes(start.prompt_token_ids) == b"system: Be kind.\nuser: Hello\n"
    assert "".join(chunk.text for chunk in chunks) == "Hi!"
    assert chunks[-1].finish_reason == "stop"
    assert (chunks[-1].num_prompt_tokens, chunks[-1].num_output_tokens) == (29, 3)


async def test_no_delta_has_half_a_character(world: World) -> None:
    world.pair.answer = ids_of("aé€😀")
    record = await stream(world.stub, greedy_request("x", max_tokens=10))
    assert record.text == "aé€😀"
    assert len(record.token_ids) == 10


async def test_a_character_that_is_never_completed_ends_as_a_replacement(world: World) -> None:
    world.pair.answer = ids_of("a😀")
    record = await stream(world.stub, greedy_request("x", max_tokens=3))
    assert record.text == "a\ufffd"


async def test_a_stop_string_ends_the_answer_before_it_and_stops_the_workers(world: World) -> None:
    request = greedy_request("x", max_tokens=300)
    request.options.stop_conditions.stop.extend(["o w", "zzz"])
    world.pair.stops_after = 8
    record = await stream(world.stub, request)
    assert record.text == "hell"
    assert bytes(record.token_ids) == b"hello w"
    assert record.finish_reasons == [STOP]
    await world.until(lambda: world.decode.named("cancel"), "the decode worker got the cancel")
    assert [cancel.attempt.dispatch for cancel in world.decode.named("cancel")] == [1]
    await world.until_idle()
    assert world.scheduler.finishes[0].outcome is Outcome.FINISHED
    assert world.scheduler.finishes[0].num_output_tokens == 7


async def test_an_unseeded_request_that_names_itself_gets_the_same_seed_again(world: World) -> None:
    for request_id in ("mine", "mine", "other"):
        await stream(world.stub, greedy_request("x", max_tokens=2, request_id=request_id))
        await world.until_idle()
    await stream(world.stub, greedy_request("x", max_tokens=2))
    seeds = [start.sampling.seed for start in world.prefill.named("start")]
    assert seeds[0] == seeds[1]
    assert len(set(seeds)) == 3


async def test_a_running_request_can_be_cancelled_by_its_name(world: World) -> None:
    world.pair.stops_after = 3
    async with AsyncWeirClient(world.grpc_address) as client:
        chunks = client.generate("x", GenerateOptions(request_id="mine", max_tokens=9))
        first = await anext(chunks)
        assert first.request_id == "mine"
        assert await client.cancel("mine")
        with pytest.raises(Cancelled, match="cancelled by the client"):
            _ = [chunk async for chunk in chunks]
        assert not await client.cancel("mine")
    await world.until_idle()
    assert world.scheduler.finishes[0].outcome is Outcome.CANCELLED


async def test_the_name_of_a_running_request_cannot_be_used_twice(world: World) -> None:
    world.pair.stops_after = 1
    async with AsyncWeirClient(world.grpc_address) as client:
        running = client.generate("x", GenerateOptions(request_id="mine"))
        await anext(running)
        with pytest.raises(InvalidRequest, match=r"options.request_id: 'mine' is the id of a request that is running"):
            await anext(client.generate("x", GenerateOptions(request_id="mine")))
        await client.cancel("mine")
        with pytest.raises(Cancelled):
            _ = [chunk async for chunk in running]


async def test_tokenize_and_list_models(world: World) -> None:
    async with AsyncWeirClient(world.grpc_address) as client:
        assert await client.tokenize("abc") == [97, 98, 99]
        [model] = await client.list_models()
        assert (model.name, model.max_context_tokens, model.vocab_size) == ("bytes", 512, 257)


async def test_many_requests_at_once_get_their_own_tokens(world: World) -> None:
    records = await asyncio.gather(
        *(stream(world.stub, greedy_request("x", max_tokens=number)) for number in range(1, 12))
    )
    assert [record.text for record in records] == ["hello world"[:number] for number in range(1, 12)]
    assert world.prefill.num_streams == world.decode.num_streams == 1


async def test_malformed_protobuf_is_refused_as_such(world: World) -> None:
    async with grpc.aio.insecure_channel(world.grpc_address) as channel:
        call = channel.unary_stream("/weir.v1.Inference/Generate", bytes, bytes)(b"\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "not the protobuf message" in (refused.value.details() or "")
    record = await stream(world.stub, inference_pb2.GenerateRequest(text="x"))
    assert record.text == "hello world"
