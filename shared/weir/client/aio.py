"""The client for asyncio."""

from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any

import grpc
import grpc.aio

from weir.client.messages import (
    Chunk,
    ModelInfo,
    ProcessDescription,
    Turn,
    chat_request,
    generate_request,
    key_metadata,
)
from weir.core.options import GenerateOptions
from weir.rpc.channel import make_channel
from weir.rpc.errors import from_rpc_error
from weir.wire.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

DEFAULT_TIMEOUT_S = 600.0
_UNARY_TIMEOUT_S = 30.0


class AsyncWeirClient:
    """Talks to one gateway at HOST:PORT. Leaving the context closes it.

    `timeout_s` is the deadline of a generation, `api_key` says who asks.
    Every method raises an error of `weir.core.errors`. Leaving a stream early cancels its request.
    """

    def __init__(self, address: str, *, timeout_s: float = DEFAULT_TIMEOUT_S, api_key: str = "") -> None:
        self._timeout_s = timeout_s
        self._metadata = key_metadata(api_key)
        self._channel = make_channel(address)
        self._stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(self._channel)
        self._admin: admin_pb2_grpc.AdminAsyncStub = admin_pb2_grpc.AdminStub(self._channel)

    def generate(self, prompt: str | Sequence[int], options: GenerateOptions | None = None) -> AsyncIterator[Chunk]:
        """Continues a prompt."""
        request = generate_request(prompt, options or GenerateOptions())
        return _chunks(
            self._stub.Generate(
                request,
                timeout=self._timeout_s,
                metadata=self._metadata,
            )
        )

    def chat(self, turns: Sequence[Turn], options: GenerateOptions | None = None) -> AsyncIterator[Chunk]:
        """Answers a conversation."""
        request = chat_request(turns, options or GenerateOptions())
        return _chunks(
            self._stub.Chat(
                request,
                timeout=self._timeout_s,
                metadata=self._metadata,
            )
        )

    async def cancel(self, request_id: str) -> bool:
        """False when no such request is running."""
        try:
            request = inference_pb2.CancelRequest(request_id=request_id)
            response = await self._stub.Cancel(
                request,
                timeout=_UNARY_TIMEOUT_S,
                metadata=self._metadata,
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return response.found

    async def tokenize(self, text: str, *, model: str = "") -> list[int]:
        """Token ids of a text."""
        try:
            request = inference_pb2.TokenizeRequest(model=model, text=text)
            response = await self._stub.Tokenize(
                request,
                timeout=_UNARY_TIMEOUT_S,
                metadata=self._metadata,
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return list(response.token_ids)

    async def list_models(self) -> list[ModelInfo]:
        """The models served now."""
        try:
            response = await self._stub.ListModels(
                inference_pb2.ListModelsRequest(), timeout=_UNARY_TIMEOUT_S, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return [ModelInfo.from_pb(model) for model in response.models]

    async def describe(self) -> ProcessDescription:
        """Counters and integrity of the gateway."""
        try:
            response = await self._admin.Describe(
                admin_pb2.DescribeRequest(), timeout=_UNARY_TIMEOUT_S, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return ProcessDescription.from_pb(response)

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> "AsyncWeirClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def _chunks(call: "grpc.aio.UnaryStreamCall[Any, Any]") -> AsyncIterator[Chunk]:
    try:
        async for response in call:
            yield Chunk.from_pb(response)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    finally:
        call.cancel()
