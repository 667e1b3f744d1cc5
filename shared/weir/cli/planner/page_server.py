"""The planner's page over HTTP, from a thread with an event loop of its own: the planner computes for seconds."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Thread

from weir.runtime.metrics_port import MetricsPort

_START_S = 10.0
_STOP_S = 10.0


@contextmanager
def served(port: MetricsPort) -> Iterator[None]:
    """As long as it is entered. Raises Unavailable when the address cannot be bound."""
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
    thread = Thread(target=lambda: asyncio.run(_serve(port, started)), name="metrics", daemon=True)
    thread.start()
    loop, end = started.result(_START_S)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(end.set)
        thread.join(_STOP_S)


async def _serve(port: MetricsPort, started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
    end = asyncio.Event()
    try:
        await port.start()
    except Exception as error:  # noqa: BLE001 - whoever waits for the start is told
        started.set_exception(error)
        return
    started.set_result((asyncio.get_running_loop(), end))
    try:
        await end.wait()
    finally:
        await port.stop()
