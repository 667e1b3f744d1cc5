"""The last steps of a worker, and who was in each, while somebody looks at them."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from weir.core.clock import Clock
from weir.engine.messages import ChunkComputed, EngineReport, Event, StepTiming, TokenSampled
from weir.telemetry.internals import MAX_STEP_SEQUENCES, MAX_STEPS, SequenceShare, StepRecord

WATCH_S = 10.0
"""Steps are remembered for so long after somebody asked; while nobody does, a step costs one comparison."""


class StepRing:
    """In the worker's event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._steps: deque[StepRecord] = deque(maxlen=MAX_STEPS)
        self._is_watched = False
        self._watched_until_s = 0.0

    def observe(self, report: EngineReport) -> None:
        """The events of a report with a timing are those of its step."""
        if not self._is_watched or report.timing is None:
            return
        if self._clock.now_s() > self._watched_until_s:
            self._is_watched = False
            self._steps.clear()
            return
        self._steps.append(_record_of(report.timing, report.events))

    def newest(self, max_steps: int) -> Sequence[StepRecord]:
        """In their order. From now on steps are remembered for a while."""
        now_s = self._clock.now_s()
        if now_s > self._watched_until_s:
            self._steps.clear()  # they would be followed by a gap
        self._is_watched, self._watched_until_s = True, now_s + WATCH_S
        return list(self._steps)[-max_steps:]


def _record_of(timing: StepTiming, events: Iterable[Event]) -> StepRecord:
    shares: dict[str, int] = {}
    num_prefill_tokens = 0
    for request_id, num_prompt_tokens in _shares_of(events):
        shares[request_id] = shares.get(request_id, 0) + num_prompt_tokens
        num_prefill_tokens += num_prompt_tokens
    named = list(shares.items())[:MAX_STEP_SEQUENCES]
    return StepRecord(
        step=timing.step,
        started_at_s=timing.started_ns / 1e9,
        duration_ms=(timing.ended_ns - timing.started_ns) / 1e6,
        num_sequences=timing.num_sequences,
        num_tokens=timing.num_tokens,
        num_prefill_tokens=num_prefill_tokens,
        sequences=tuple(SequenceShare(request_id, num_tokens) for request_id, num_tokens in named),
    )


def _shares_of(events: Iterable[Event]) -> Iterator[tuple[str, int]]:
    """A prompt's last chunk also samples a token: its sequence comes twice."""
    for event in events:
        if isinstance(event, ChunkComputed):
            yield event.key.request_id, event.num_tokens
        elif isinstance(event, TokenSampled):
            yield event.key.request_id, 0
