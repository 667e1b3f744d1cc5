"""One request as a careful client makes it: with a key it is sent again from where it broke, to the other gateway."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

from weir.testing.load import StreamRecord, follow
from weir.wire.v1 import inference_pb2, inference_pb2_grpc

PAUSE_S = 0.25
_BROKEN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""CANCELLED: what gRPC says of a port that closes."""
_BUSY = grpc.StatusCode.RESOURCE_EXHAUSTED
BUSY_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Break:
    """A call that ended by no will of the client's: at which gateway, after how many tokens of its own, and why."""

    gateway: int
    began_s: float
    num_tokens: int
    reason: str


@dataclass
class Answer:
    """`record`: of the whole, or of the last attempt where there is no key. `breaks`: of all attempts but the last."""

    record: StreamRecord
    is_cancelled: bool = False
    breaks: list[Break] = field(default_factory=list)


@dataclass(frozen=True)
class Ask:
    """`key`: empty for none. `cancel_after`: tokens after which the client goes; None: it stays."""

    request: inference_pb2.GenerateRequest
    key: str
    first_gateway: int
    cancel_after: int | None
    timeout_s: float


async def ask(stubs: "Sequence[inference_pb2_grpc.InferenceAsyncStub]", what: Ask) -> Answer:
    """Ends when the answer is whole, given up by the client, refused for good, or late."""
    answer = Answer(StreamRecord())
    ends_at_s = time.monotonic() + what.timeout_s
    gateway = what.first_gateway
    while True:
        if not what.key:
            answer.record = StreamRecord(max_pause_s=answer.record.max_pause_s)
        record, began_s, num_had = answer.record, time.monotonic(), len(answer.record.token_ids)
        request = inference_pb2.GenerateRequest()
        request.CopyFrom(what.request)
        request.options.idempotency_key = what.key
        if num_had or (what.key and answer.breaks):
            request.options.resume_from = num_had
        call = stubs[gateway].Generate(request, timeout=max(1.0, ends_at_s - began_s))
        answer.is_cancelled = await follow(call, record, cancel_after_tokens=what.cancel_after)
        is_refused = record.code is _BUSY and not record.token_ids
        is_broken = record.code in _BROKEN or is_refused
        if not is_broken or answer.is_cancelled or record.finish_reasons or time.monotonic() > ends_at_s:
            return answer
        answer.breaks.append(
            Break(gateway, began_s, len(record.token_ids) - num_had, f"{record.code.name} {record.details}")
        )
        if not what.key and record.token_ids:
            return answer
        record.code, record.details = grpc.StatusCode.OK, ""
        gateway = (gateway + 1) % len(stubs)
        await asyncio.sleep(BUSY_PAUSE_S if is_refused else PAUSE_S)
