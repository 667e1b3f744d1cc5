"""Tokens of a stream gather while the event loop is behind: a message costs as much with one token as with ten.

    frame of a worker ─> wakes the streams that it has tokens for ─> they send, one after the other ─> back to the loop
                         |<------------------------- a pass: how long that takes -------------------------->|

What a stream waits for after each message grows while passes take much of the time, and shrinks again when they take
little. Tokens that come more slowly than that, as they do unless streams are many, wait for nothing. All that wait are
let go together, by one timer: what they send then costs less than it does one by one, and a timer each costs most.
"""

import asyncio

from weir.core.clock import Clock

WINDOW_S = 0.25
MUCH, LITTLE = 0.5, 0.2
"""Shares of the time. Less than half of MUCH is LITTLE: a hold that is halved does not grow again at once."""
FIRST_HOLD_S = 0.01
MAX_HOLD_S = 0.03
_AT_ONCE = 256
"""So many streams are let go at a time, and others have the loop before the next."""


class OutputPace:
    """Of one event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._window_began_s = clock.now_s()
        self._in_passes_s = 0.0
        """Of the present window."""
        self._is_in_pass = False
        self.hold_s = 0.0
        """How long a stream that has just sent something lets tokens gather at most."""
        self._gathering: list[asyncio.Future[None]] = []

    def on_wake(self) -> None:
        """A stream has something to send. The first one begins a pass, which ends when all that are ready by now, and
        what they leave to be sent, have run."""
        if not self._is_in_pass:
            self._is_in_pass = True
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._end_pass, self._clock.now_s())

    def gather(self) -> "asyncio.Future[None]":
        """Done when the streams that gather tokens now are let go. Who does not wait so long may end it before."""
        loop = asyncio.get_running_loop()
        if not self._gathering:
            loop.call_later(self.hold_s, self._let_go)
        gathering = loop.create_future()
        self._gathering.append(gathering)
        return gathering

    def note_pass(self, pass_s: float) -> None:
        """It ends now."""
        now_s = self._clock.now_s()
        self._in_passes_s += pass_s
        window_s = now_s - self._window_began_s
        if window_s < WINDOW_S:
            return
        share = self._in_passes_s / window_s
        if share > MUCH:
            self.hold_s = min(max(FIRST_HOLD_S, 2 * self.hold_s), MAX_HOLD_S)
        elif share < LITTLE:
            is_over = self.hold_s <= FIRST_HOLD_S or window_s > 4 * WINDOW_S
            self.hold_s = 0.0 if is_over else self.hold_s / 2
        self._window_began_s, self._in_passes_s = now_s, 0.0

    def _let_go(self) -> None:
        gathering, self._gathering = self._gathering, []
        _end_in_parts(gathering)

    def _end_pass(self, began_s: float) -> None:
        self._is_in_pass = False
        self.note_pass(self._clock.now_s() - began_s)


def _end_in_parts(waits: "list[asyncio.Future[None]]") -> None:
    for one in waits[:_AT_ONCE]:
        if not one.done():
            one.set_result(None)
    if len(waits) > _AT_ONCE:
        asyncio.get_running_loop().call_soon(_end_in_parts, waits[_AT_ONCE:])
