"""Clients of the streams that are measured, over SSE and over gRPC. They read little of what comes: they share the
cores with what is measured.
"""

import asyncio
import json
import random
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import grpc.aio

from benchmarks.wire.step_tokens import age_s
from weir.testing.load import greedy_request, open_stub

Frontend = Literal["http", "grpc"]

_USAGE = b'"completion_tokens":'
_TOKEN_IDS = b'"token_ids":['
_STREAMS_A_CHANNEL = 32
_NUM_WATCHERS = 4
"""So many streams at a time are looked at closely: they name their tokens, and each token's age is taken."""
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class StreamLoad:
    """Closed loop: as many requests at a time, each of so many tokens in and out. `step_s` of a null worker: the age of
    tokens is measured; 0: it is not."""

    model: str
    num_requests: int
    concurrency: int
    input_len: int
    output_len: int
    seed: int = 0
    step_s: float = 0.0
    ca: str = ""
    """File with the authority of the gateway's certificate; empty: it has none."""

    def prompts(self) -> list[list[int]]:
        source = random.Random(self.seed)
        return [[source.randrange(1000, 40_000) for _ in range(self.input_len)] for _ in range(self.num_requests)]

    def step_of(self, number: int) -> float:
        """0 for a client that does not watch its tokens."""
        return self.step_s if number < _NUM_WATCHERS else 0.0


@dataclass(slots=True)
class StreamsReceived:
    """What all clients saw. `gaps_s`: between two pieces of one stream; `ages_s`: of the watched streams' tokens, from
    the time at which the worker's step was due to the client."""

    num_tokens: int = 0
    num_pieces: int = 0
    gaps_s: list[float] = field(default_factory=list)
    ages_s: list[float] = field(default_factory=list)
    duration_s: float = 0.0


async def run_streams(frontend: Frontend, port: int, load: StreamLoad) -> StreamsReceived:
    """Raises RuntimeError when a stream is not whole."""
    received = StreamsReceived()
    began_s = time.monotonic()
    if frontend == "http":
        await _in_loop(load, lambda prompt, number: _one_over_http(port, load, prompt, received, load.step_of(number)))
    else:
        opened = [open_stub(f"127.0.0.1:{port}", load.ca) for _ in range(-(-load.concurrency // _STREAMS_A_CHANNEL))]
        try:
            stubs = [stub for _, stub in opened]

            async def one(prompt: list[int], number: int) -> None:
                call = stubs[number % len(stubs)].Generate(
                    greedy_request(prompt, max_tokens=load.output_len, ignore_eos=True), timeout=_TIMEOUT_S
                )
                await _read_grpc(call, load.output_len, received, load.step_of(number))

            await _in_loop(load, one)
        finally:
            for channel, _ in opened:
                await channel.close()
    received.duration_s = time.monotonic() - began_s
    return received


async def _in_loop(load: StreamLoad, one: Callable[[list[int], int], Awaitable[None]]) -> None:
    waiting = iter(load.prompts())

    async def client(number: int) -> None:
        for prompt in waiting:
            await one(prompt, number)

    async with asyncio.TaskGroup() as group:
        for number in range(load.concurrency):
            group.create_task(client(number))


async def _read_grpc(
    call: "grpc.aio.UnaryStreamCall[Any, Any]", output_len: int, received: StreamsReceived, step_s: float
) -> None:
    num_tokens, last_s = 0, 0.0
    async for response in call:
        now_s = time.monotonic()
        if last_s:
            received.gaps_s.append(now_s - last_s)
        last_s = now_s
        received.num_pieces += 1
        num_tokens += len(response.token_ids)
        if step_s:
            received.ages_s += [age_s(token_id, step_s, now_s) for token_id in response.token_ids]
    if num_tokens != output_len:
        raise RuntimeError(f"a stream over gRPC brought {num_tokens} tokens of {output_len}")
    received.num_tokens += num_tokens


class _SseClient(asyncio.Protocol):
    """One request on a connection of its own, which the server closes at the end."""

    def __init__(self, received: StreamsReceived, step_s: float) -> None:
        """`step_s` 0: it is not watched."""
        self._received = received
        self._step_s = step_s
        self._unread = b""
        self._last_s = 0.0
        self.tail = b""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        num_events = data.count(b"data: {")
        self.tail = (self.tail + data)[-1024:]
        if not num_events:
            return
        now_s = time.monotonic()
        if self._last_s:
            self._received.gaps_s.append(now_s - self._last_s)
        self._last_s = now_s
        self._received.num_pieces += num_events
        if self._step_s:
            self._take_ages(data, now_s)

    def _take_ages(self, data: bytes, now_s: float) -> None:
        *events, self._unread = (self._unread + data).split(b"\n\n")
        for event in events:
            ids = event.partition(_TOKEN_IDS)[2].partition(b"]")[0]
            self._received.ages_s += [age_s(int(token_id), self._step_s, now_s) for token_id in ids.split(b",") if ids]

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


async def _one_over_http(
    port: int, load: StreamLoad, prompt: list[int], received: StreamsReceived, step_s: float
) -> None:
    fields = {
        "model": load.model,
        "prompt": prompt,
        "max_tokens": load.output_len,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_prompt": False,
        "return_token_ids": bool(step_s),
    }
    body = json.dumps(fields).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    client = _SseClient(received, step_s)
    tls = ssl.create_default_context(cafile=load.ca) if load.ca else None
    transport, _ = await loop.create_connection(lambda: client, "127.0.0.1", port, ssl=tls)
    try:
        transport.write(head.encode() + body)
        async with asyncio.timeout(_TIMEOUT_S):
            await client.ended
    finally:
        transport.abort()
    usage = client.tail.rpartition(_USAGE)[2].partition(b",")[0]
    if b"[DONE]" not in client.tail or not usage.isdigit() or int(usage) != load.output_len:
        raise RuntimeError(f"a stream over HTTP ended with {client.tail[-200:]!r}")
    received.num_tokens += int(usage)
