"""The client for programs without asyncio."""

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import grpc

from weir.client.aio import DEFAULT_TIMEOUT_S
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
from weir.rpc.channel import MAX_MESSAGE_BYTES
from weir.rpc.errors import from_rpc_error
from weir.wire.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

_UNARY_TIMEOUT_S = 30.0
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
]


class WeirClient:
    """As `AsyncWeirClient`, blocking. May be used from several threads."""

    def __init__(self, address: str, *, timeout_s: float = DEFAULT_TIMEOUT_S, api_key: str = "") -> None:
        self._timeout_s = timeout_s
        self._metadata = key_metadata(api_key)
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._admin = admin_pb2_grpc.AdminStub(self._channel)

    def generate(self, prompt: str | Sequence[int], options: GenerateOptions | None = None) -> Iterator[Chunk]:
        """Continues a prompt. Closing the iterator cancels the request."""
        return _chunks(
            self._stub.Generate(
                generate_request(prompt, options or GenerateOptions()), timeout=self._timeout_s, metadata=self._metadata
            )
        )

    def chat(self, turns: Sequence[Turn], options: GenerateOptions | None = None) -> Iterator[Chunk]:
        """Answers a conversation. Closing the iterator cancels the request."""
        return _chunks(
            self._stub.Chat(
                chat_request(turns, options or GenerateOptions()), timeout=self._timeout_s, metadata=self._metadata
            )
        )

    def cancel(self, request_id: str) -> bool:
        """False when no such request is running."""
        try:
            request = inference_pb2.CancelRequest(request_id=request_id)
            return self._stub.Cancel(
                request,
                timeout=_UNARY_TIMEOUT_S,
                metadata=self._metadata,
            ).found
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    def tokenize(self, text: str, *, model: str = "") -> list[int]:
        """Token ids of a text."""
        try:
            request = inference_pb2.TokenizeRequest(model=model, text=text)
            return list(
                self._stub.Tokenize(
                    request,
                    timeout=_UNARY_TIMEOUT_S,
                    metadata=self._metadata,
                ).token_ids
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error

    def list_models(self) -> list[ModelInfo]:
        """The models served now."""
        try:
            response = self._stub.ListModels(
                inference_pb2.ListModelsRequest(), timeout=_UNARY_TIMEOUT_S, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return [ModelInfo.from_pb(model) for model in response.models]

    def describe(self) -> ProcessDescription:
        """Counters and integrity of the gateway."""
        try:
            response = self._admin.Describe(
                admin_pb2.DescribeRequest(), timeout=_UNARY_TIMEOUT_S, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return ProcessDescription.from_pb(response)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> "WeirClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _chunks(call: Any) -> Iterator[Chunk]:
    try:
        for response in call:
            yield Chunk.from_pb(response)
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
    finally:
        call.cancel()
