"""Whether a server that failed is asked again. Pure: seconds of a clock."""

from weir.core.clock import Backoff, Clock

_FIRST_S, _LONGEST_S = 1.0, 10.0


class Circuit:
    """Closed: everybody asks. Open, from a failure on: nobody does, but one that tries it now and then.

    Any thread may report; who tries is one thread alone.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._backoff = Backoff(_FIRST_S, _LONGEST_S)
        self._retry_at_s: float | None = None

    @property
    def is_open(self) -> bool:
        return self._retry_at_s is not None

    def may_try(self) -> bool:
        """For the one that tries."""
        retry_at_s = self._retry_at_s
        return retry_at_s is None or self._clock.now_s() >= retry_at_s

    def on_failure(self) -> bool:
        """Whether it opens by that. Others that fail meanwhile do not put the next attempt off."""
        opens = not self.is_open
        if self.may_try():
            self._retry_at_s = self._clock.now_s() + self._backoff.next_delay_s()
        return opens

    def on_success(self) -> bool:
        """Whether it closes by that. Of an attempt; what was asked before it opened says nothing."""
        closes = self.is_open
        self._retry_at_s = None
        self._backoff.reset()
        return closes
