"""Sizes and times of a worker's steps."""

import pytest

from weir.engine.messages import StepTiming
from weir.telemetry.catalog.histograms import STEP_SECONDS, STEP_SEQUENCES, STEP_TOKENS
from weir.worker.engine.step_histograms import StepHistograms


def timing(num_sequences: int, num_tokens: int, duration_s: float) -> StepTiming:
    return StepTiming(1, 0, 0, num_sequences, num_tokens, duration_s=duration_s)


def test_each_step_counts_once_and_its_time_by_its_sequences() -> None:
    steps = StepHistograms()
    for step in (timing(1, 1, 0.01), timing(3, 40, 0.02), timing(4, 4, 0.03), timing(500, 500, 1.0)):
        steps.observe(step)
    found = {(figure.name, figure.labels): figure.value for figure in steps.figures()}
    assert (found[STEP_SEQUENCES.name, ()].num, found[STEP_SEQUENCES.name, ()].total) == (4, 508)
    assert found[STEP_TOKENS.name, ()].total == 545
    seconds = {labels[0][1]: value for (name, labels), value in found.items() if name == STEP_SECONDS.name}
    assert {sequences: value.num for sequences, value in seconds.items()} == {"1": 1, "2-4": 2, "129+": 1}
    assert seconds["2-4"].total == pytest.approx(0.05)
