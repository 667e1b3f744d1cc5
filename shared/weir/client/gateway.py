"""The clients of one gateway: `WeirClient` blocks, `AsyncWeirClient` awaits. Both send and return the same."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

import grpc
import grpc.aio

from weir.client.messages import (
    Chunk,
    ModelInfo,
    ProcessDescription,
    Turn,
    cancel_request,
    chat_request,
    generate_request,
    key_metadata,
    tokenize_request,
    with_deadline,
)
from weir.core.options import GenerateOptions
from weir.rpc.channel import MAX_MESSAGE_BYTES, make_channel
from weir.rpc.errors import from_rpc_error
from weir.wire.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

DEFAULT_TIMEOUT_S = 600.0
_UNARY_TIMEOUT_S = 30.0
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
]
_ResponseT = TypeVar("_ResponseT")


class WeirClient:
    """Talks to the gateway at HOST:PORT. Leaving the context closes it. May be used from several threads.

    `timeout_s` is the deadline of a generation, at which `GenerateOptions.partial_at_deadline` takes what there is;
    `api_key` names the caller. Every method raises an error of `weir.core.errors`. Closing the iterator of an answer
    early cancels its request.
    """

    def __init__(self, address: str, *, timeout_s: float = DEFAULT_TIMEOUT_S, api_key: str = "") -> None:
        self._timeout_s = timeout_s
        self._metadata = key_metadata(api_key)
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._admin = admin_pb2_grpc.AdminStub(self._channel)

    def generate(self, prompt: str | Sequence[int], options: GenerateOptions | None = None) -> Iterator[Chunk]:
        """Continues a text, or token ids."""
        options, timeout_s = with_deadline(options or GenerateOptions(), self._timeout_s)
        request = generate_request(prompt, options)
        return _chunks(self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata))

    def chat(self, turns: Sequence[Turn], options: GenerateOptions | None = None) -> Iterator[Chunk]:
        """Answers a conversation."""
        options, timeout_s = with_deadline(options or GenerateOptions(), self._timeout_s)
        request = chat_request(turns, options)
        return _chunks(self._stub.Chat(request, timeout=timeout_s, metadata=self._metadata))

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
        """Metrics and integrity of the gateway."""
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

    def __init__(self, address: str, *, timeout_s: float = DEFAULT_TIMEOUT_S, api_key: str = "") -> None:
        self._timeout_s = timeout_s
        self._metadata = key_metadata(api_key)
        self._channel = make_channel(address)
        self._stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(self._channel)
        self._admin: admin_pb2_grpc.AdminAsyncStub = admin_pb2_grpc.AdminStub(self._channel)

    def generate(self, prompt: str | Sequence[int], options: GenerateOptions | None = None) -> AsyncIterator[Chunk]:
        options, timeout_s = with_deadline(options or GenerateOptions(), self._timeout_s)
        request = generate_request(prompt, options)
        return _async_chunks(self._stub.Generate(request, timeout=timeout_s, metadata=self._metadata))

    def chat(self, turns: Sequence[Turn], options: GenerateOptions | None = None) -> AsyncIterator[Chunk]:
        options, timeout_s = with_deadline(options or GenerateOptions(), self._timeout_s)
        request = chat_request(turns, options)
        return _async_chunks(self._stub.Chat(request, timeout=timeout_s, metadata=self._metadata))

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


def _chunks(call: Any) -> Iterator[Chunk]:
    try:
        for response in call:
            yield Chunk.from_pb(response)
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
    finally:
        call.cancel()


async def _async_chunks(call: "grpc.aio.UnaryStreamCall[Any, Any]") -> AsyncIterator[Chunk]:
    try:
        async for response in call:
            yield Chunk.from_pb(response)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    finally:
        call.cancel()
