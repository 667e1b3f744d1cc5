"""Workers that do what a test wants, over real gRPC streams."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
import grpc.aio

from weir.rpc.server import make_server
from weir.wire.v1 import types_pb2, worker_pb2

Finish: TypeAlias = "types_pb2.FinishReason.ValueType"
GOING_ON = types_pb2.FINISH_REASON_UNSPECIFIED
STOP, LENGTH = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH
CANCELLED = types_pb2.FINISH_REASON_CANCELLED
NUM_CACHED_TOKENS = 3
"""Of every prompt, as the prefill worker reports."""


class FakeWorker:
    """Answers Hello, keeps every command, hands it to `on_command`, and sends what a test gives it.

    Cancels are answered while `confirms_cancels`. A command of the kind `ends_streams_on` ends every stream.
    """

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.commands: list[worker_pb2.ServeRequest] = []
        self.on_command: Callable[[worker_pb2.ServeRequest], None] = lambda command: None
        self.num_streams = 0
        self.refuses_streams = False
        self.confirms_cancels = True
        self.port = 0
        self.ends_streams_on: str = ""
        self._outboxes: list[asyncio.Queue[worker_pb2.ServeResponse | bytes | None]] = []
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """On the port that it had before, if it ran before."""
        self._server = make_server()
        handler = grpc.stream_stream_rpc_method_handler(self.Serve, worker_pb2.ServeRequest.FromString, _serialize)
        handlers = grpc.method_handlers_generic_handler("weir.v1.Worker", {"Serve": handler})
        self._server.add_generic_rpc_handlers((handlers,))
        self.port = self._server.add_insecure_port(self.address)
        await self._server.start()

    async def stop(self) -> None:
        """As kill -9: streams break, the port is closed."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def break_streams(self) -> None:
        for outbox in self._outboxes:
            outbox.put_nowait(None)

    def send(self, *updates: worker_pb2.SequenceUpdate) -> None:
        """On every stream; without one it is lost."""
        self.send_raw(worker_pb2.ServeResponse(step_frame=worker_pb2.StepFrame(step=1, updates=updates)))

    def send_garbage(self) -> None:
        """Bytes that are no message, in place of one."""
        for outbox in self._outboxes:
            outbox.put_nowait(b"\xff\xff\xff")

    def send_raw(self, response: worker_pb2.ServeResponse) -> None:
        for outbox in self._outboxes:
            outbox.put_nowait(response)

    def named(self, kind: str) -> list[Any]:
        """The commands of one kind, in order."""
        return [getattr(command, kind) for command in self.commands if command.HasField(kind)]  # type: ignore[arg-type]

    async def Serve(  # noqa: N802 - gRPC's name
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[worker_pb2.ServeResponse | bytes]:
        if self.refuses_streams:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        outbox: asyncio.Queue[worker_pb2.ServeResponse | bytes | None] = asyncio.Queue()
        self.num_streams += 1
        reading = asyncio.create_task(self._read(request_iterator))
        self._outboxes.append(outbox)
        try:
            yield worker_pb2.ServeResponse(welcome=worker_pb2.Welcome(worker_id=self.worker_id))
            while (response := await outbox.get()) is not None:
                yield response
        finally:
            reading.cancel()
            self._outboxes.remove(outbox)

    async def _read(self, request_iterator: Any) -> None:
        async for command in request_iterator:
            self.commands.append(command)
            self.on_command(command)
            if command.HasField("cancel") and self.confirms_cancels:
                cancel = command.cancel
                self.send(update(cancel.request_id, 0, finish=CANCELLED, dispatch=cancel.attempt.dispatch))
            if command.WhichOneof("command") == self.ends_streams_on:
                self.break_streams()


def _serialize(response: worker_pb2.ServeResponse | bytes) -> bytes:
    return response if isinstance(response, bytes) else response.SerializeToString()


def update(
    request_id: str,
    first_index: int,
    token_ids: Sequence[int] = (),
    *,
    finish: Finish = GOING_ON,
    handed_off: bool = False,
    dispatch: int = 1,
    logprobs: Sequence[types_pb2.TokenLogprobs] = (),
    prompt_logprobs: Sequence[types_pb2.TokenLogprobs] = (),
    first_prompt_index: int = 1,
) -> worker_pb2.SequenceUpdate:
    return worker_pb2.SequenceUpdate(
        request_id=request_id,
        attempt=types_pb2.Attempt(dispatch=dispatch),
        first_index=first_index,
        token_ids=token_ids,
        finish_reason=finish,
        handed_off=handed_off,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        first_prompt_index=first_prompt_index,
    )


def token_logprobs(token_id: int, num_top: int) -> types_pb2.TokenLogprobs:
    """As a worker sends them: of id i the logarithm -i / 64, and smaller ids are likelier."""
    top = list(range(num_top))
    return types_pb2.TokenLogprobs(
        token_id=token_id,
        logprob=-token_id / 64,
        rank=token_id + 1,
        top_token_ids=top,
        top_logprobs=[-other / 64 for other in top],
    )


def worker_error(request_id: str, reason: worker_pb2.WorkerErrorReason.ValueType) -> worker_pb2.SequenceUpdate:
    return worker_pb2.SequenceUpdate(
        request_id=request_id,
        attempt=types_pb2.Attempt(dispatch=1),
        error=worker_pb2.WorkerError(reason=reason, message="says the worker"),
    )


@dataclass
class FakePair:
    """A prefill and a decode worker that answer every request with `answer` (a text, as bytes), token by token.

    `stops_after`: tokens after which they fall silent, None: they go on to the end.
    """

    prefill: FakeWorker
    decode: FakeWorker
    answer: list[int] = field(default_factory=lambda: list(b"hello world"))
    stops_after: int | None = None
    answer_to: Callable[[worker_pb2.Start], list[int]] | None = None
    """Instead of `answer`, where answers differ."""
    num_cached_of: Callable[[worker_pb2.Start], int] = lambda _: NUM_CACHED_TOKENS
    """Tokens of its prompt."""
    starts: dict[str, worker_pb2.Start] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prefill.on_command = self._on_prefill_command
        self.decode.on_command = self._on_decode_command

    def tokens(self, start: worker_pb2.Start) -> tuple[list[int], Finish]:
        answer = self.answer if self.answer_to is None else self.answer_to(start)
        tokens = answer[: start.max_tokens]
        return tokens, LENGTH if len(tokens) == start.max_tokens else STOP

    def _on_prefill_command(self, command: worker_pb2.ServeRequest) -> None:
        if not command.HasField("start"):
            return
        start = command.start
        self.starts[start.request_id] = start
        first_index = len(start.output_token_ids)
        if self.stops_after is not None and self.stops_after <= first_index:
            return
        tokens, finish = self.tokens(start)
        if start.sampling.HasField("prompt_logprobs"):
            num_top = start.sampling.prompt_logprobs
            of_prompt = [token_logprobs(token_id, num_top) for token_id in start.prompt_token_ids[1:]]
            self.prefill.send(_update(start, 0, prompt_logprobs=of_prompt))
        assert list(start.output_token_ids) == tokens[:first_index]
        new = tokens[first_index : first_index + 1]
        first = _update(start, first_index, new, logprobs=_logprobs(start, new))
        first.num_cached_tokens = self.num_cached_of(start)
        if len(tokens) == first_index + 1:
            first.finish_reason = finish
            self.prefill.send(first)
            return
        self.prefill.send(first)
        self.prefill.send(_update(start, first_index + 1, handed_off=True))
        self._decode_from(start, first_index + 1)

    def _decode_from(self, start: worker_pb2.Start, first_index: int) -> None:
        tokens, finish = self.tokens(start)
        for index in range(first_index, len(tokens)):
            if self.stops_after is not None and index >= self.stops_after:
                return
            is_last = index == len(tokens) - 1
            new = tokens[index : index + 1]
            ending = finish if is_last else GOING_ON
            self.decode.send(_update(start, index, new, finish=ending, logprobs=_logprobs(start, new)))

    def _on_decode_command(self, command: worker_pb2.ServeRequest) -> None:
        if command.HasField("resume") and not command.resume.awaits_hand_off:
            self._decode_from(self.starts[command.resume.request_id], command.resume.next_index)


def _update(
    start: worker_pb2.Start, first_index: int, token_ids: Sequence[int] = (), **fields: Any
) -> worker_pb2.SequenceUpdate:
    return update(start.request_id, first_index, token_ids, dispatch=start.attempt.dispatch, **fields)


def _logprobs(start: worker_pb2.Start, token_ids: Sequence[int]) -> list[types_pb2.TokenLogprobs]:
    if not start.sampling.HasField("logprobs"):
        return []
    return [token_logprobs(token_id, start.sampling.logprobs) for token_id in token_ids]
