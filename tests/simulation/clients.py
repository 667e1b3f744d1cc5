"""Clients over the gateways' gRPC port, and promise P2 at each of their messages."""

import asyncio
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from tests.simulation.grpc_client import SimChannel
from tests.simulation.loop import PROCESS
from tests.unit.gateway.fake_model import EOS, VOCAB_SIZE
from weir.core.sampling import SamplingParams
from weir.rpc.conversions import sampling_to_pb
from weir.wire.v1 import inference_pb2, inference_pb2_grpc, types_pb2

if TYPE_CHECKING:
    from tests.simulation.world import World

_POSITION_FACTOR = 1_000_003
_HONEST = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)
"""What a request may fail with once something went wrong, whatever it is."""
_MAX_TRIES = 12


class BrokenPromise(Exception):
    """What the world is there to find. The message says which promise, of what."""


@dataclass(frozen=True)
class RequestSpec:
    """One request of a client. `key`: it is sent again, from where it was, when its stream breaks."""

    name: str
    prompt: tuple[int, ...]
    seed: int
    max_tokens: int
    lane: str
    starts_at_s: float
    gateway: int
    key: str = ""
    cancels_after: int | None = None
    """Tokens after which the client goes away."""
    reads_slowly_s: float = 0.0
    """Before each read."""
    deadline_s: float | None = None
    is_probe: bool = False
    """Sent once, when all is well again: it must finish."""


@dataclass
class Outcome:
    spec: RequestSpec
    tokens: list[int] = field(default_factory=list)
    end: str = ""
    """FINISHED, the code of its failure, or LEFT."""
    num_calls: int = 0


def draw_specs(
    rng: random.Random,
    num_requests: int,
    span_s: float,
    num_gateways: int,
    mix: frozenset[str],
    *,
    max_context: int,
    begin_long: bool = False,
) -> list[RequestSpec]:
    """Prompts share prefixes, so that pages are. `begin_long`: enough of them to cross between hosts, and answers are
    long enough to go on at another one."""
    texts = [tuple(rng.randrange(EOS) for _ in range(190)) for _ in range(4 if begin_long else 3)]
    lengths = (4, 17, 40, 60, 90) if begin_long else (1, 4, 9, 17, 24, 40)
    beginnings = (17, 140, 150, 165, 165, 180) if begin_long else (3, 16, 17, 33, 64, 100)
    specs = []
    for index in range(num_requests):
        text = rng.choice(texts)
        prompt = (
            *text[: rng.choice(beginnings)],
            *(rng.randrange(EOS) for _ in range(rng.randrange(1, 24))),
        )
        is_kept = rng.random() < 0.5
        specs.append(
            RequestSpec(
                name=f"request-{index}",
                prompt=prompt,
                seed=rng.randrange(1 << 32),
                max_tokens=min(rng.choice(lengths), max_context - len(prompt)),
                lane=rng.choice(("interactive", "standard")),
                starts_at_s=rng.random() * span_s,
                gateway=rng.randrange(num_gateways),
                key=f"key-{index}" if is_kept else "",
                cancels_after=rng.randrange(6) if "client leaves" in mix and rng.random() < 0.25 else None,
                reads_slowly_s=0.2 if "client reads slowly" in mix and rng.random() < 0.2 else 0.0,
                deadline_s=rng.uniform(0.05, 3.0) if "deadline" in mix and rng.random() < 0.2 else None,
            )
        )
    return specs


def expected_tokens(prompt: Sequence[int], seed: int) -> Iterator[int]:
    """As `weir.testing.runner.reference_tokens` for temperature 0, one at a time."""
    crc, position = 0, 0

    def write(token: int) -> None:
        nonlocal crc, position
        crc = zlib.crc32(((position + 1) * _POSITION_FACTOR + token).to_bytes(8, "little"), crc)
        position += 1

    for token in prompt:
        write(token)
    index = 0
    while True:
        token = (crc ^ (seed * 31 + index)) % VOCAB_SIZE
        yield token
        write(token)
        index += 1


def expected_output(spec: RequestSpec) -> list[int]:
    """Up to the end token or `max_tokens`."""
    tokens: list[int] = []
    for token in expected_tokens(spec.prompt, spec.seed):
        tokens.append(token)
        if token == EOS or len(tokens) == spec.max_tokens:
            return tokens
    raise AssertionError("never")


class Client:
    """Sends one request until it has ended, as `weir.client` does."""

    def __init__(self, world: "World", spec: RequestSpec) -> None:
        self._world = world
        self.outcome = Outcome(spec)
        self._expected = expected_output(spec)

    async def run(self) -> None:
        spec, outcome = self.outcome.spec, self.outcome
        try:
            while not outcome.end:
                outcome.num_calls += 1
                error = await self._call()
                if error is not None:
                    await self._consider(error)
        finally:
            self._world.note(f"{spec.name}: {outcome.end or 'cut off'} with {len(outcome.tokens)} tokens")

    async def _consider(self, error: grpc.aio.AioRpcError) -> None:
        spec, outcome, code = self.outcome.spec, self.outcome, error.code()
        is_honest = code in _HONEST and self._world.may_fail
        is_late = code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
        seemed_silent = bool(spec.reads_slowly_s) or PROCESS.get() in self._world.network.unreached
        allowed = is_honest or (is_late and (spec.deadline_s is not None or seemed_silent))
        if not allowed:
            raise BrokenPromise(f"{spec.name} failed with {code.name}: {error.details()}")
        if spec.is_probe:
            raise BrokenPromise(f"liveness: {spec.name} failed when all was well: {code.name} {error.details()}")
        may_again = spec.key and is_honest and outcome.num_calls < _MAX_TRIES
        if not may_again:
            outcome.end = code.name
            return
        self._world.note(f"{spec.name}: {code.name} ({error.details()}); again from {len(outcome.tokens)}")
        await asyncio.sleep(min(2.0, 0.1 * 2**outcome.num_calls))

    async def _call(self) -> grpc.aio.AioRpcError | None:
        world, spec = self._world, self.outcome.spec
        address = world.gateway_address(spec.gateway + self.outcome.num_calls - 1)
        async with SimChannel(world.network, address) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[call-overload]
            stream = stub.Generate(self._request(), timeout=spec.deadline_s)
            try:
                await self._read_all(stream)
            except grpc.aio.AioRpcError as error:
                return error
        return None

    async def _read_all(self, stream: Any) -> None:
        spec, outcome = self.outcome.spec, self.outcome
        is_over = False
        while True:
            if spec.reads_slowly_s:
                await asyncio.sleep(spec.reads_slowly_s)
            response = await stream.read()
            if response is grpc.aio.EOF:
                break
            if is_over:
                raise BrokenPromise(f"P2: {spec.name} got a message after its end")
            self._take(response)
            if response.finish_reason:
                is_over = True
                self._check_whole(response.finish_reason)
            elif spec.cancels_after is not None and len(outcome.tokens) >= spec.cancels_after:
                outcome.end = "LEFT"
                stream.cancel()
                return
        if not is_over:
            raise BrokenPromise(f"P2: the stream of {spec.name} ended without an end")
        outcome.end = "FINISHED"

    def _take(self, response: Any) -> None:
        spec, tokens = self.outcome.spec, self.outcome.tokens
        if response.token_ids and response.first_index != len(tokens):
            raise BrokenPromise(f"P2: {spec.name} got token {response.first_index} when {len(tokens)} was next")
        tokens.extend(response.token_ids)
        if tokens != self._expected[: len(tokens)]:
            wrong = next(i for i, token in enumerate(tokens) if self._expected[i : i + 1] != [token])
            raise BrokenPromise(f"P1: {spec.name} got another token {wrong} than it has when nothing goes wrong")

    def _check_whole(self, reason: types_pb2.FinishReason.ValueType) -> None:
        spec = self.outcome.spec
        if self.outcome.tokens != self._expected:
            raise BrokenPromise(
                f"P2: {spec.name} ended ({types_pb2.FinishReason.Name(reason)}) with {len(self.outcome.tokens)} of "
                f"{len(self._expected)} tokens"
            )

    def _request(self) -> inference_pb2.GenerateRequest:
        spec, outcome = self.outcome.spec, self.outcome
        options = inference_pb2.RequestOptions(
            model="bytes",
            lane=spec.lane,
            sampling=sampling_to_pb(SamplingParams(temperature=0.0, seed=spec.seed)),
            stop_conditions=inference_pb2.StopConditions(max_tokens=spec.max_tokens),
            idempotency_key=spec.key,
        )
        if spec.key and outcome.num_calls > 1:
            options.resume_from = len(outcome.tokens)
        return inference_pb2.GenerateRequest(options=options, token_ids=inference_pb2.TokenIds(ids=spec.prompt))
