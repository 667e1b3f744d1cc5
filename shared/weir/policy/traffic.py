"""What a gate can learn of its traffic from the batches that it sees: rates and lengths of the last minute."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from weir.policy.seams import BatchView

_MAX_SEEN = 10_000


@dataclass(frozen=True, slots=True)
class SeenArrival:
    """A request when a gate saw it for the first time."""

    at_s: float
    num_prompt_tokens: int
    predicted_output_tokens: float | None


class Traffic:
    """Arrivals in a sliding window of `window_s`, `_MAX_SEEN` of them at the most."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._seen: deque[SeenArrival] = deque(maxlen=_MAX_SEEN)
        self._known: set[str] = set()
        self._began_at_s: float | None = None

    def observe(self, view: BatchView, now_s: float) -> None:
        """Those that wait now; who was there at the last call, waiting or in the batch, is no arrival again."""
        if self._began_at_s is None:
            self._began_at_s = now_s
        for member in view.waiting:
            if member.request_id not in self._known:
                self._seen.append(
                    SeenArrival(member.waits_since_s, member.num_prompt_tokens, member.predicted_output_tokens)
                )
        self._known = {member.request_id for members in (view.waiting, view.running) for member in members}
        while self._seen and self._seen[0].at_s < now_s - self._window_s:
            self._seen.popleft()

    @property
    def arrivals(self) -> Sequence[SeenArrival]:
        return self._seen

    def span_s(self, now_s: float) -> float:
        """Time that `arrivals` stand for; at least a second, so that the first one is no flood."""
        began_at_s = now_s if self._began_at_s is None else self._began_at_s
        begins_s = self._seen[0].at_s if len(self._seen) == _MAX_SEEN else began_at_s
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
        self._num_output_tokens: dict[str, int] = {}

    def observe(self, view: BatchView) -> None:
        """Who was in the batch and is no more has ended, with a token more than it was seen with; but who waits was
        preempted and comes back."""
        num_output_tokens = {member.request_id: member.num_output_tokens for member in view.running}
        gone = {i: num_tokens for i, num_tokens in self._num_output_tokens.items() if i not in num_output_tokens}
        if gone:
            for member in view.waiting:
                gone.pop(member.request_id, None)
            self.lengths.extend(num_tokens + 1 for num_tokens in gone.values())
        self._num_output_tokens = num_output_tokens

    @property
    def mean(self) -> float | None:
        return sum(self.lengths) / len(self.lengths) if self.lengths else None
