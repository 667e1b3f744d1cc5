"""Several answers to one request: one stream, one admission, one end."""

import asyncio
from dataclasses import replace

import grpc
import openai
import pytest
from opentelemetry.context import Context
from tests.unit.gateway.fake_model import ids_of
from tests.unit.gateway.fake_scheduler import CALLER
from tests.unit.gateway.fake_workers import LENGTH, STOP
from tests.unit.gateway.world import FAST, World, open_world

from weir.bus.messages import Outcome, RefusalReason, SubmitReply
from weir.client import AsyncWeirClient, Chunk, GenerateOptions
from weir.core.errors import Cancelled, Overloaded, Unavailable
from weir.testing.load import greedy_request
from weir.wire.v1 import inference_pb2, worker_pb2
from weir_gateway.driving.driver import DriverSettings
from weir_gateway.requests.client_request import GRPC_NAMES, ClientRequest, Operation, Text

OPTIONS = GenerateOptions(n=3, seed=11, max_tokens=20)


def choice_of(start: worker_pb2.Start, first: worker_pb2.Start) -> int:
    """Ids of one request differ in their last two digits."""
    return int(start.request_id, 16) ^ int(first.request_id, 16)


@pytest.fixture
async def numbered(world: World) -> World:
    """Choice i is answered with its number, i + 1 times."""

    def answer_to(start: worker_pb2.Start) -> list[int]:
        first = next(known for known in world.pair.starts.values() if known.sampling.seed == 11)
        choice = choice_of(start, first)
        return ids_of(f"{choice} " * (choice + 1))

    world.pair.answer_to = answer_to
    return world


async def ask(world: World, options: GenerateOptions = OPTIONS) -> list[Chunk]:
    async with AsyncWeirClient(world.grpc_address) as client:
        return [chunk async for chunk in client.generate("hello", options)]


def text_of(chunks: list[Chunk], choice: int) -> str:
    return "".join(chunk.text for chunk in chunks if chunk.choice == choice)


async def test_every_choice_is_a_stream_of_its_own_by_index(numbered: World) -> None:
    chunks = await ask(numbered)
    assert [text_of(chunks, choice) for choice in range(3)] == ["0 ", "1 1 ", "2 2 2 "]
    for choice in range(3):
        mine = [chunk for chunk in chunks if chunk.choice == choice]
        indices = [
            index for chunk in mine for index in range(chunk.first_index, chunk.first_index + len(chunk.token_ids))
        ]
        assert indices == list(range(2 * (choice + 1)))
        assert [chunk.finish_reason for chunk in mine if chunk.finish_reason] == ["stop"]
    assert [chunk.num_output_tokens for chunk in chunks if chunk.num_prompt_tokens] == [12]
    assert chunks[-1].num_output_tokens == 12
    assert {chunk.request_id for chunk in chunks} == {chunks[0].request_id}


async def test_choice_0_is_the_only_answer_of_a_request_without_n(numbered: World) -> None:
    await ask(numbered)
    seeds = {
        choice_of(start, first): start.sampling.seed
        for first in [_first(numbered)]
        for start in numbered.pair.starts.values()
    }
    assert seeds[0] == 11
    assert len(set(seeds.values())) == 3
    numbered.pair.starts.clear()
    await ask(numbered)
    again = {
        choice_of(start, first): start.sampling.seed
        for first in [_first(numbered)]
        for start in numbered.pair.starts.values()
    }
    assert again == seeds


def _first(world: World) -> worker_pb2.Start:
    return next(start for start in world.pair.starts.values() if start.sampling.seed == 11)


async def test_only_choice_0_scores_the_prompt(numbered: World) -> None:
    chunks = await ask(numbered, GenerateOptions(n=3, seed=11, max_tokens=20, prompt_logprobs=1))
    asked = [start.sampling.HasField("prompt_logprobs") for start in numbered.pair.starts.values()]
    assert sorted(asked) == [False, False, True]
    with_prompt = [chunk for chunk in chunks if chunk.prompt_logprobs]
    assert [(chunk.choice, chunk.first_index, len(chunk.prompt_logprobs)) for chunk in with_prompt] == [(0, 0, 4)]


async def test_the_scheduler_sees_each_choice_as_a_request(numbered: World) -> None:
    await ask(numbered)
    await numbered.until_idle()
    assert len({submit.request_id for submit in numbered.scheduler.submits}) == 3
    assert [finish.outcome for finish in numbered.scheduler.finishes] == [Outcome.FINISHED] * 3
    assert sorted(finish.num_output_tokens for finish in numbered.scheduler.finishes) == [2, 4, 6]
    assert numbered.metric("prompt_tokens_total") == 5
    assert numbered.metric("output_tokens_total") == 12


@pytest.mark.parametrize("num_accepted", [0, 1, 2])
async def test_if_one_is_refused_all_are_and_nothing_was_sent(numbered: World, num_accepted: int) -> None:
    numbered.scheduler.refusal = SubmitReply(5, False, RefusalReason.QUEUE_FULL, "lane standard is full", 2000)
    numbered.scheduler.num_accepted = num_accepted
    numbered.scheduler.refusal_delay_s = 0.1  # those that were taken have tokens by then
    async with AsyncWeirClient(numbered.grpc_address) as client:
        with pytest.raises(Overloaded, match="lane standard is full") as refused:
            await anext(client.generate("hello", OPTIONS))
    assert refused.value.retry_after_s == 2.0
    await numbered.until_idle()
    accepted = {submit.request_id for submit in numbered.scheduler.submits[:num_accepted]}
    cancelled = {cancel.request_id for cancel in numbered.scheduler.cancels}
    assert accepted <= cancelled | {finish.request_id for finish in numbered.scheduler.finishes}


async def test_a_refused_choice_ends_the_others_though_nobody_reads(numbered: World) -> None:
    numbered.pair.stops_after = 1
    numbered.scheduler.refusal = SubmitReply(5, False, RefusalReason.QUEUE_FULL, "lane standard is full", 2000)
    numbered.scheduler.num_accepted = 2
    client_request = ClientRequest(Operation.TEXT_COMPLETION, Text("hello"), GRPC_NAMES, OPTIONS)
    opened = await numbered.gateway.processor.open(client_request, CALLER, Context(), None)
    ending = await asyncio.wait_for(opened.ended, 5)
    assert isinstance(ending.error, Overloaded)
    phases = sorted(state.phase.value for state in opened.states)
    assert phases == ["cancelled", "cancelled", "refused"]
    opened.leave()


async def test_there_must_be_room_for_all() -> None:
    settings = replace(FAST, driver=DriverSettings(max_requests=4, tick_s=0.05))
    async with open_world(settings) as world:
        with pytest.raises(Overloaded, match="0 requests are in flight, at most 4"):
            await ask(world, GenerateOptions(n=5))
        assert len(await ask(world, GenerateOptions(n=4))) >= 4
        assert len(world.scheduler.submits) == 4


async def test_a_lost_worker_ends_all_choices_with_one_error(world: World) -> None:
    world.pair.stops_after = 3
    asking = asyncio.create_task(ask(world))
    await world.until(lambda: len(world.scheduler.prefilled) == 3, "all run")
    await world.decode.stop()
    with pytest.raises(Unavailable, match="is lost"):
        await asking
    await world.until_idle()
    outcomes = {finish.outcome for finish in world.scheduler.finishes}
    assert len(world.scheduler.finishes) == 3
    assert Outcome.FINISHED not in outcomes


async def test_one_name_cancels_all_choices(world: World) -> None:
    world.pair.stops_after = 3
    async with AsyncWeirClient(world.grpc_address) as client:
        stream = client.generate("hello", GenerateOptions(n=3, request_id="mine"))
        await anext(stream)
        await world.until(lambda: len(world.scheduler.prefilled) == 3, "all run")
        assert await client.cancel("mine")
        with pytest.raises(Cancelled):
            _ = [chunk async for chunk in stream]
    await world.until_idle()
    assert world.metric("cancelled_total") == 3

    def cancelled_ids() -> set[str]:
        return {cancel.request_id for cancel in world.decode.named("cancel")}

    await world.until(lambda: len(cancelled_ids()) == 3, "the worker got the cancels")


async def test_a_client_that_leaves_ends_all_choices(world: World) -> None:
    world.pair.stops_after = 3
    request = greedy_request("x", max_tokens=9)
    request.options.n = 2
    call = world.stub.Generate(request)
    assert isinstance(await call.read(), inference_pb2.GenerateResponse)
    call.cancel()
    await world.until_idle()
    assert world.metric("cancelled_total") == 2


async def test_one_that_ends_early_leaves_the_others_running(world: World) -> None:
    answers = iter([ids_of("a"), ids_of("bbbb"), ids_of("cc")])
    by_id: dict[str, list[int]] = {}
    world.pair.answer_to = lambda start: by_id.setdefault(
        start.request_id, next(answers) if start.request_id not in by_id else []
    )
    request = greedy_request("x", max_tokens=4)
    request.options.n = 3
    finished = []
    async for response in world.stub.Generate(request):
        if response.finish_reason:
            finished.append((response.finish_reason, response.HasField("usage")))
    assert sorted(reason for reason, _ in finished) == sorted([STOP, LENGTH, STOP])
    assert [has_usage for _, has_usage in finished] == [False, False, True]


async def test_a_deadline_ends_all_choices(world: World) -> None:
    world.pair.stops_after = 1
    request = greedy_request("x", max_tokens=9)
    request.options.n = 2
    with pytest.raises(grpc.aio.AioRpcError) as expired:
        _ = [response async for response in world.stub.Generate(request, timeout=0.5)]
    assert expired.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await world.until_idle()
    assert world.metric("cancelled_total") == 2


async def test_openai_choices_whole_and_streamed(numbered: World) -> None:
    async with openai.AsyncOpenAI(base_url=f"{numbered.http_url}/v1", api_key="none", max_retries=0) as client:
        whole = await client.completions.create(model="bytes", prompt="x", n=3, seed=11, max_tokens=20)
        assert [(choice.index, choice.text) for choice in whole.choices] == [(0, "0 "), (1, "1 1 "), (2, "2 2 2 ")]
        assert whole.usage is not None
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (1, 12)
        numbered.pair.starts.clear()
        stream = await client.chat.completions.create(
            model="bytes",
            messages=[{"role": "user", "content": "x"}],
            n=3,
            seed=11,
            stream=True,
            stream_options={"include_usage": True},
        )
        texts = ["", "", ""]
        reasons = []
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                reasons += [choice.finish_reason] if choice.finish_reason else []
            usage = chunk.usage
        assert texts == ["0 ", "1 1 ", "2 2 2 "]
        assert reasons == ["stop"] * 3
        assert usage is not None
        assert usage.completion_tokens == 12


async def test_each_choice_has_a_span_below_the_requests_own(numbered: World) -> None:
    await ask(numbered)
    await numbered.until_idle()
    spans = numbered.spans.get_finished_spans()
    choices = [span for span in spans if span.attributes and "weir.request.choice" in span.attributes]
    (root,) = [span for span in spans if span.attributes and span.attributes.get("gen_ai.request.choice.count") == 3]
    assert root.context is not None
    assert [span.parent.span_id for span in choices if span.parent] == [root.context.span_id] * 3
    assert root.attributes is not None
    assert root.attributes["gen_ai.usage.output_tokens"] == 12
