"""The response that a stream of events is: under flow control, kept alive while there is nothing to send, and cut where
its answer breaks off."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weir.core.tasks import end_tasks
from weir_gateway.frontends.send_watch import SendWatch
from weir_gateway.frontends.sse import DONE

logger = logging.getLogger(__name__)

_COMMENT = b": keep-alive\n\n"


class StreamBroken(Exception):
    """The answer ends here, and this is not its end. What was to be said of it has been said."""


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """A client that takes nothing for `send_timeout_s` is given up. After `keep_alive_s` (0: never) without an event
    comes a comment, which clients skip and proxies count.

    `after_error`: the connection is closed before the body's end ("cut"), for clients take `data: [DONE]`, or a body
    that is whole, for the end of an answer; "done" ends it so all the same.
    """

    send_timeout_s: float = 60.0
    keep_alive_s: float = 15.0
    after_error: Literal["cut", "done"] = "cut"


@contextlib.asynccontextmanager
async def watched(receive: Receive, on_disconnect: Callable[[], object]) -> AsyncIterator[None]:
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
    """Sends what `events` yields until it ends, or raises StreamBroken. `leave` is called at the end, however it
    comes."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        leave: Callable[[], None],
        settings: StreamSettings,
        log_ids: Mapping[str, str],
        *,
        done: bytes = DONE,
    ) -> None:
        """`done`: what an API's whole streams end with, where "done" is what a broken one ends with too."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._leave = leave
        self._settings = settings
        self._log_ids = log_ids
        self._done = done
        self._num_sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as giving_up, watched(receive, self._leave):
                watch = SendWatch(self._settings.send_timeout_s, lambda: giving_up.reschedule(loop.time()))
                with contextlib.closing(watch):
                    await _in_own_task(self._send_all(send, watch))
        except TimeoutError:
            # Returning before the body's end makes the server close the connection.
            message = "a client has not read its stream for %g s and is given up"
            logger.warning(message, self._settings.send_timeout_s, extra=self._log_ids)
        except StreamBroken:
            pass  # as above
        finally:
            self._leave()

    async def _send_all(self, send: Send, watch: SendWatch) -> None:
        watch.begin()
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        watch.end()
        keeping_alive = asyncio.create_task(self._keep_alive(send))
        try:
            async for data in self._events:
                watch.begin()
                await send(_part(data))
                watch.end()
                self._num_sent += 1
        except StreamBroken:
            if self._settings.after_error == "cut":
                raise
            await send(_part(self._done))
        finally:
            await end_tasks([keeping_alive])
        watch.begin()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        watch.end()

    async def _keep_alive(self, send: Send) -> None:
        """Whatever is sent is written whole before it waits for the client, so it may come between two events."""
        while self._settings.keep_alive_s:
            num_sent = self._num_sent
            await asyncio.sleep(self._settings.keep_alive_s)
            if self._num_sent == num_sent:
                await send(_part(_COMMENT))


def _part(data: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": True}


async def _in_own_task(work: Coroutine[Any, Any, None]) -> None:
    """What wakes up for each token resumes its own few frames, and not those of all who called it."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait([task])
    finally:
        await end_tasks([task])
    task.result()
