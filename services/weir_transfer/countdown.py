"""How long each lease has been silent."""

from weir.core.clock import Clock


class Countdowns:
    """Silence counts only while the service itself listens: time in which it did not run is nobody's fault.

    `tick` must be called every `tick_s`; what it comes late is taken off every silence.
    """

    def __init__(self, clock: Clock, tick_s: float) -> None:
        self._clock = clock
        self._tick_s = tick_s
        self._last_tick_s = clock.now_s()
        self._heard_at_s: dict[int, float] = {}

    def hear(self, lease_id: int) -> None:
        """A sign of life; also starts the countdown of a lease."""
        self._heard_at_s[lease_id] = self._clock.now_s()

    def forget(self, lease_id: int) -> None:
        self._heard_at_s.pop(lease_id, None)

    def silence_s(self, lease_id: int) -> float:
        """Raises KeyError for a lease that was never heard."""
        return self._clock.now_s() - self._heard_at_s[lease_id]

    def tick(self) -> None:
        now_s = self._clock.now_s()
        late_s = max(0.0, now_s - self._last_tick_s - 2 * self._tick_s)
        self._last_tick_s = now_s
        for lease_id, heard_at_s in self._heard_at_s.items():
            self._heard_at_s[lease_id] = min(now_s, heard_at_s + late_s)
