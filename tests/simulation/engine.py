"""The engine in its worker's event loop, with a step time by a model, in place of the thread."""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from weir.core.clock import Clock
from weir.engine.batching.batcher import Batcher
from weir.engine.loop import EngineCore, InboxFull, LoopSettings
from weir.engine.messages import Command, EngineReport
from weir.engine.plan import ModelRunner


class TurnedInLoop:
    """`weir.worker.engine.engine_host.TurnedEngine`: takes commands, lets a step's time pass, turns."""

    def __init__(
        self,
        batcher: Batcher,
        runner: ModelRunner,
        outbox: Callable[[EngineReport], None],
        settings: LoopSettings,
        clock: Clock,
        *,
        rng: random.Random,
        step_s: float,
    ) -> None:
        self._core = EngineCore(batcher, runner, outbox, settings, clock)
        self._outbox = outbox
        self._settings = settings
        self._clock = clock
        self._rng = rng
        self._step_s = step_s
        self._inbox: deque[Command] = deque()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._is_running = False

    def start(self, prepare: Callable[[], None]) -> "Future[None]":
        prepared: Future[None] = Future()
        prepare()
        self._is_running = True
        self._turn_after(0.0)
        prepared.set_result(None)
        return prepared

    def post(self, command: Command) -> None:
        if len(self._inbox) >= self._settings.inbox_size:
            raise InboxFull(f"{len(self._inbox)} commands wait for the engine")
        self._inbox.append(command)
        if self._is_running:
            self._turn_after(self._step_s * (0.5 + self._rng.random()))

    def stop(self, timeout_s: float) -> bool:
        del timeout_s
        if self._is_running:
            self._end()
        return True

    def _turn_after(self, delay_s: float) -> None:
        at_s = self._loop.time() + delay_s
        if self._timer is not None and not self._timer.cancelled():
            if self._timer.when() <= at_s:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(at_s, self._turn)

    def _turn(self) -> None:
        self._timer = None
        while self._inbox:
            self._core.apply(self._inbox.popleft())
        has_worked = self._core.turn()
        if self._core.fatal:
            self._end()
        elif has_worked:
            self._turn_after(self._step_s * (0.5 + self._rng.random()))
        elif (deadline_s := self._core.next_deadline_s) is not None:
            self._turn_after(max(0.0005, deadline_s - self._clock.now_s()))

    def _end(self) -> None:
        self._is_running = False
        if self._timer is not None:
            self._timer.cancel()
        self._core.close()
