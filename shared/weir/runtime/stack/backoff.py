"""How long to wait before the next start of a process that died."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BackoffPolicy:
    """Doubles from `first_s` to `longest_s`; starts anew once a process was ready for `healthy_s`."""

    first_s: float = 0.25
    longest_s: float = 10.0
    healthy_s: float = 30.0


class Backoff:
    """The delays of one process."""

    def __init__(self, policy: BackoffPolicy) -> None:
        self._policy = policy
        self._num_failures = 0

    def next_delay_s(self, ready_for_s: float) -> float:
        """`ready_for_s`: how long the process that just died had been ready; 0 if it never was."""
        if ready_for_s >= self._policy.healthy_s:
            self._num_failures = 0
        # The exponent is bounded: a process may fail for months.
        delay_s = self._policy.first_s * 2.0 ** min(self._num_failures, 32)
        self._num_failures += 1
        return min(delay_s, self._policy.longest_s)
