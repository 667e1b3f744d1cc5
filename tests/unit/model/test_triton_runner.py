"""A step on a GPU is reported when the GPU has done it: its pages may be another process's right after."""

from dataclasses import fields, replace
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is installed on Linux only")

from tests.unit.model.late_device import WRITTEN, LateStream, late_runner

from weir.core.sampling import SamplingParams
from weir.engine.plan import ChunkPlan, SampleSpec, StepPlan
from weir.model.triton.batch import TritonLimits, is_sampled_on_device

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


ON_DEVICE: dict[str, Any] = {"temperature": 0.5, "seed": 9, "prompt_logprobs": 1}
"""Parameters that the kernels know or that sample nothing, each with another value than its default."""
ON_HOST: dict[str, Any] = {
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
    "frequency_penalty": -0.2,
    "logit_bias": ((3, 1.0),),
    "logprobs": 0,
}


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
def test_a_parameter_that_the_kernels_do_not_know_brings_its_row_to_the_host(name: str) -> None:
    value = {**ON_DEVICE, **ON_HOST}[name]
    params = SamplingParams()
    assert value != getattr(params, name)
    assert is_sampled_on_device(SampleSpec(params, 0))
    assert is_sampled_on_device(SampleSpec(replace(params, **{name: value}), 0)) is (name in ON_DEVICE)


def test_a_row_with_masked_tokens_is_sampled_on_the_host() -> None:
    assert not is_sampled_on_device(SampleSpec(SamplingParams(), 0, masked_token_ids=(2,)))
