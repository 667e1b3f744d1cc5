"""The stream of one answer's events: sent under the connection's flow control, and left when its client goes away."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weir.core.tasks import end_tasks
from weir_gateway.frontends.send_watch import SendWatch

logger = logging.getLogger(__name__)


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

    def __init__(
        self,
        events: AsyncIterator[bytes],
        leave: Callable[[], None],
        *,
        send_timeout_s: float,
        log_ids: Mapping[str, str],
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._leave = leave
        self._send_timeout_s = send_timeout_s
        self._log_ids = log_ids

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as giving_up, watched(receive, self._leave):
                watch = SendWatch(self._send_timeout_s, lambda: giving_up.reschedule(loop.time()))
                with contextlib.closing(watch):
                    await _in_own_task(self._send_all(send, watch))
        except TimeoutError:
            # Returning before the body's end makes the server close the connection.
            message = "a client has not read its stream for %g s and is given up"
            logger.warning(message, self._send_timeout_s, extra=self._log_ids)
        finally:
            self._leave()

    async def _send_all(self, send: Send, watch: SendWatch) -> None:
        watch.begin()
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        watch.end()
        async for data in self._events:
            watch.begin()
            await send({"type": "http.response.body", "body": data, "more_body": True})
            watch.end()
        watch.begin()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        watch.end()


async def _in_own_task(work: Coroutine[Any, Any, None]) -> None:
    """What wakes up for each token resumes its own few frames, and not those of all who called it."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait([task])
    finally:
        await end_tasks([task])
    task.result()
