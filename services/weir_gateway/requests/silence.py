"""How long the workers of one request have said nothing new of it."""

from weir.core.clock import Clock


class Silence:
    """Between two tokens in order. When they are overdue the worker is asked for them; see `take_probe`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_s = clock.now_s()
        self._last_probe_s = float("-inf")

    @property
    def length_s(self) -> float:
        """Since its last token in order, or since it started."""
        return self._clock.now_s() - self._since_s

    def end(self) -> float:
        """A token came. Returns when: now."""
        self._since_s = self._clock.now_s()
        return self._since_s

    def begin(self) -> None:
        """A worker that was asked for nothing yet has it from now on."""
        self._since_s, self._last_probe_s = self._clock.now_s(), float("-inf")

    def take_probe(self, overdue_s: float, again_s: float) -> bool:
        """Whether its worker is to be asked now; repeated after `again_s`."""
        now_s = self._clock.now_s()
        is_due = now_s - self._since_s >= overdue_s and now_s - self._last_probe_s >= again_s
        if is_due:
            self._last_probe_s = now_s
        return is_due
