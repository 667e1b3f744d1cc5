"""The engine seen from the event loop of its worker."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from weir.core.clock import Clock
from weir.engine.batching.batcher import Batcher
from weir.engine.counters import EngineCounters
from weir.engine.loop import LoopSettings
from weir.engine.messages import Command, EngineReport
from weir.engine.plan import ModelRunner

_MAX_REPORTS_UNDER_WAY = 64
_REPORT_TIMEOUT_S = 30.0


class TurnedEngine(Protocol):
    """An engine and what turns it; `EngineLoop` does so in a thread."""

    def start(self, prepare: Callable[[], None]) -> "Future[None]": ...

    def post(self, command: Command) -> None: ...

    def stop(self, timeout_s: float) -> bool: ...


class MakeEngine(Protocol):
    """`outbox` may be called from any thread."""

    def __call__(
        self,
        batcher: Batcher,
        runner: ModelRunner,
        outbox: Callable[[EngineReport], None],
        settings: LoopSettings,
        clock: Clock,
    ) -> TurnedEngine: ...


class EngineHost:
    """The engine's thread seen from the event loop: carries commands in and reports out. Made in the event loop in
    which `on_report` is to be called."""

    def __init__(
        self, settings: LoopSettings, clock: Clock, make_engine: MakeEngine, on_report: Callable[[EngineReport], None]
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._make_engine = make_engine
        self._on_report = on_report
        self._event_loop = asyncio.get_running_loop()
        self._credits = threading.Semaphore(_MAX_REPORTS_UNDER_WAY)
        self._engine: TurnedEngine | None = None
        self.report = EngineReport(counters=EngineCounters().snapshot())
        """The newest one."""

    async def start(self, batcher: Batcher, runner: ModelRunner, warm_up: Callable[[], None]) -> None:
        """Returns when `warm_up` has run in the engine's thread. Raises what it raised."""
        engine = self._make_engine(batcher, runner, self._send, self._settings, self._clock)
        self._engine = engine
        await asyncio.wrap_future(engine.start(warm_up))

    def post(self, command: Command) -> None:
        """Raises InboxFull, and RuntimeError before `start`."""
        if self._engine is None:
            raise RuntimeError("the engine takes commands after start()")
        self._engine.post(command)

    async def stop(self, timeout_s: float) -> bool:
        """False: a step is still running, and may write into the arena."""
        if self._engine is None:
            return True
        return await asyncio.to_thread(self._engine.stop, timeout_s)

    def _send(self, report: EngineReport) -> None:
        """In the engine's thread. Waits only if the event loop is many steps behind."""
        if not self._credits.acquire(timeout=_REPORT_TIMEOUT_S):
            raise RuntimeError(f"the event loop took no report for {_REPORT_TIMEOUT_S:g} s")
        self._event_loop.call_soon_threadsafe(self._receive, report)

    def _receive(self, report: EngineReport) -> None:
        self._credits.release()
        self.report = report
        self._on_report(report)
