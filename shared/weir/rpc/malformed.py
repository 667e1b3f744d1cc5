"""Requests whose bytes are not the message that was expected: grpc.aio would answer UNKNOWN with a traceback."""

import inspect
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError

from weir.core.errors import FieldViolation, InvalidRequest

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]

_Function = Callable[[Any, Any], Any]


class _Malformed:
    """Stands for a request that could not be read."""


def refuse_malformed(handler: "Handler") -> "Handler":
    """The handler, raising InvalidRequest for bytes that are no request. For handlers of a single request."""
    deserialize = handler.request_deserializer
    if deserialize is None or handler.request_streaming:
        return handler

    def try_deserialize(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _Malformed()

    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(
            _checked_stream(handler.unary_stream), try_deserialize, handler.response_serializer
        )
    return grpc.unary_unary_rpc_method_handler(
        _checked_call(handler.unary_unary), try_deserialize, handler.response_serializer
    )


def _check(request: object) -> None:
    if isinstance(request, _Malformed):
        raise InvalidRequest([FieldViolation("request", "the bytes are not the protobuf message of this method")])


def _checked_call(function: Any) -> _Function:
    async def call(request: Any, context: Any) -> Any:
        _check(request)
        return await function(request, context)

    return call if inspect.iscoroutinefunction(function) else function


def _checked_stream(function: Any) -> _Function:
    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        _check(request)
        responses = function(request, context)
        del request  # the handler's own from here on, who may drop it before the answer is complete
        async for response in responses:
            yield response

    return stream if inspect.isasyncgenfunction(function) else _checked_call(function)
