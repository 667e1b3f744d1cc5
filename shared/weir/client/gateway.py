"""The clients of one gateway: `WeirClient` blocks, `AsyncWeirClient` awaits. Both send and return the same."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

import grpc
import grpc.aio

from weir.client.chats import Tools, Turn, chat_request
from weir.client.messages import (
    Chunk,
    ModelInfo,
    ProcessDescription,
    cancel_request,
    generate_request,
    tokenize_request,
    with_deadline,
)
from weir.client.resumption import Resumption
from weir.core.credentials import key_metadata
from weir.core.options import GenerateOptions
from weir.rpc.channel import CHANNEL_OPTIONS
from weir.rpc.errors import from_rpc_error
from weir.rpc.tls.public import make_public_channel, public_target
from weir.wire.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

DEFAULT_TIMEOUT_S = 600.0
_UNARY_TIMEOUT_S = 30.0
_ResponseT = TypeVar("_ResponseT")


class WeirClient:
    """Talks to the gateway at HOST:PORT. Leaving the context closes it. May be used from several threads.

    `timeout_s` is the deadline of a generation, at which `GenerateOptions.partial_at_deadline` takes what there is;
    `api_key` names the caller. Every method raises an error of `weir.core.errors`. Closing the iterator of an answer
    early cancels its request.

    A generation with an `idempotency_key` goes on by itself when its stream breaks, within its deadline. Of several
    gateways any will do: `ipv4:HOST:PORT,HOST:PORT` as the address.

    TLS: `ca` is a file with the authorities that are trusted; https://HOST:PORT without it takes those of gRPC.
    Raises CertificateError for a file that cannot be used.
    """

    def __init__(self, address: str, *, timeout_s: float = DEFAULT_TIMEOUT_S, api_key: str = "", ca: str = "") -> None:
        self._timeout_s = timeout_s
        self._metadata = key_metadata(api_key)
        target, credentials = public_target(address, ca)
        self._channel = (
            grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
            if credentials is None
            else grpc.secure_channel(target, credentials, options=CHANNEL_OPTIONS)
        )
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._admin = admin_pb2_grpc.AdminStub(self._channel)

    def generate(self, prompt: str | Sequence[int], options: GenerateOptions | None = None) -> Iterator[Chunk]:
        """Continues a text, or token ids."""
        going = Resumption(*with_deadline(options or GenerateOptions(), self._timeout_s))

        def call() -> Any:
            request = generate_request(prompt, going.options)
            return self._stub.Generate(request, timeout=going.left_s, metadata=self._metadata)

        return _chunks(call(), call, going)

    def chat(
        self,
        turns: Sequence[Turn],
        options: GenerateOptions | None = None,
        *,
        tools: Tools | None = None,
        max_reasoning_tokens: int | None = None,
    ) -> Iterator[Chunk]:
        """Answers a conversation, in which the model may call `tools`; at `max_reasoning_tokens` tokens of reasoning it
        must come to its answer, and with 0 it does not reason."""
        going = Resumption(*with_deadline(options or GenerateOptions(), self._timeout_s))

        def call() -> Any:
            request = chat_request(turns, going.options, tools, max_reasoning_tokens)
            return self._stub.Chat(request, timeout=going.left_s, metadata=self._metadata)

        return _chunks(call(), call, going)

    def cancel(self, request_id: str) -> bool:
        """False when no such request is running."""
        return self._ask(self._stub.Cancel, cancel_request(request_id)).found

    def tokenize(self, text: str, *, model: str = "") -> list[int]:
        return list(self._ask(self._stub.Tokenize, tokenize_request(text, model)).token_ids)

    def list_models(self) -> list[ModelInfo]:
        """The models served now."""
        response = self._ask(self._stub.ListModels, inference_pb2.ListModelsRequest())
        return [ModelInfo.from_pb(model) for model in response.models]

    def describe(self) -> ProcessDescription:
        """Metrics and integrity of the gateway; for operators: `api_key` is one of theirs, where keys are in force."""
        return ProcessDescription.from_pb(self._ask(self._admin.Describe, admin_pb2.DescribeRequest()))

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> "WeirClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, method: Callable[..., _ResponseT], request: object) -> _ResponseT:
        try:
            return method(request, timeout=_UNARY_TIMEOUT_S, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error


class AsyncWeirClient:
    """As `WeirClient`, for one event loop."""

    def __init__(self, address: str, *, timeout_s: float = DEFAULT_TIMEOUT_S, api_key: str = "", ca: str = "") -> None:
        self._timeout_s = timeout_s
        self._metadata = key_metadata(api_key)
        self._channel = make_public_channel(address, ca)
        self._stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(self._channel)
        self._admin: admin_pb2_grpc.AdminAsyncStub = admin_pb2_grpc.AdminStub(self._channel)

    def generate(self, prompt: str | Sequence[int], options: GenerateOptions | None = None) -> AsyncIterator[Chunk]:
        going = Resumption(*with_deadline(options or GenerateOptions(), self._timeout_s))

        def call() -> Any:
            request = generate_request(prompt, going.options)
            return self._stub.Generate(request, timeout=going.left_s, metadata=self._metadata)

        return _async_chunks(call(), call, going)

    def chat(
        self,
        turns: Sequence[Turn],
        options: GenerateOptions | None = None,
        *,
        tools: Tools | None = None,
        max_reasoning_tokens: int | None = None,
    ) -> AsyncIterator[Chunk]:
        going = Resumption(*with_deadline(options or GenerateOptions(), self._timeout_s))

        def call() -> Any:
            request = chat_request(turns, going.options, tools, max_reasoning_tokens)
            return self._stub.Chat(request, timeout=going.left_s, metadata=self._metadata)

        return _async_chunks(call(), call, going)

    async def cancel(self, request_id: str) -> bool:
        """False when no such request is running."""
        return (await self._ask(self._stub.Cancel, cancel_request(request_id))).found

    async def tokenize(self, text: str, *, model: str = "") -> list[int]:
        return list((await self._ask(self._stub.Tokenize, tokenize_request(text, model))).token_ids)

    async def list_models(self) -> list[ModelInfo]:
        response = await self._ask(self._stub.ListModels, inference_pb2.ListModelsRequest())
        return [ModelInfo.from_pb(model) for model in response.models]

    async def describe(self) -> ProcessDescription:
        return ProcessDescription.from_pb(await self._ask(self._admin.Describe, admin_pb2.DescribeRequest()))

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> "AsyncWeirClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _ask(self, method: Callable[..., Awaitable[_ResponseT]], request: object) -> _ResponseT:
        try:
            return await method(request, timeout=_UNARY_TIMEOUT_S, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error


def _chunks(call: Any, call_again: Callable[[], Any], going: Resumption) -> Iterator[Chunk]:
    while True:
        try:
            for response in call:
                chunk = Chunk.from_pb(response)
                going.had(chunk)
                yield chunk
            return
        except grpc.RpcError as error:
            failure = from_rpc_error(error)
            pause_s = going.try_pause_s(failure)
            if pause_s is None:
                raise failure from error
        finally:
            call.cancel()
        time.sleep(pause_s)
        call = call_again()


async def _async_chunks(call: Any, call_again: Callable[[], Any], going: Resumption) -> AsyncIterator[Chunk]:
    while True:
        try:
            async for response in call:
                chunk = Chunk.from_pb(response)
                going.had(chunk)
                yield chunk
            return
        except grpc.aio.AioRpcError as error:
            failure = from_rpc_error(error)
            pause_s = going.try_pause_s(failure)
            if pause_s is None:
                raise failure from error
        finally:
            call.cancel()
        await asyncio.sleep(pause_s)
        call = call_again()
