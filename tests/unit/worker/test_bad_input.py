"""Whatever a gateway sends, the answer names the field that is wrong, and no other gateway notices."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.engine.world import Records
from tests.unit.worker.rig import (
    MAX_CONTEXT_TOKENS,
    TIMEOUT_S,
    VOCAB_SIZE,
    Rig,
    Stream,
    connected,
    expected_tokens,
    resume_command,
    running_rig,
    start_command,
)

from weir.core.errors import InvalidRequest
from weir.core.sampling import SamplingParams
from weir.rpc.channel import make_channel
from weir.rpc.conversions import sampling_problems, sampling_to_pb
from weir.rpc.errors import from_rpc_error
from weir.wire.v1 import types_pb2, worker_pb2
from weir.worker.engine.model_loading import ModelSpec
from weir.worker.requests.commands import gateway_id_from_pb, key_from_pb, start_from_pb

GATEWAY = "gateway-0-22222222"
MODEL = ModelSpec("hash", VOCAB_SIZE, MAX_CONTEXT_TOKENS, digest="", page_bytes=64)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with running_rig() as made:
        yield made


async def read_all(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def error_of(call: Any) -> InvalidRequest:
    """The error with which the stream ends."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(read_all(call), TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    error = from_rpc_error(caught.value)
    assert isinstance(error, InvalidRequest)
    return error


@pytest.mark.parametrize(
    ("first", "field"),
    [
        (worker_pb2.ServeRequest(cancel=worker_pb2.Cancel()), "hello"),
        (worker_pb2.ServeRequest(), "hello"),
        (worker_pb2.ServeRequest(hello=worker_pb2.Hello()), "hello.gateway_id"),
        (worker_pb2.ServeRequest(hello=worker_pb2.Hello(gateway_id="a b")), "hello.gateway_id"),
        (worker_pb2.ServeRequest(hello=worker_pb2.Hello(gateway_id="g" * 65)), "hello.gateway_id"),
    ],
)
async def test_a_stream_begins_with_a_proper_hello(rig: Rig, first: worker_pb2.ServeRequest, field: str) -> None:
    async with make_channel(rig.prefill.address) as channel:
        stream = Stream(channel)
        await stream.call.write(first)
        error = await error_of(stream.call)
        assert [violation.field for violation in error.violations] == [field]


@pytest.mark.parametrize(
    ("command", "field"),
    [
        ({}, "command"),
        ({"hello": worker_pb2.Hello(gateway_id=GATEWAY)}, "hello"),
        ({"cancel": worker_pb2.Cancel(request_id="X" * 32)}, "cancel.request_id"),
        ({"cancel": worker_pb2.Cancel(request_id="a" * 32)}, "cancel.attempt.dispatch"),
        ({"resume": worker_pb2.Resume(request_id="a" * 31)}, "resume.request_id"),
        (
            {"resume": worker_pb2.Resume(request_id="a" * 32, attempt=types_pb2.Attempt(dispatch=1), next_index=2**31)},
            "resume.next_index",
        ),
        ({"start": worker_pb2.Start(request_id="../../etc/passwd")}, "start.request_id"),
    ],
)
async def test_a_command_that_no_sane_gateway_sends_ends_its_stream(
    rig: Rig, command: dict[str, Any], field: str
) -> None:
    async with connected(rig.prefill, GATEWAY) as stream:
        await stream.send(**command)
        error = await error_of(stream.call)
        assert [violation.field for violation in error.violations] == [field]


async def test_bytes_that_are_no_message_end_the_stream(rig: Rig) -> None:
    async with make_channel(rig.prefill.address) as channel:
        call: Any = channel.stream_stream("/weir.v1.Worker/Serve")()
        await call.write(worker_pb2.ServeRequest(hello=worker_pb2.Hello(gateway_id=GATEWAY)).SerializeToString())
        await asyncio.wait_for(call.read(), TIMEOUT_S)
        await call.write(b"\xff\xff\xff\xff")
        error = await error_of(call)
        assert [violation.field for violation in error.violations] == ["request"]


def sampling(**changes: Any) -> types_pb2.SamplingParams:
    message = sampling_to_pb(SamplingParams(seed=1))
    message.MergeFrom(types_pb2.SamplingParams(**changes))
    return message


BAD_STARTS: list[tuple[dict[str, Any], str]] = [
    ({"prompt_token_ids": []}, "start.prompt_token_ids: 0 tokens: allowed are 1 to 399"),
    ({"scheduling": types_pb2.SchedulingParams(rank=float("nan"))}, "start.scheduling.rank: nan: must be finite"),
    (
        {"scheduling": types_pb2.SchedulingParams(predicted_output_tokens=-1.0)},
        "start.scheduling.predicted_output_tokens: -1.0: must be finite and at least 0",
    ),
    ({"prompt_token_ids": [1] * 400}, "start.prompt_token_ids: 400 tokens"),
    ({"prompt_token_ids": [1, 2, VOCAB_SIZE]}, "start.prompt_token_ids[2]: 500 is not below the vocabulary's 500"),
    ({"prompt_token_ids": [2**32 - 1]}, "start.prompt_token_ids[0]"),
    ({"max_tokens": 0}, "start.max_tokens: 0: allowed are 1 to 400"),
    ({"max_tokens": 2**32 - 1}, "start.max_tokens"),
    ({"stop_token_ids": [VOCAB_SIZE]}, "start.stop_token_ids[0]"),
    ({"stop_token_ids": [1] * 65}, "start.stop_token_ids: 65 ids"),
    ({"num_reserved_pages": 2}, "start.num_reserved_pages: 2: allowed are 3"),
    ({"output_token_ids": [1] * 9, "num_reserved_pages": 3}, "start.num_reserved_pages: 3: allowed are 4"),
    ({"output_token_ids": [1] * 12}, "start.output_token_ids: 12 tokens: allowed are 0 to 11"),
    ({"output_token_ids": [1] * 360, "max_tokens": 400}, "start.output_token_ids: 360 tokens: allowed are 0 to 359"),
    ({"output_token_ids": [1, VOCAB_SIZE]}, "start.output_token_ids[1]: 500 is not below the vocabulary's 500"),
    ({"decode_worker_id": ""}, "start.decode_worker_id"),
    ({"min_tokens": 401}, "start.min_tokens: 401: allowed are 0 to 400"),
    ({"sampling": types_pb2.SamplingParams(temperature=1)}, "start.sampling.seed: must be given"),
    ({"sampling": sampling(temperature=math.nan)}, "start.sampling.temperature: is nan"),
    ({"sampling": sampling(temperature=-1, top_p=0)}, "start.sampling.top_p: is 0.0"),
    ({"sampling": sampling(min_p=1.5)}, "start.sampling.min_p: is 1.5"),
    ({"sampling": sampling(repetition_penalty=0)}, "start.sampling.repetition_penalty: is 0.0"),
    ({"sampling": sampling(presence_penalty=3)}, "start.sampling.presence_penalty: is 3.0"),
    ({"sampling": sampling(frequency_penalty=math.inf)}, "start.sampling.frequency_penalty: is inf"),
    ({"sampling": sampling(logprobs=21)}, "start.sampling.logprobs: is 21"),
    ({"sampling": sampling(prompt_logprobs=2**32 - 1)}, "start.sampling.prompt_logprobs: is 4294967295"),
    ({"sampling": sampling(logit_bias={1: math.nan})}, "start.sampling.logit_bias[1]: is nan"),
    ({"sampling": sampling(logit_bias={VOCAB_SIZE: 1})}, "start.sampling.logit_bias[0]: 500 is not below"),
    ({"sampling": sampling(logit_bias=dict.fromkeys(range(301), 1))}, "start.sampling.logit_bias: 301 ids"),
]


async def test_a_prompt_with_a_wrong_field_is_refused_alone(rig: Rig) -> None:
    async with connected(rig.prefill, GATEWAY) as prefill, connected(rig.decode, GATEWAY) as decode:
        for changes, message in BAD_STARTS:
            start = start_command(**({"decode_worker_id": rig.decode.worker_id} | changes))
            await prefill.send(start=start)
            update = await prefill.next_update(start.request_id)
            assert update.error.reason == worker_pb2.WORKER_ERROR_REASON_INTERNAL
            assert message in update.error.message
        good = start_command(rig.decode.worker_id)
        await decode.send(resume=resume_command(good))
        await prefill.send(start=good)
        assert (await decode.receive_all(good.request_id)).token_ids == expected_tokens(good)


async def test_what_is_wrong_with_a_prompt_is_told_to_its_gateway_and_not_repeated_in_the_log(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    start = start_command(rig.decode.worker_id, prompt_token_ids=[1, 2, 4_000_000_007])
    async with connected(rig.prefill, GATEWAY) as prefill:
        await prefill.send(start=start)
        assert "4000000007" in (await prefill.next_update(start.request_id)).error.message
    assert f"gateway {GATEWAY}: request {start.request_id} refused: InvalidRequest" in caplog.text
    assert "4000000007" not in caplog.text


async def test_one_gateway_cannot_touch_the_requests_of_another(rig: Rig) -> None:
    start = start_command(rig.decode.worker_id)
    async with connected(rig.prefill, GATEWAY) as owner, connected(rig.prefill, "gateway-1-33333333") as other:
        await owner.send(start=start)
        await owner.receive_all(start.request_id)
        await other.send(resume=resume_command(start))
        update = await other.next_update(start.request_id)
        assert update.error.reason == worker_pb2.WORKER_ERROR_REASON_UNKNOWN_REQUEST


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_understood(payload: bytes) -> None:
    """What parses as a message by chance is checked field by field."""
    request = worker_pb2.ServeRequest()
    try:
        request.ParseFromString(payload)
    except Exception as error:  # noqa: BLE001 - protobuf has two classes of the same name
        assert type(error).__name__ == "DecodeError"  # noqa: PT017
        return
    check(request)


def mostly(usual: st.SearchStrategy[Any], unusual: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(usual, usual, usual, usual, unusual)


UINT32 = st.integers(0, 2**32 - 1)
TOKEN_IDS = mostly(st.integers(0, VOCAB_SIZE - 1), UINT32)
STARTS = st.builds(
    worker_pb2.Start,
    request_id=st.just("a" * 32),
    attempt=st.builds(types_pb2.Attempt, dispatch=mostly(st.integers(1, 9), UINT32), adoption=UINT32),
    prompt_token_ids=st.lists(TOKEN_IDS, min_size=1, max_size=5),
    sampling=st.builds(
        types_pb2.SamplingParams,
        temperature=mostly(st.floats(0, 2, width=32), st.floats(width=32)),
        top_k=UINT32,
        top_p=mostly(st.floats(0.125, 1, width=32), st.floats(width=32)),
        seed=st.integers(0, 2**64 - 1),
        min_p=mostly(st.floats(0, 1, width=32), st.floats(width=32)),
        repetition_penalty=mostly(st.floats(0.125, 8, width=32), st.floats(width=32)),
        presence_penalty=mostly(st.floats(-2, 2, width=32), st.floats(width=32)),
        frequency_penalty=mostly(st.floats(-2, 2, width=32), st.floats(width=32)),
        logit_bias=st.dictionaries(TOKEN_IDS, mostly(st.floats(-100, 100, width=32), st.floats(width=32)), max_size=3),
        logprobs=mostly(st.integers(0, 20), UINT32),
        prompt_logprobs=st.none() | st.integers(0, 20),
    ),
    min_tokens=mostly(st.integers(0, MAX_CONTEXT_TOKENS), UINT32),
    scheduling=st.builds(
        types_pb2.SchedulingParams,
        lane_priority=st.integers(-(2**31), 2**31 - 1),
        rank=mostly(st.floats(-1e9, 1e9), st.floats()),
        itl_target_ms=UINT32,
        predicted_output_tokens=mostly(st.floats(0, 1e6), st.floats()),
    ),
    max_tokens=mostly(st.integers(1, MAX_CONTEXT_TOKENS), UINT32),
    stop_token_ids=st.lists(TOKEN_IDS, max_size=3),
    decode_worker_id=mostly(st.just("decode-0-00000000"), st.text(max_size=80)),
    traceparent=st.text(max_size=80) | st.just("00-" + "a" * 32 + "-" + "b" * 16 + "-01"),
    num_reserved_pages=mostly(st.integers(1, 30), UINT32),
    output_token_ids=st.lists(TOKEN_IDS, max_size=4),
)


@settings(max_examples=300, deadline=None)
@given(STARTS)
def test_what_passes_the_checks_is_within_every_limit_and_fits_a_record(start: worker_pb2.Start) -> None:
    check(worker_pb2.ServeRequest(start=start))


def check(request: worker_pb2.ServeRequest) -> None:
    with contextlib.suppress(InvalidRequest):
        match request.WhichOneof("command"):
            case "hello":
                gateway_id_from_pb(request.hello)
            case "cancel":
                key_from_pb("cancel", request.cancel)
            case "resume":
                key_from_pb("resume", request.resume)
            case "start":
                key_from_pb("start", request.start)
                prompt = start_from_pb(request.start, GATEWAY, MODEL)
                params, output_token_ids = prompt.params, prompt.output_token_ids
                assert len(params.prompt_token_ids) > 0
                assert len(params.prompt_token_ids + output_token_ids) < MAX_CONTEXT_TOKENS
                assert len(output_token_ids) < params.stop.max_tokens
                assert all(token_id < VOCAB_SIZE for token_id in output_token_ids)
                assert max(params.prompt_token_ids) < VOCAB_SIZE
                assert 0 <= params.sampling.temperature <= 2
                assert 0 < params.sampling.top_p <= 1
                assert 0 <= params.sampling.top_k <= VOCAB_SIZE
                assert 1 <= params.stop.max_tokens <= MAX_CONTEXT_TOKENS
                assert 0 <= params.stop.min_tokens <= MAX_CONTEXT_TOKENS
                assert all(token_id < VOCAB_SIZE for token_id, _ in params.sampling.logit_bias)
                assert sampling_problems(sampling_to_pb(params.sampling)) == []
                assert len(params.traceparent) in (0, 55)
                records = Records(num_pages=8, num_slots=1, max_context_tokens=MAX_CONTEXT_TOKENS)
                record = records.open(0)
                record.begin(params, output_token_ids)
                record.publish(0)
                snapshot = record.read()
                assert snapshot is not None
                assert (snapshot.params, snapshot.output_token_ids) == (params, output_token_ids)
