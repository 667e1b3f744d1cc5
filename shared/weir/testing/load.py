"""Requests over the raw gRPC stub, with everything a client can see written down."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio

from weir.rpc.tls.public import make_public_channel
from weir.wire.v1 import inference_pb2, inference_pb2_grpc, types_pb2


@dataclass(slots=True)
class StreamRecord:
    """What one client saw. `code` is OK for a stream that ended by itself."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reasons: list[int] = field(default_factory=list)
    num_index_errors: int = 0
    code: grpc.StatusCode = grpc.StatusCode.OK
    details: str = ""
    elapsed_s: float = 0.0
    logprobs: list[float] = field(default_factory=list)
    max_pause_s: float = 0.0
    """The longest wait between two responses."""
    last_at_s: float | None = field(default=None, repr=False, compare=False)
    """When the last response came; None: the next one follows no other."""

    @property
    def num_terminal_events(self) -> int:
        """A last response and an error status both end a stream; there must be exactly one of them."""
        return len(self.finish_reasons) + (self.code is not grpc.StatusCode.OK)

    def add(self, response: inference_pb2.GenerateResponse) -> None:
        """It comes now."""
        now_s = time.monotonic()
        if self.last_at_s is not None:
            self.max_pause_s = max(self.max_pause_s, now_s - self.last_at_s)
        self.last_at_s = now_s
        if response.token_ids and response.first_index != len(self.token_ids):
            self.num_index_errors += 1
        self.token_ids.extend(response.token_ids)
        self.logprobs.extend(entry.logprob for entry in response.logprobs)
        self.text += response.text
        if response.finish_reason != types_pb2.FINISH_REASON_UNSPECIFIED:
            self.finish_reasons.append(response.finish_reason)


def greedy_request(
    prompt: str | Sequence[int], *, max_tokens: int, ignore_eos: bool = False, lane: str = "", request_id: str = ""
) -> inference_pb2.GenerateRequest:
    """A request at temperature 0."""
    request = inference_pb2.GenerateRequest(
        options=inference_pb2.RequestOptions(
            request_id=request_id,
            lane=lane,
            sampling=types_pb2.SamplingParams(temperature=0.0),
            stop_conditions=inference_pb2.StopConditions(max_tokens=max_tokens, ignore_eos=ignore_eos),
        )
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    return request


async def stream(
    stub: "inference_pb2_grpc.InferenceAsyncStub",
    request: inference_pb2.GenerateRequest,
    *,
    cancel_after_tokens: int | None = None,
    cancel_after_s: float | None = None,
    timeout_s: float = 120.0,
) -> StreamRecord:
    """Sends one request and follows it to its end, or cancels it after so many tokens or so much time."""
    record = StreamRecord()
    started = time.monotonic()
    call = stub.Generate(request, timeout=timeout_s)

    def cancel_unless_ended() -> None:
        if not record.finish_reasons:
            call.cancel()

    timer = None
    if cancel_after_s is not None:
        timer = asyncio.get_running_loop().call_later(cancel_after_s, cancel_unless_ended)
    try:
        await follow(call, record, cancel_after_tokens=cancel_after_tokens)
    finally:
        if timer is not None:
            timer.cancel()
        record.elapsed_s = time.monotonic() - started
    return record


async def follow(
    call: "grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]",
    record: StreamRecord,
    *,
    cancel_after_tokens: int | None = None,
) -> bool:
    """Adds to `record` until the call has ended, and how it did. Returns whether it cancelled the call, which it does
    once the record has so many tokens."""
    is_cancelled = False
    try:
        async for response in call:
            record.add(response)
            if record.finish_reasons or cancel_after_tokens is None:
                continue  # once it has ended, a cancellation would be a second end of the client's own making
            if len(record.token_ids) >= cancel_after_tokens:
                is_cancelled = True
                call.cancel()
    except grpc.aio.AioRpcError as error:
        record.code, record.details = error.code(), error.details() or ""
    except asyncio.CancelledError:
        # grpc.aio raises this in the reader when the call itself was cancelled.
        if not call.cancelled():
            raise
        record.code = grpc.StatusCode.CANCELLED
    return is_cancelled


def open_stub(address: str, ca: str = "") -> "tuple[grpc.aio.Channel, inference_pb2_grpc.InferenceAsyncStub]":
    """The channel is the caller's to close. `ca`: as `weir.client.WeirClient`."""
    channel = make_public_channel(address, ca)
    stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
    return channel, stub
