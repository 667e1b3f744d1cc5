"""The figures of `weir bench serve`."""

import pytest

from weir.bench.serving.jobs import random_prompts
from weir.bench.serving.load import LoadConfig, ServedRequest
from weir.bench.serving.serve import block, summarize


def test_figures_follow_their_definitions() -> None:
    steady = ServedRequest(input_len=10, started_s=0.0, ttft_s=0.5, gaps_s=[0.1, 0.3], latency_s=0.9, output_len=3)
    failed = ServedRequest(input_len=99, started_s=0.0, error="HTTP 503")
    result = summarize([steady, failed], duration_s=2.0)
    assert (result["completed"], result["failed"]) == (1, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (10, 3)
    assert result["output_throughput"] == pytest.approx(1.5)
    assert result["median_ttft_ms"] == pytest.approx(500)
    assert result["median_tpot_ms"] == pytest.approx(200)
    assert result["p99_itl_ms"] == pytest.approx(300)
    assert "Successful requests:                    1" in block(result, LoadConfig("http://x", "m"))


def test_prompts_repeat_with_the_seed() -> None:
    assert random_prompts(3, 7, seed=4) == random_prompts(3, 7, seed=4)
    assert [len(prompt) for prompt in random_prompts(3, 7, seed=4)] == [7, 7, 7]
