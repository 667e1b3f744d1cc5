"""Streams of many kinds, each compared with what it was before anything was disturbed."""

import asyncio
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import grpc
from tests.chaos.driver.client import Answer, Ask, Break, ask
from tests.chaos.driver.requests import try_find_problem

from weir.rpc.channel import make_channel
from weir.testing.load import StreamRecord, stream
from weir.wire.v1 import inference_pb2, inference_pb2_grpc

STREAM_TIMEOUT_S = 240.0
_LEARN_AT_ONCE = 16
_KEYED_SHARE = 0.7
_CANCELLED_SHARE = 0.1


@dataclass
class Tally:
    """`wrong`: what was wrong, a line a stream; `lost`: those that broke though their gateway had been left alone."""

    num_streams: int = 0
    num_tokens: int = 0
    num_cancelled: int = 0
    num_resumed: int = 0
    """Broken by their gateway, and sent again under their key from where they were."""
    num_ended_with_gateway: int = 0
    """Without a key: they ended once, with UNAVAILABLE, and were sent anew as another stream."""
    refusals: "Counter[str]" = field(default_factory=Counter)
    """Calls that were refused before their first token, and sent again, by reason."""
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    pauses_s: list[float] = field(default_factory=list)
    """The longest of each stream."""


class Traffic:
    """`num_clients` clients, each with one stream after another, until `stop`.

    `was_disturbed`: whether a gateway, by its number, had a fault since then.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        requests: list[inference_pb2.GenerateRequest],
        seed: int,
        was_disturbed: Callable[[int, float], bool],
    ) -> None:
        self._addresses = addresses
        self._requests = requests
        self._source = random.Random(seed)
        self._was_disturbed = was_disturbed
        self._expected: list[StreamRecord] = []
        self._num_asked = 0
        self._is_stopping = False
        self.tally = Tally()

    async def learn(self) -> None:
        """What each request answers while nothing is disturbed. Raises AssertionError if one fails."""
        async with AsyncExitStack() as channels:
            stub = (await self._open_stubs(channels))[0]
            for first in range(0, len(self._requests), _LEARN_AT_ONCE):
                batch = self._requests[first : first + _LEARN_AT_ONCE]
                self._expected += await asyncio.gather(*(stream(stub, request) for request in batch))
        failed = [record for record in self._expected if record.code is not grpc.StatusCode.OK]
        assert failed == []

    async def run(self, num_clients: int) -> None:
        """May be called again when it is over."""
        self._is_stopping = False
        async with AsyncExitStack() as channels:
            stubs = await self._open_stubs(channels)
            await asyncio.gather(*(self._client(stubs) for _ in range(num_clients)))

    def stop(self) -> None:
        """Streams that run run to their ends."""
        self._is_stopping = True

    async def _open_stubs(self, channels: AsyncExitStack) -> "list[inference_pb2_grpc.InferenceAsyncStub]":
        stubs: list[inference_pb2_grpc.InferenceAsyncStub] = []
        for address in self._addresses:
            channel = await channels.enter_async_context(make_channel(address))
            stubs.append(inference_pb2_grpc.InferenceStub(channel))
        return stubs

    async def _client(self, stubs: "Sequence[inference_pb2_grpc.InferenceAsyncStub]") -> None:
        source = self._source
        while not self._is_stopping:
            self._num_asked += 1
            index = source.randrange(len(self._requests))
            num_expected = len(self._expected[index].token_ids)
            is_leaving = source.random() < _CANCELLED_SHARE and num_expected > 4
            what = Ask(
                self._requests[index],
                key=f"chaos-{self._num_asked}" if source.random() < _KEYED_SHARE else "",
                first_gateway=source.randrange(len(stubs)),
                cancel_after=source.randrange(1, num_expected - 1) if is_leaving else None,
                timeout_s=STREAM_TIMEOUT_S,
            )
            self._judge(index, what, await ask(stubs, what))

    def _judge(self, index: int, what: Ask, answer: Answer) -> None:
        tally, record, expected = self.tally, answer.record, self._expected[index]
        tally.num_streams += 1
        tally.num_tokens += len(record.token_ids)
        tally.pauses_s.append(record.max_pause_s)
        name = f"request {index}{' with a key' if what.key else ''}"
        for broken in answer.breaks:
            if broken.num_tokens == 0:
                tally.refusals[_without_numbers(broken.reason)] += 1
            elif not self._was_disturbed(broken.gateway, broken.began_s):
                tally.lost.append(f"{name}: {broken.reason} by gateway {broken.gateway} which had no fault")
        has_ended_early = not what.key and _num_broken(answer.breaks) > 0
        is_part = answer.is_cancelled or has_ended_early
        problem = try_find_problem(record, expected, is_part=is_part)
        if problem is not None:
            before = "; ".join(f"broke at gateway {one.gateway}: {one.reason}" for one in answer.breaks)
            tally.wrong.append(f"{name}: {problem} ({before or 'never broken'})")
        tally.num_cancelled += answer.is_cancelled
        tally.num_ended_with_gateway += has_ended_early
        tally.num_resumed += bool(what.key) and _num_broken(answer.breaks) > 0


def _num_broken(breaks: Sequence[Break]) -> int:
    return sum(one.num_tokens > 0 for one in breaks)


def _without_numbers(reason: str) -> str:
    return re.sub(r"\d[\d.:-]*", "N", reason)[:160]
