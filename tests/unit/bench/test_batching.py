"""The comparison of batching rules, in simulated time: a step costs a constant and something a token."""

from pathlib import Path

import pytest

from weir.bench.batching import (
    BatchingConfig,
    Bench,
    as_tables,
    compare,
    make_jobs,
    pages_of_largest,
    with_poisson_arrivals,
)
from weir.bench.solo import EngineJob, run_alone
from weir.core.clock import ManualClock
from weir.core.sampling import SamplingParams
from weir.engine.batching.batcher import BatchLimits
from weir.engine.batching.own_rules import Batching, JoinSettings
from weir.engine.batching.running import RunningSettings
from weir.engine.plan import StepPlan, StepResult
from weir.testing.runner import HashRunner, reference_tokens

VOCAB_SIZE = 50
STEP_S = 0.010
TOKEN_S = 0.002


class SimulatedTime(ManualClock):
    """Waiting takes no time."""

    def wait_until(self, at_s: float) -> None:
        self.advance(max(0.0, at_s - self.now_s()))


class CostedRunner:
    """A hash for a model; each step takes its simulated time."""

    def __init__(self, num_pages: int, time: SimulatedTime) -> None:
        self._runner = HashRunner(num_pages, VOCAB_SIZE)
        self._time = time

    def run(self, plan: StepPlan) -> StepResult:
        self._time.advance(STEP_S + TOKEN_S * plan.num_tokens)
        return self._runner.run(plan)


def limits(max_num_seqs: int) -> BatchLimits:
    return BatchLimits(max_num_seqs, 512, 512, 2048, VOCAB_SIZE, max_stall_s=1e9)


def bench(jobs: list[EngineJob], max_num_seqs: int) -> Bench:
    time = SimulatedTime()
    num_pages = pages_of_largest(jobs, max_num_seqs)
    return Bench("hash", CostedRunner(num_pages, time), limits(max_num_seqs), num_pages, time)


@pytest.fixture
def lengths_path(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.csv"
    rows = [f"{32 * (1 + index % 7)},{80 * (1 + index * index % 23)}" for index in range(64)]
    path.write_text("\n".join(["num_prefill_tokens,num_decode_tokens", *rows]))
    return path


def test_continuous_batching_wins_over_held_rows_and_less_over_dropped_ones(lengths_path: Path) -> None:
    config = BatchingConfig("hash", lengths_path, num_jobs=48, max_num_seqs=8, rounds=1)
    jobs = make_jobs(config, VOCAB_SIZE, 2048)
    report = compare(config, jobs, bench(jobs, config.max_num_seqs))
    ratio = {result.rule: result.ratio for result in report.at_once}
    assert ratio["continuous"] == 1.0
    assert ratio["static-hold"] > ratio["static"] > 1.0
    assert ratio["static-hold"] > 1.5
    assert all(result.page_waste < 0.04 for result in report.at_once)
    continuous, dynamic = report.poisson
    assert dynamic.p99_latency_s > continuous.p99_latency_s
    assert [table.row_count for table in as_tables(report)] == [3, 2]


def test_a_run_draws_every_token_of_every_job_at_the_times_that_steps_take() -> None:
    jobs = [EngineJob((1, 2, 3), 4), EngineJob((4,), 2, arrives_at_s=5.0)]
    time = SimulatedTime()
    run = run_alone(jobs, CostedRunner(20, time), limits(4), RunningSettings(), 20, time)
    for job, record in zip(jobs, run.records, strict=True):
        expected = reference_tokens(job.prompt_token_ids, SamplingParams(), job.num_output_tokens, VOCAB_SIZE)
        assert record.token_ids == expected
    assert run.records[0].first_token_s == pytest.approx(STEP_S + 3 * TOKEN_S)
    assert run.records[0].latency_s == pytest.approx(4 * STEP_S + 6 * TOKEN_S)
    assert run.records[1].latency_s == pytest.approx(2 * STEP_S + 2 * TOKEN_S)
    assert run.duration_s == pytest.approx(5.0 + 2 * STEP_S + 2 * TOKEN_S)


def test_a_dynamic_batch_waits_its_window_out_in_a_run() -> None:
    jobs = [EngineJob((1,), 1), EngineJob((2,), 1, arrives_at_s=0.03)]
    settings = RunningSettings(JoinSettings(Batching.DYNAMIC, window_s=0.1))
    time = SimulatedTime()
    run = run_alone(jobs, CostedRunner(20, time), limits(4), settings, 20, time)
    assert run.num_steps == 1
    assert run.records[0].latency_s == pytest.approx(0.1 + STEP_S + 2 * TOKEN_S)


def test_too_few_rows_or_too_long_ones_are_refused(lengths_path: Path) -> None:
    with pytest.raises(ValueError, match="64 rows, num_jobs is 65"):
        make_jobs(BatchingConfig("hash", lengths_path, num_jobs=65), VOCAB_SIZE, 2048)
    with pytest.raises(ValueError, match="the model's context is 16"):
        make_jobs(BatchingConfig("hash", lengths_path, num_jobs=64), VOCAB_SIZE, 16)


def test_poisson_arrivals_have_the_asked_rate() -> None:
    coming = with_poisson_arrivals([EngineJob((1,), 1)] * 2000, 4.0, seed=1)
    assert coming[0].arrives_at_s == 0.0
    assert coming[-1].arrives_at_s == pytest.approx(500.0, rel=0.1)
