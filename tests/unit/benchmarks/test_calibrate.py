"""What `python -m benchmarks.calibrate` sends, how it compares, and what it prints and keeps."""

import json
from dataclasses import replace

import pytest

from benchmarks.calibrate.__main__ import as_dict, report
from benchmarks.calibrate.live import CalibrationReport, LoadRun
from benchmarks.calibrate.loads import (
    DECODE_SIZES,
    PREFILL_SIZES,
    TARGET_STEP_MS,
    CalibrateConfig,
    Costs,
    LoadComparison,
    LoadFigures,
    Overheads,
    Round,
    Served,
    comparisons,
    figures_of,
    jobs_of,
    overheads_of,
    system_of,
    trace_of,
)
from weir.core.cost import StepCost
from weir.sim.simulator import simulate
from weir.sim.workloads.workload import SimRequest, Workload
from weir.worker.config import WorkerConfig
from weir.worker.roles.config import DecodeConfig, PrefillConfig

CONFIG = CalibrateConfig(num_requests=50)
COST = StepCost(4.0, 0.5, 0.0, 1.0, 0.0)
COSTS = Costs(COST, COST, prefill_contention=0.5, decode_contention=0.25)
OVERHEADS = Overheads(message_ms=2.0, hand_off_ms=3.0, idle_ttft_ms=0.0, idle_itl_ms=0.0)


def sizes_of(config: WorkerConfig, chunk_tokens: int) -> tuple[int, int, int]:
    return config.most_num_seqs, config.max_num_batched_tokens, chunk_tokens


def test_figures_are_those_of_a_round_by_hand() -> None:
    served = [Served(10.0, 10.2, 10.6, 5), Served(11.0, 11.4, 12.0, 4), Served(11.0, 11.3, 11.3, 1)]
    found = figures_of(served)
    assert found.mean_ttft_s == pytest.approx(0.3)
    assert found.mean_itl_s == pytest.approx((0.4 + 0.6) / (4 + 3))
    assert found.output_tok_per_s == pytest.approx(10 / 2.0)


def test_a_round_of_single_tokens_has_no_gap_to_measure() -> None:
    with pytest.raises(ValueError, match="no request had two tokens"):
        figures_of([Served(0.0, 1.0, 1.0, 1)])


@pytest.mark.parametrize(
    ("simulated", "error", "beyond", "is_within"),
    [
        ((95.0, 95.0, 95.0), -0.05, 0.0, True),
        ((120.0, 122.0, 500.0), 0.22, 0.12, True),
        ((126.0, 126.0, 126.0), 0.26, 0.16, False),
        ((70.0, 70.0, 70.0), -0.30, -0.20, False),
    ],
)
def test_an_error_counts_from_the_real_round_that_is_nearest(
    simulated: tuple[float, ...], error: float, beyond: float, is_within: bool
) -> None:
    one = LoadComparison("mean_ttft_s", (90.0, 110.0, 100.0), simulated)
    assert one.spread == pytest.approx((-0.1, 0.1))
    assert one.error == pytest.approx(error)
    assert one.error_beyond == pytest.approx(beyond)
    assert one.is_within is is_within


def test_each_figure_is_compared_over_all_rounds() -> None:
    rounds = [Round(LoadFigures(1.0, 2.0, 3.0), LoadFigures(4.0, 5.0, 6.0), 0.0, 0.0) for _ in range(2)]
    assert [(one.figure, one.real, one.simulated) for one in comparisons(rounds)] == [
        ("mean_ttft_s", (1.0, 1.0), (4.0, 4.0)),
        ("mean_itl_s", (2.0, 2.0), (5.0, 5.0)),
        ("output_tok_per_s", (3.0, 3.0), (6.0, 6.0)),
    ]


def test_both_sides_are_sent_the_same_requests() -> None:
    workload = trace_of(CONFIG, 5.0, seed=3)
    assert workload == trace_of(CONFIG, 5.0, seed=3)
    assert workload != trace_of(CONFIG, 5.0, seed=4)
    jobs = jobs_of(workload, seed=3)
    assert [(len(job.prompt), job.output_len, job.at_s) for job in jobs] == [
        (request.num_prompt_tokens, request.num_output_tokens, request.arrival_s) for request in workload.requests
    ]
    assert jobs[0].at_s == 0.0
    assert len({tuple(job.prompt) for job in jobs}) == len(jobs)


def test_lengths_stay_in_their_bounds_and_reach_over_them() -> None:
    requests = trace_of(CalibrateConfig(num_requests=2000), 5.0, seed=0).requests
    for lengths, (low, high) in (
        ([request.num_prompt_tokens for request in requests], CONFIG.prompt_len),
        ([request.num_output_tokens for request in requests], CONFIG.output_len),
    ):
        assert (min(lengths), max(lengths)) == (low, high)


def test_what_the_first_token_takes_longer_is_the_way_of_four_messages() -> None:
    found = overheads_of(idle_ttft_s=0.030, idle_itl_s=0.010, hand_off_s=-0.001)
    assert found.message_ms == pytest.approx(5.0)
    assert found.hand_off_ms == 0.0
    assert overheads_of(0.010, 0.030, None) == Overheads(0.0, None, 10.0, 30.0)


def test_an_idle_request_is_simulated_to_take_what_the_delays_say() -> None:
    """2 ms each of four messages, a decision's 0.05 ms, and a step of 4 + 1 ms that computes one token."""
    workload = Workload("one", (SimRequest("r", 0.0, 1, 3, 3),))
    outcome = simulate(system_of(COSTS, OVERHEADS, num_pages=200), workload).outcomes[0]
    assert outcome.first_token_s == pytest.approx(4 * 0.002 + 0.00005 + 0.005)
    assert outcome.last_token_s == pytest.approx(
        (outcome.first_token_s or 0) + 2 * 0.005 + 0.003 * (not outcome.is_local)
    )


def test_a_hand_off_that_was_never_seen_takes_what_profiles_say() -> None:
    spec = system_of(COSTS, Overheads(2.0, None, 0.0, 0.0), num_pages=200)
    assert [pool.profile.hand_off_ms for pool in spec.pools] == [1.5, 1.5]


def test_simulated_workers_have_the_sizes_of_real_ones() -> None:
    prefill, decode = PrefillConfig(), DecodeConfig()
    assert sizes_of(prefill, prefill.chunk_tokens) == PREFILL_SIZES
    assert sizes_of(decode, decode.chunk_tokens) == DECODE_SIZES
    assert prefill.target_step_ms == decode.target_step_ms == TARGET_STEP_MS
    pools = system_of(COSTS, OVERHEADS, num_pages=200).pools
    assert [pool.target_step_ms for pool in pools] == [TARGET_STEP_MS] * 2


def test_each_simulated_worker_is_slowed_down_as_the_real_one_has_measured() -> None:
    pools = system_of(COSTS, OVERHEADS, num_pages=200).pools
    assert [pool.profile.contention for pool in pools] == [0.5, 0.25]


@pytest.mark.parametrize("wrong", [{"loads": ()}, {"loads": (0.0,)}, {"rounds": 1}, {"num_requests": 1}])
def test_a_configuration_that_measures_nothing_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        CalibrateConfig(**wrong)  # type: ignore[arg-type]


REAL = LoadFigures(0.100, 0.010, 50.0)
FAST = LoadFigures(0.050, 0.010, 50.0)
REPORTED = CalibrateConfig(loads=(0.5,), rounds=2)
QUALITY = {"steps": 100.0, "r2": 0.9, "error_p05": -0.1, "error_p95": 0.2}


def found(simulated: LoadFigures) -> CalibrationReport:
    rounds = (Round(REAL, simulated, 0.2, 0.4),) * 2
    run = LoadRun(0.5, 1.5, rounds, (COSTS,) * 2)
    overheads = Overheads(2.0, None, 20.0, 12.0)
    return CalibrationReport(overheads, 3.0, 1000, 2, (run,), {"prefill": QUALITY, "decode": QUALITY})


def test_the_table_has_both_sides_the_error_and_the_verdict() -> None:
    text = report(REPORTED, found(FAST), load_before=0.0)
    assert "| 0.5 (1.50/s) | mean TTFT, ms | 100.0 [100.0, 100.0] | 50.0 [50.0, 50.0] | -50.0% |" in text
    assert text.count("**outside**") == 1
    assert "2 of 3 figures are within." in text
    assert "prefilled 20% of the prompts, simulated 40%" in text
    assert "hand-off never seen" in text
    assert "decode_sequence_ms 1, context_token_ms 0, contention 0.25" in text


def test_what_is_kept_can_be_read_again_and_says_the_same() -> None:
    values = json.loads(json.dumps(as_dict(REPORTED, found(REAL), load_before=1.0)))
    assert [(one["figure"], one["error"], one["is_within"]) for one in values["compared"]] == [
        ("mean_ttft_s", 0.0, True),
        ("mean_itl_s", 0.0, True),
        ("output_tok_per_s", 0.0, True),
    ]
    assert values["measured"]["loads"][0]["rounds"][0]["simulated_local_share"] == 0.4


def test_a_measured_hand_off_is_values() -> None:
    calibration = found(REAL)
    seen = replace(calibration, overheads=replace(calibration.overheads, hand_off_ms=3.25))
    assert "hand-off 3.25 ms" in report(REPORTED, seen, load_before=0.0)
