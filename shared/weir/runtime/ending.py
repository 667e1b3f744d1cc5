"""How a process ends: asked once, by whatever comes first, and hard where that does not help."""

import asyncio
import logging
import os
import signal
import threading
from dataclasses import dataclass, field

_log = logging.getLogger(__name__)


@dataclass
class Ending:
    """Why and how the process ends; the first reason counts."""

    asked: asyncio.Event = field(default_factory=asyncio.Event)
    exit_code: int = 0

    def ask(self, reason: str, exit_code: int) -> None:
        if not self.asked.is_set():
            _log.info("shutting down: %s", reason)
            self.exit_code = exit_code
            self.asked.set()

    def on_signal(self, number: int) -> None:
        if self.asked.is_set():
            os._exit(128 + number)
        self.ask(signal.Signals(number).name, 0)


def exit_hard_after(seconds: float) -> None:
    """Whatever hangs now, a thread that does not end included: this process will be gone."""

    def exit_hard() -> None:
        _log.critical("shutdown did not end within %.1f s: exiting hard", seconds)
        os._exit(1)

    timer = threading.Timer(seconds, exit_hard)
    timer.daemon = True
    timer.start()
