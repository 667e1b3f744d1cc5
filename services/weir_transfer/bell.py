"""Wakes everybody who waits for a change, whatever it is."""

import asyncio
import contextlib


class ChangeSignal:
    """Who waits hears the next ring; earlier ones are not kept."""

    def __init__(self) -> None:
        self._rung = asyncio.Event()

    def ring(self) -> None:
        self._rung.set()
        self._rung = asyncio.Event()

    async def wait(self, timeout_s: float) -> None:
        """Until the next ring, or for `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._rung.wait(), timeout_s)
