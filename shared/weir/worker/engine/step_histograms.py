"""How large a worker's steps are, and how long they take, counted in its event loop once a step."""

from bisect import bisect_left

from weir.engine.messages import StepTiming
from weir.telemetry.catalog.histograms import (
    SEQUENCES_EDGES,
    STEP_EDGES,
    STEP_SECONDS,
    STEP_SEQUENCES,
    STEP_TOKENS,
    VLLM_ITERATION_EDGES,
)
from weir.telemetry.described import HistogramFigure
from weir.telemetry.histogram import Histogram

_RANGE_ENDS = (1, 4, 8, 16, 32, 64, 128)
_RANGES = ("1", "2-4", "5-8", "9-16", "17-32", "33-64", "65-128", "129+")
"""Of sequences in a step: its time is told apart by these."""


class StepHistograms:
    """Since the worker took its role."""

    def __init__(self) -> None:
        self._sequences = Histogram(SEQUENCES_EDGES)
        self._tokens = Histogram(VLLM_ITERATION_EDGES)
        self._seconds: dict[str, Histogram] = {}

    def observe(self, timing: StepTiming) -> None:
        self._sequences.observe(timing.num_sequences)
        self._tokens.observe(timing.num_tokens)
        sequences = _RANGES[bisect_left(_RANGE_ENDS, timing.num_sequences)]
        seconds = self._seconds.get(sequences)
        if seconds is None:
            seconds = self._seconds[sequences] = Histogram(STEP_EDGES)
        seconds.observe(timing.duration_s)

    def figures(self) -> list[HistogramFigure]:
        return [
            HistogramFigure(STEP_SEQUENCES.name, self._sequences.value()),
            HistogramFigure(STEP_TOKENS.name, self._tokens.value()),
            *(
                HistogramFigure(STEP_SECONDS.name, self._seconds[sequences].value(), (("sequences", sequences),))
                for sequences in _RANGES
                if sequences in self._seconds
            ),
        ]
