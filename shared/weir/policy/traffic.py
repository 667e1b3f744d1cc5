"""What a batcher can tell of its traffic from those that wait: rates and lengths of the last minute."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from weir.policy.seams import Member

_MAX_SEEN = 10_000


@dataclass(frozen=True, slots=True)
class Seen:
    """One arrival."""

    at_s: float
    num_prompt_tokens: int
    predicted_output_tokens: float | None


class Traffic:
    """Arrivals in a sliding window of `window_s`, `_MAX_SEEN` of them at the most."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._seen: deque[Seen] = deque(maxlen=_MAX_SEEN)
        self._known: frozenset[str] = frozenset()
        self._began_at_s: float | None = None

    def observe(self, waiting: Sequence[Member], now_s: float) -> None:
        """Those that wait now; who waited at the last call is no arrival again."""
        if self._began_at_s is None:
            self._began_at_s = now_s
        for member in waiting:
            if member.request_id not in self._known:
                self._seen.append(Seen(member.waits_since_s, member.num_prompt_tokens, member.predicted_output_tokens))
        self._known = frozenset(member.request_id for member in waiting)
        while self._seen and self._seen[0].at_s < now_s - self._window_s:
            self._seen.popleft()

    @property
    def arrivals(self) -> Sequence[Seen]:
        return self._seen

    def span_s(self, now_s: float) -> float:
        """Time that `arrivals` stand for; at least a second, so that the first one is no flood."""
        begins_s = self._seen[0].at_s if len(self._seen) == _MAX_SEEN else (self._began_at_s or now_s)
        return max(1.0, min(self._window_s, now_s - begins_s))

    @property
    def variation(self) -> float:
        """Square root of (variance of arrivals a second over their mean): 1 for Poisson, as large as the coefficient of
        variation of the gaps for burstier renewals, but blind to clumps within a second; 0 while little was seen."""
        if len(self._seen) < 16:
            return 0.0
        first_s = min(seen.at_s for seen in self._seen)
        last_s = max(seen.at_s for seen in self._seen)
        num_bins = int(last_s - first_s)
        if num_bins < 4:
            return 0.0
        counts = [0] * num_bins
        for seen in self._seen:
            if seen.at_s - first_s < num_bins:
                counts[int(seen.at_s - first_s)] += 1
        mean = sum(counts) / num_bins
        return math.sqrt(sum((count - mean) ** 2 for count in counts) / num_bins / mean)


class Departures:
    """Output lengths of the last `max_lengths` sequences that left the batch."""

    def __init__(self, max_lengths: int = 1000) -> None:
        self.lengths: deque[int] = deque(maxlen=max_lengths)
        self._emitted: dict[str, int] = {}

    def observe(self, running: Sequence[Member]) -> None:
        """Who was in the batch and is no more has ended, with a token more than it was seen with."""
        emitted = {member.request_id: member.num_emitted_tokens for member in running}
        for request_id, num_tokens in self._emitted.items():
            if request_id not in emitted:
                self.lengths.append(num_tokens + 1)
        self._emitted = emitted

    @property
    def mean(self) -> float | None:
        return sum(self.lengths) / len(self.lengths) if self.lengths else None
