"""Starvation control for orders that would let some wait for ever.

The rule of vLLM-LTR (Fu et al., arXiv 2408.15792) is for a scheduler that chooses anew each step: who has not run for
200 steps goes to the front, for 10 steps. Here a request is chosen once and runs to its end, so the rule reads: who has
been passed over `threshold_picks` times is starving, and while somebody is, one of `period` picks goes to whoever was
passed over most. A request with k older ones in its queue is therefore taken after at most
threshold_picks + period * (k + 1) picks, whatever else arrives, and the order keeps all but 1 / period of the picks.

A running request gets a token each step, and there is a pick whenever one ends: 200 steps are about 64 picks for
answers of some hundred tokens, a hundred of them at a time. The period decides how long the longest wait is, for in an
overload whoever the order puts last starves sooner or later (ADR 0015 has what was measured).
"""

from dataclasses import dataclass

from weir.policy.params import bounded, check_bounds
from weir.policy.seams import OrderQueue, Waiting
from weir.policy.sorted_ids import SortedIds


@dataclass(frozen=True, slots=True)
class StarvationParams:
    """`starvation` off: the order is as the policy says, and may starve."""

    starvation: bool = True
    threshold_picks: int = bounded(64, 1)
    period: int = bounded(5, 1)

    def __post_init__(self) -> None:
        check_bounds(self)


def guarded(inner: OrderQueue, params: StarvationParams) -> OrderQueue:
    """The queue with starvation control, if that is on."""
    return StarvationGuard(inner, params) if params.starvation else inner


class StarvationGuard:
    """Passes the oldest of the inner queue by it, in turn."""

    def __init__(self, inner: OrderQueue, params: StarvationParams) -> None:
        self._inner = inner
        self._params = params
        self._oldest: SortedIds[tuple[float, float]] = SortedIds()
        """By (picks when it was added, arrival): the first has been passed over most."""
        self._num_picks = 0
        self._num_since_turn = params.period

    def __len__(self) -> int:
        return len(self._inner)

    def ids(self) -> list[str]:
        return self._inner.ids()

    def add(self, request: Waiting) -> None:
        self._inner.add(request)
        self._oldest.add(request.request_id, (float(self._num_picks), request.arrived_at_s))

    def discard(self, request_id: str) -> None:
        self._inner.discard(request_id)
        self._oldest.discard(request_id)

    def try_peek(self, now_s: float) -> str | None:
        return self._try_starving() or self._inner.try_peek(now_s)

    def take(self, request_id: str, now_s: float) -> None:
        is_turn = request_id == self._try_starving()
        self._inner.take(request_id, now_s)
        self._oldest.discard(request_id)
        self._num_picks += 1
        self._num_since_turn = 1 if is_turn else self._num_since_turn + 1

    def _try_starving(self) -> str | None:
        """Who has been passed over too often, if it is time for one of those."""
        if self._num_since_turn < self._params.period:
            return None
        ascending = self._oldest.ascending
        if not ascending or self._num_picks - ascending[0][0][0] < self._params.threshold_picks:
            return None
        return ascending[0][1]
