"""Notices a client that takes nothing: one timer a stream, where one a message costs more than most else of it."""

import asyncio
from collections.abc import Callable


class SendWatch:
    """Calls `on_late` once if a send takes `timeout_s`. To be closed."""

    def __init__(self, timeout_s: float, on_late: Callable[[], None]) -> None:
        self._timeout_s = timeout_s
        self._on_late = on_late
        self._loop = asyncio.get_running_loop()
        self._began_s: float | None = None
        """When the present send began."""
        self._timer = self._loop.call_later(timeout_s, self._check)

    def begin(self) -> None:
        self._began_s = self._loop.time()

    def end(self) -> None:
        self._began_s = None

    def close(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        """A send that begins after this is checked when it may be late, or before, and then again in time."""
        now_s = self._loop.time()
        began_s = now_s if self._began_s is None else self._began_s
        left_s = began_s + self._timeout_s - now_s
        if left_s <= 0:
            self._on_late()
        else:
            self._timer = self._loop.call_later(left_s, self._check)
