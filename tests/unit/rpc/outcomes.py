"""Whether a port lets somebody call a method, whatever comes of the call."""

from collections.abc import AsyncIterator
from typing import Any, Literal, cast

import grpc
import grpc.aio

from weir.core.credentials import key_metadata

Outcome = Literal["let in", "unknown", "denied"]
_OUTCOMES: dict[grpc.StatusCode, Outcome] = {
    grpc.StatusCode.UNAUTHENTICATED: "unknown",
    grpc.StatusCode.PERMISSION_DENIED: "denied",
    # what handlers answer to an empty message, or a caller who is let in and has to wait
    grpc.StatusCode.OK: "let in",
    grpc.StatusCode.INVALID_ARGUMENT: "let in",
    grpc.StatusCode.NOT_FOUND: "let in",
    grpc.StatusCode.FAILED_PRECONDITION: "let in",
    grpc.StatusCode.DEADLINE_EXCEEDED: "let in",
    grpc.StatusCode.UNAVAILABLE: "let in",
    grpc.StatusCode.UNIMPLEMENTED: "let in",  # by a process of another role; a method that is not there says so
}
_NO_METHOD = "Method not found!"
_WRITE_FAILED = "Internal error from Core"
"""All that grpc.aio tells of a call that was refused while its message was still being written."""
_MAX_TRIES = 10
_WAIT_S = 2.0
"""In which a stream that has nothing to say would have been refused."""


async def outcome_of(channel: grpc.aio.Channel, method: str, key: str) -> Outcome:
    """Sends one empty message, and reads one. Raises AssertionError where there is no such method."""
    for _ in range(_MAX_TRIES):
        code, details = await _end_of(channel, method, key)
        if details != _WRITE_FAILED:
            break
    assert details != _NO_METHOD, method
    assert code in _OUTCOMES, (method, code, details)
    return _OUTCOMES[code]


async def _end_of(channel: grpc.aio.Channel, method: str, key: str) -> tuple[grpc.StatusCode, str]:
    async def one() -> AsyncIterator[bytes]:
        yield b""

    # On the wire a single request is a stream of one.
    call: Any = cast("Any", channel.stream_stream(f"/{method}"))(one(), metadata=key_metadata(key), timeout=_WAIT_S)
    code, details = grpc.StatusCode.OK, ""
    try:
        await call.read()
        if call.done():
            code = await call.code()
    except grpc.aio.AioRpcError as error:
        code, details = error.code(), error.details() or ""
    finally:
        call.cancel()
    return code, details
