"""A step on a GPU is reported when the GPU has done it: its pages may be another process's right after."""

import pytest

pytest.importorskip("triton", reason="Triton is installed on Linux only")

from tests.unit.model.late_device import WRITTEN, LateStream, late_runner

from weir.core.sampling import SamplingParams
from weir.engine.plan import ChunkPlan, SampleSpec, StepPlan
from weir.model.triton.batch import TritonLimits

LIMITS = TritonLimits(max_rows=64, max_sequences=4, max_context_tokens=256)
TABLE = (5, 2)
PROMPT = tuple(range(32))


def test_a_chunk_that_samples_nothing_is_reported_when_its_pages_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = LateStream()
    runner, pages = late_runner(monkeypatch, stream, 8, LIMITS)
    result = runner.run(StepPlan(0, (ChunkPlan(0, 0, PROMPT, TABLE, None),)))
    assert result.token_ids == {}
    assert stream.num_pending == 0
    assert bool((pages[list(TABLE)] == WRITTEN).all())
    assert float(pages.sum()) == WRITTEN * pages[list(TABLE)].numel(), "no other page is written"


def test_a_step_that_fails_has_ended_on_the_device_too(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = LateStream()
    runner, pages = late_runner(monkeypatch, stream, 8, LIMITS)
    sample = SampleSpec(SamplingParams(temperature=0.0), 0)
    with pytest.raises(RuntimeError, match="no logits of 1 rows"):
        runner.run(StepPlan(0, (ChunkPlan(0, 0, PROMPT, TABLE, sample),)))
    assert stream.num_pending == 0
    assert bool((pages[list(TABLE)] == WRITTEN).all())
