"""Whether a worker takes work, and the way from taking it to having none.

SERVING ── begin ──> DRAINING ── handed over, ended, or interrupted after the grace period ──> DRAINED
   ^─────────────────────┴───────────────────────── end ───────────────────────────────────────────┘
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable
from enum import Enum

from weir.worker.requests.request_manager import RequestManager
from weir.worker.tasks import WorkerTasks

_log = logging.getLogger(__name__)
_LOOK_AGAIN_S = 0.05
"""So often at most the engine is asked what can be handed over: it leaves its steps for that."""
_HAND_OVER_AGAIN_S = 0.5
"""Where nothing has changed here: another worker may be free to take over by now."""
_INTERRUPT_AGAIN_S = 1.0
_INTERRUPTING_S = 1.0


class Duty(Enum):
    """Whether a worker takes work."""

    SERVING = "serving"
    DRAINING = "draining"
    DRAINED = "drained"


class Untaken(Enum):
    """What becomes of a sequence that is to be handed over and that nobody takes."""

    GOES_ON = "goes_on"
    """Here, until somebody does."""
    INTERRUPTED = "interrupted"
    """Its gateway has it go on under a new dispatch."""
    LEFT = "left"
    """This process is about to end: it stays in the arena, for whoever comes in its place."""


class WorkerDrain:
    """Called in the event loop alone."""

    def __init__(
        self,
        manager: RequestManager,
        hand_over: Callable[[Untaken], None],
        interrupt: Callable[[], None],
        on_change: Callable[[], None],
        request_shutdown: Callable[[str], None],
    ) -> None:
        """`hand_over` has another worker go on with what is here, as far as there is one; `interrupt` ends all that is
        here and not being handed over, at the next step's boundary, so that its gateway has it go on elsewhere. Both
        may be called again. `on_change` is called when the duty has changed."""
        self._manager = manager
        self._hand_over = hand_over
        self._interrupt = interrupt
        self._on_change = on_change
        self._tasks = WorkerTasks(request_shutdown)
        self._emptying: asyncio.Task[None] | None = None
        self._has_changed = asyncio.Event()
        self._ends_at_s = 0.0
        self._expected_until_s = 0.0
        self._untaken = Untaken.INTERRUPTED
        self.duty = Duty.SERVING
        self.is_spare = False
        """Whether it is drained to be there when more workers are wanted, and not to be left alone."""

    def start_drained(self) -> None:
        """As a spare, before anybody knows of it; nothing is here yet."""
        self._manager.begin_drain()
        self.duty, self.is_spare = Duty.DRAINED, True

    def mark_spare(self, *, is_spare: bool) -> None:
        """Whether it is one from now on, as long as it takes no work."""
        if self.is_spare != is_spare:
            self.is_spare = is_spare
            self._on_change()

    def look_again(self) -> None:
        """A sequence may have come, gone on or ended: what can be handed over may be different now."""
        self._has_changed.set()

    def begin(self, grace_s: float, expected_s: float | None = None, untaken: Untaken = Untaken.INTERRUPTED) -> None:
        """Takes nothing new. What is here is handed over at once; what nobody takes may end within the grace period,
        and `untaken` is what becomes of it then. `expected_s`: so long at most what gateways wait for here may come. A
        repeated call sets all of them anew; one that is drained stays so."""
        if self.duty is Duty.DRAINED:
            return
        now_s = asyncio.get_running_loop().time()
        self._ends_at_s = now_s + grace_s
        self._expected_until_s = now_s + (grace_s if expected_s is None else min(grace_s, expected_s))
        self._untaken = untaken
        self._has_changed.set()
        if self.duty is Duty.SERVING:
            self._manager.begin_drain()
            self._enter(Duty.DRAINING)
            self._emptying = self._tasks.spawn(self._empty(), "drain")

    def end(self) -> None:
        """Takes work again."""
        if self.duty is Duty.SERVING:
            return
        if self._emptying is not None:
            self._emptying.cancel()
        self._manager.end_drain()
        self.is_spare = False
        self._enter(Duty.SERVING)

    async def finish(
        self, grace_s: float, expected_s: float | None = None, untaken: Untaken = Untaken.INTERRUPTED
    ) -> None:
        """As `begin`; returns when drained, a second after the grace period at the latest, and says what is left."""
        self.begin(grace_s, expected_s, untaken)
        if self._emptying is not None and not self._emptying.done():
            await asyncio.wait([self._emptying], timeout=grace_s + _INTERRUPTING_S)
        if self._manager.num_live:
            _log.warning("%d sequences are left behind", self._manager.num_live)

    async def stop(self) -> None:
        await self._tasks.stop()

    async def _empty(self) -> None:
        loop = asyncio.get_running_loop()
        asked_at_s, has_changed = -math.inf, False
        while self._is_awaited() and (now_s := loop.time()) < self._ends_at_s:
            if now_s >= asked_at_s + (_LOOK_AGAIN_S if has_changed else _HAND_OVER_AGAIN_S):
                self._has_changed.clear()
                self._hand_over(Untaken.GOES_ON)  # what comes yet too
                asked_at_s, has_changed = now_s, False
            has_changed |= await self._wait_for_change(self._ends_at_s)
        if self._manager.num_expected:
            _log.info("%d sequences that were announced did not come", self._manager.num_expected)
        self._manager.refuse_hand_offs()
        if self._manager.num_live:
            _log.warning("%d sequences did not end in time: %s", self._manager.num_live, self._untaken.value)
        while self._manager.num_live:
            self._hand_over(self._untaken)
            self._interrupt()  # what is not being handed over
            again_at_s = loop.time() + _INTERRUPT_AGAIN_S
            while self._manager.num_live and loop.time() < again_at_s:
                await self._wait_for_change(again_at_s)
        self._enter(Duty.DRAINED)

    def _is_awaited(self) -> bool:
        is_expecting = asyncio.get_running_loop().time() < self._expected_until_s
        return self._manager.num_live > 0 or (is_expecting and self._manager.num_expected > 0)

    async def _wait_for_change(self, until_s: float) -> bool:
        """False: the engine reported none. That is a reason to look as well: an end may wait for its pages to be
        released, and what is expected may be given up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(min(until_s, asyncio.get_running_loop().time() + _LOOK_AGAIN_S)):
                await self._has_changed.wait()
                self._has_changed.clear()
                return True
        return False

    def _enter(self, duty: Duty) -> None:
        _log.info("%s", duty.value)
        self.duty = duty
        self._on_change()
