"""Clients that send a request with an idempotency key again, to whichever gateway answers, until they have it all."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc
import httpx

from weir.testing.load import StreamRecord, open_stub
from weir.wire.v1 import inference_pb2

MAX_SENT = 60
PAUSE_S = 0.25


@dataclass
class Resumed:
    """All that one client saw. `num_had`: how many tokens it has by now; `broken_at`: whenever its stream broke;
    `waited_s`: from each time that it was sent again to the first new token."""

    num_had: int = field(default=0, compare=False)
    waited_s: list[float] = field(default_factory=list, compare=False)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reasons: list[str] = field(default_factory=list)
    num_index_errors: int = 0
    broken_at: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


async def stream_grpc(
    addresses: Sequence[str], request: inference_pb2.GenerateRequest, seen: Resumed | None = None
) -> Resumed:
    """The first address first, and the next one whenever a stream breaks. Fills `seen` as it goes."""
    seen = seen or Resumed()
    for sent in range(MAX_SENT):
        channel, stub = open_stub(addresses[sent % len(addresses)])
        async with channel:
            again = inference_pb2.GenerateRequest()
            again.CopyFrom(request)
            if sent:
                again.options.resume_from = len(seen.token_ids)
            sent_at_s, num_before = time.monotonic(), len(seen.token_ids)
            try:
                async for response in stub.Generate(again, timeout=120):
                    if sent and response.token_ids and len(seen.token_ids) == num_before:
                        seen.waited_s.append(time.monotonic() - sent_at_s)
                    seen.num_index_errors += response.first_index != len(seen.token_ids)
                    seen.token_ids.extend(response.token_ids)
                    seen.num_had = len(seen.token_ids)
                    seen.text += response.text
                    if response.finish_reason:
                        seen.finish_reasons.append(str(response.finish_reason))
            except grpc.aio.AioRpcError as error:
                seen.errors.append(f"{error.code().name}: {error.details()}")
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    return seen
            else:
                return seen
        seen.broken_at.append(len(seen.token_ids))
        await asyncio.sleep(PAUSE_S)
    return seen


async def stream_sse(urls: Sequence[str], body: dict[str, object], key: str, seen: Resumed) -> Resumed:
    """As a browser's event source would, by the id of the last event alone."""
    last_id = ""
    for sent in range(MAX_SENT):
        headers = {"Idempotency-Key": key} | ({"Last-Event-ID": last_id} if last_id else {})
        try:
            async with (
                httpx.AsyncClient(base_url=urls[sent % len(urls)], timeout=120) as client,
                client.stream("POST", "/v1/completions", json={**body, "stream": True}, headers=headers) as answer,
            ):
                if answer.status_code != 200:
                    seen.errors.append(f"{answer.status_code} {(await answer.aread()).decode()}")
                    if answer.status_code != 503:
                        return seen
                else:
                    async for line in answer.aiter_lines():
                        if line.startswith("id: "):
                            last_id = line.removeprefix("id: ")
                            seen.num_had = int(last_id.removesuffix("-end"))
                        elif line == "data: [DONE]":
                            if "-end" in last_id:
                                return seen
                        elif line.startswith("data: "):
                            _add(seen, json.loads(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            seen.errors.append(type(error).__name__)
        seen.broken_at.append(seen.num_had)
        await asyncio.sleep(PAUSE_S)
    return seen


def _add(seen: Resumed, chunk: dict[str, object]) -> None:
    if "error" in chunk:
        seen.errors.append(str(chunk["error"]))
        return
    for choice in chunk["choices"]:  # type: ignore[attr-defined]
        seen.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        if choice["finish_reason"]:
            seen.finish_reasons.append(choice["finish_reason"])


def as_resumed(record: StreamRecord) -> Resumed:
    """An undisturbed stream, to compare with."""
    assert record.code is grpc.StatusCode.OK, record.details
    return Resumed(
        token_ids=record.token_ids,
        text=record.text,
        finish_reasons=[str(reason) for reason in record.finish_reasons],
    )
