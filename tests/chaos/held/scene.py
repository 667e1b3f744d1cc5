"""Requests to a held stack, each with the tokens that it must get, and what a test waits for."""

import asyncio
import itertools
import json
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Literal

from tests.chaos.held.gate import Order
from tests.chaos.held.stack import HeldStack, wait_for
from tests.unit.gateway.fake_model import VOCAB_SIZE

from weir.core.sampling import SamplingParams
from weir.testing.load import StreamRecord, greedy_request, open_stub, stream
from weir.testing.runner import reference_tokens
from weir.wire.v1 import inference_pb2

Ending = Literal["cancel", "deadline", "deadline, partial", "client gone", "worker gone", "gateway gone"]
PROMPT_TOKENS = 40
MAX_TOKENS = 60
REACHED_S = 60.0
TARGET = "target"
_SEEDS = itertools.count(1)
"""Another prompt with each: nothing of it is cached."""


@dataclass
class Client:
    """One request on a channel of its own. `expected`: what it gets if nothing cuts it off."""

    request: inference_pb2.GenerateRequest
    expected: list[int]
    running: "asyncio.Task[StreamRecord]"
    connection: asyncio.StreamWriter | None = None
    """Of one that will vanish: without a word, as a machine does that loses its power."""


@dataclass
class Scene:
    """A stack, the request that is to end, and others that stand in its way and must not notice."""

    stack: HeldStack
    ending: Ending
    channels: AsyncExitStack
    others: list[Client] = field(default_factory=list)

    async def ask(self, *, max_tokens: int = MAX_TOKENS, lane: str = "", deadline_ms: int = 0) -> Client:
        """`deadline_ms` is the target's, and only it has a name."""
        seed = next(_SEEDS)
        prompt = [(seed * 31 + position) % 256 for position in range(PROMPT_TOKENS)]
        request_id = TARGET if deadline_ms else ""
        request = greedy_request(prompt, max_tokens=max_tokens, ignore_eos=True, lane=lane, request_id=request_id)
        request.options.sampling.seed = seed
        if deadline_ms and self.ending.startswith("deadline"):
            request.options.deadline_ms = deadline_ms
            request.options.partial_at_deadline = self.ending == "deadline, partial"
        expected = reference_tokens(tuple(prompt), SamplingParams(temperature=0.0, seed=seed), max_tokens, VOCAB_SIZE)
        if deadline_ms and self.ending == "client gone":
            return await self._ask_by_http(request, expected)
        channel, stub = open_stub(self.stack.grpc_address)
        await self.channels.enter_async_context(channel)
        return Client(request, expected, asyncio.create_task(stream(stub, request)))

    async def until(self, holds: Callable[[], bool], what: str, timeout_s: float = REACHED_S) -> None:
        await asyncio.to_thread(wait_for, holds, what, timeout_s)

    async def _ask_by_http(self, request: inference_pb2.GenerateRequest, expected: list[int]) -> Client:
        options = request.options
        fields = {"temperature": 0, "seed": options.sampling.seed, "ignore_eos": True, "stream": True}
        body = {"prompt": list(request.token_ids.ids), "max_tokens": options.stop_conditions.max_tokens, **fields}
        if options.lane:
            body["lane"] = options.lane
        content = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.stack.http_port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: weir\r\nContent-Length: %d\r\n\r\n" % len(content))
        writer.write(content)
        await writer.drain()
        return Client(request, expected, asyncio.create_task(_read_to_end(reader)), writer)

    async def until_held(self, role: str, order: Order) -> None:
        await self.until(lambda: self.stack.gates[role].holds(order), f"{role} stands still by {order}")

    async def until_metric(self, role: str, name: str, value: float) -> None:
        await self.until(lambda: self.stack.has_metric(role, name, value), f"{name} of {role} is {value:g}")


async def _read_to_end(reader: asyncio.StreamReader) -> StreamRecord:
    return StreamRecord(text=(await reader.read()).decode())
