"""Answers over HTTP that notice when their client leaves."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weir.core.tasks import end_tasks

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


@contextlib.asynccontextmanager
async def watched(receive: Receive, on_disconnect: Callable[[], None]) -> AsyncIterator[None]:
    """Calls `on_disconnect` when the client goes away. The request's body must have been read."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        on_disconnect()

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        await end_tasks([watching])


class EventStream(Response):
    """Sends what `events` yields, under the connection's flow control. `leave` is called at the end, however it comes.

    A client that does not read for `send_timeout_s` is given up: its connection is closed.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], leave: Callable[[], None], *, send_timeout_s: float) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._leave = leave
        self._send_timeout_s = send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with watched(receive, self._leave):
                await self._send(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async for data in self._events:
                    await self._send(send, {"type": "http.response.body", "body": data, "more_body": True})
                await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            # Returning before the body's end makes the server close the connection.
            logger.warning("a client has not read its stream for %g s and is given up", self._send_timeout_s)
        finally:
            self._leave()

    async def _send(self, send: Send, message: dict[str, Any]) -> None:
        async with asyncio.timeout(self._send_timeout_s):
            await send(message)
