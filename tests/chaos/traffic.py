"""Streams of many kinds, each compared with what it was before anything was disturbed."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from weir.testing.load import StreamRecord, greedy_request, open_stub, stream
from weir.wire.v1 import inference_pb2, inference_pb2_grpc

STREAM_TIMEOUT_S = 240.0


def make_requests(seed: int, num_requests: int) -> list[inference_pb2.GenerateRequest]:
    """Greedy and seeded ones; some with stop texts, penalties, log-probabilities, long prompts."""
    source = random.Random(seed)
    requests = []
    for index in range(num_requests):
        num_prompt_tokens = source.choice([5, 40, 120, 600])
        prompt = [source.randrange(100, 40_000) for _ in range(num_prompt_tokens)]
        request = greedy_request(prompt, max_tokens=source.choice([20, 60, 150]), ignore_eos=index % 3 > 0)
        sampling = request.options.sampling
        if index % 2:
            sampling.temperature, sampling.seed, sampling.top_p = 0.9, index, 0.95
        if index % 4 == 1:
            sampling.presence_penalty, sampling.repetition_penalty = 0.6, 1.2
        if index % 5 == 2:
            request.options.stop_conditions.stop.append(" the")
        if index % 6 == 3:
            sampling.logprobs = 3
        requests.append(request)
    return requests


@dataclass
class Tally:
    """`wrong` says what was wrong, a line a stream."""

    num_streams: int = 0
    num_tokens: int = 0
    num_cancelled: int = 0
    wrong: list[str] = field(default_factory=list)
    pauses_s: list[float] = field(default_factory=list)
    """The longest of each stream."""


class Traffic:
    """`num_clients` clients, each with one stream after another, until `stop`."""

    def __init__(self, address: str, requests: list[inference_pb2.GenerateRequest], seed: int) -> None:
        self._address = address
        self._requests = requests
        self._source = random.Random(seed)
        self._expected: list[StreamRecord] = []
        self._is_stopping = False
        self.tally = Tally()

    async def learn(self) -> None:
        """What each request answers while nothing is disturbed. Raises AssertionError if one fails."""
        channel, stub = open_stub(self._address)
        async with channel:
            for first in range(0, len(self._requests), 8):
                batch = self._requests[first : first + 8]
                self._expected += await asyncio.gather(*(stream(stub, request) for request in batch))
        failed = [record for record in self._expected if record.code is not grpc.StatusCode.OK]
        assert failed == []

    async def run(self, num_clients: int) -> None:
        channel, stub = open_stub(self._address)
        async with channel:
            await asyncio.gather(*(self._client(stub) for _ in range(num_clients)))

    def stop(self) -> None:
        """Streams that run run to their ends."""
        self._is_stopping = True

    async def _client(self, stub: "inference_pb2_grpc.InferenceAsyncStub") -> None:
        while not self._is_stopping:
            index = self._source.randrange(len(self._requests))
            num_expected = len(self._expected[index].token_ids)
            is_cancelled = self._source.random() < 0.1 and num_expected > 4
            after = self._source.randrange(1, num_expected - 1) if is_cancelled else None
            record = await stream(stub, self._requests[index], cancel_after_tokens=after, timeout_s=STREAM_TIMEOUT_S)
            self._judge(index, record, is_cancelled=is_cancelled)

    def _judge(self, index: int, record: StreamRecord, *, is_cancelled: bool) -> None:
        tally, expected = self.tally, self._expected[index]
        tally.num_streams += 1
        tally.num_tokens += len(record.token_ids)
        tally.pauses_s.append(record.max_pause_s)
        problem = _try_find_problem(record, expected, is_cancelled=is_cancelled)
        if problem is not None:
            tally.wrong.append(f"request {index}: {problem}")
        elif is_cancelled:
            tally.num_cancelled += 1


def _try_find_problem(record: StreamRecord, expected: StreamRecord, *, is_cancelled: bool) -> str | None:
    """None: the stream is what it was undisturbed, or the beginning of that where its client cancelled it."""
    num_tokens = len(record.token_ids)
    checks: list[tuple[Callable[[], bool], str]] = [
        (lambda: record.num_terminal_events == 1, f"{record.num_terminal_events} terminal events"),
        (lambda: record.num_index_errors == 0, f"{record.num_index_errors} gaps or repeats"),
        (
            lambda: record.token_ids == expected.token_ids[:num_tokens],
            f"tokens {record.token_ids[-8:]} end a wrong beginning of {num_tokens}",
        ),
        (lambda: record.logprobs == expected.logprobs[: len(record.logprobs)], "other log-probabilities"),
    ]
    if is_cancelled and record.code is grpc.StatusCode.CANCELLED:
        checks.append((lambda: expected.text.startswith(record.text), f"text {record.text[-40:]!r}"))
    else:
        checks += [
            (lambda: record.code is grpc.StatusCode.OK, f"{record.code.name} {record.details}"),
            (lambda: num_tokens == len(expected.token_ids), f"{num_tokens} of {len(expected.token_ids)} tokens"),
            (lambda: record.text == expected.text, f"text {record.text[-40:]!r}"),
            (lambda: record.finish_reasons == expected.finish_reasons, f"ends {record.finish_reasons}"),
        ]
    return next((problem for holds, problem in checks if not holds()), None)
