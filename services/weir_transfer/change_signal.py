"""That something has changed, for whoever waits for it in the event loop."""

import asyncio
import contextlib


class ChangeSignal:
    """Wakes everybody who waits. Only notifications after the begin of a wait count."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, timeout_s: float) -> None:
        """Until the next notification, or for `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)
