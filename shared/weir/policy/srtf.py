"""Shortest remaining time first, with TRAIL's limited preemption (Shahout et al., arXiv 2410.01035).

Who waits is ordered by predicted output. In a batch, the sequences with the fewest predicted tokens left are computed;
one may be paused only while it has less than `max_age` of its predicted output, later it runs to its end. Pages of
paused sequences stay: dropping and recomputing them costs more than first come, first served.
"""

import math
from dataclasses import dataclass

from weir.policy.estimators import RecentMean
from weir.policy.keyed_orders import KeyedQueue
from weir.policy.params import bounded
from weir.policy.seams import BatchView, GateDecision, Member, OrderQueue, Policy, Waiting
from weir.policy.starvation import StarvationParams, guarded


@dataclass(frozen=True, slots=True)
class SrtfParams(StarvationParams):
    """`max_age`: TRAIL's C, a share of the predicted output. `max_pauses`: of one sequence. What is paused or waits in
    a worker for `max_pause_s` goes first."""

    max_age: float = bounded(0.8, 0, 1)
    max_pauses: int = bounded(3, 0)
    max_pause_s: float = bounded(10.0, 0)


def make_srtf(params: SrtfParams) -> Policy:
    return Policy("srtf", SrtfOrder(params), SrtfGate(params), step_budget=None, is_preemptive=True, reads_cache=False)


class SrtfOrder:
    """By predicted output; without a prediction, by the mean of what has ended, and before that by `max_tokens`."""

    def __init__(self, params: SrtfParams) -> None:
        self._params = params
        self._lengths = RecentMean()

    def new_queue(self) -> OrderQueue:
        return guarded(KeyedQueue(lambda request: (self.rank(request),)), self._params)

    def rank(self, request: Waiting) -> float:
        if request.predicted_output_tokens is not None:
            return request.predicted_output_tokens
        mean = self._lengths.value
        return float(request.max_tokens) if mean is None else mean

    def finished(self, request: Waiting, num_output_tokens: int, now_s: float) -> None:
        self._lengths.add(num_output_tokens)


class SrtfGate:
    """Computes those that have least left, lane by lane; never idle while anything can be computed."""

    def __init__(self, params: SrtfParams) -> None:
        self._params = params
        self._num_pauses: dict[str, int] = {}
        self._paused: frozenset[str] = frozenset()

    def decide(self, view: BatchView, now_s: float) -> GateDecision:
        """Of equals, those in the batch come before those that wait, in their order."""
        candidates = sorted(
            [(self._key(member, now_s, True), 0, index) for index, member in enumerate(view.running)]
            + [(self._key(member, now_s, False), 1, index) for index, member in enumerate(view.waiting)]
        )
        num_room, num_free_tokens = view.max_running, view.num_free_tokens
        joining: list[int] = []
        chosen: set[int] = set()
        for _, is_waiting, index in candidates:
            if num_room <= 0:
                break
            if not is_waiting:
                chosen.add(index)
                num_room -= 1
                continue
            # One that lacks pages holds up all after it, but those who bring their own: these may be what it lacks.
            num_missing_tokens = view.waiting[index].num_missing_tokens
            num_free_tokens -= num_missing_tokens
            if num_free_tokens >= 0 or num_missing_tokens == 0:
                joining.append(index)
                num_room -= 1
        paused = [index for index in range(len(view.running)) if index not in chosen]
        self._remember(view, paused)
        return GateDecision(joining, paused)

    @property
    def next_deadline_s(self) -> float | None:
        return None

    def _key(self, member: Member, now_s: float, is_running: bool) -> tuple[int, int, float]:
        """(lane, 0 for those that run to their end and 1 for those that waited long enough, tokens left)."""
        if is_running and member.request_id not in self._paused:
            may_pause = self._num_pauses.get(member.request_id, 0) < self._params.max_pauses and not self._is_late(
                member
            )
            turn = 2 if may_pause else 0
        else:
            turn = 1 if now_s - member.waits_since_s >= self._params.max_pause_s else 2
        return -member.lane_priority, turn, _num_left(member)

    def _is_late(self, member: Member) -> bool:
        predicted = member.predicted_output_tokens
        return predicted is not None and member.num_output_tokens >= self._params.max_age * predicted

    def _remember(self, view: BatchView, paused: list[int]) -> None:
        """How often each sequence of the batch was paused; those that left are forgotten."""
        now_paused = frozenset(view.running[index].request_id for index in paused)
        present = {member.request_id for member in view.running}
        self._num_pauses = {i: n for i, n in self._num_pauses.items() if i in present}
        for request_id in now_paused - self._paused:
            self._num_pauses[request_id] = self._num_pauses.get(request_id, 0) + 1
        self._paused = now_paused


def _num_left(member: Member) -> float:
    if member.predicted_output_tokens is None:
        return math.inf
    return max(0.0, member.predicted_output_tokens - member.num_output_tokens)
