"""Plans judged by real simulations, small."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weir.cli.app import app
from weir.sim.planning import PlanJob, PlanLimits, PoolSizes, guess_prefill_share, make_plan, run_once
from weir.sim.profile import load_profile
from weir.sim.results.metrics import Slo, Slos
from weir.sim.workloads.traces import Replay, load_workload


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n" + "2000,20\n500,60\n" * 40)
    return path


def job(trace: Path, rate_a_s: float, seeds: tuple[int, ...] = (0,)) -> PlanJob:
    replay = Replay(num_requests=60, rate_a_s=rate_a_s, arrivals="poisson")
    return PlanJob(trace, replay, Slos(Slo(ttft_s=0.3, worst_gap_s=0.1)), load_profile("h100-llama3-8b"), seeds=seeds)


def test_a_heavier_load_needs_more_workers_and_the_best_is_enough(trace: Path) -> None:
    light, heavy = (make_plan(job(trace, rate), PlanLimits(max_workers=8)) for rate in (4.0, 150.0))
    assert light.plan.best is not None
    assert heavy.plan.best is not None
    assert light.plan.best.pools.num_workers < heavy.plan.best.pools.num_workers
    again = run_once(job(trace, 150.0), heavy.plan.best.pools, 0)
    assert again.attainment >= 0.9
    assert [candidate.cost for candidate in heavy.by_cost()] == sorted(c.cost for c in heavy.plan.candidates)


def test_every_seed_is_judged(trace: Path) -> None:
    planned = make_plan(job(trace, 4.0, seeds=(0, 1, 2)), PlanLimits(max_workers=2))
    assert {len(runs) for runs in planned.runs.values()} == {3}
    assert planned.plan.candidates[0].attainment.num == 3


def test_long_prompts_and_short_answers_begin_with_more_prefill_workers(tmp_path: Path, trace: Path) -> None:
    chatty = tmp_path / "chatty.csv"
    chatty.write_text("num_prefill_tokens,num_decode_tokens\n" + "50,900\n" * 9)
    step = load_profile("h100-llama3-8b").step
    shares = [
        guess_prefill_share(load_workload(p, Replay(arrivals="burst")), step, step, 2048) for p in (trace, chatty)
    ]
    assert shares[0] > 0.5 > shares[1]


def test_the_command_names_the_cheapest_as_a_table_and_as_json(trace: Path) -> None:
    words = ["plan", str(trace), "--profile", "h100-llama3-8b", "--ttft-ms", "300", "--rate", "4"]
    words += ["--arrivals", "poisson", "--num-requests", "30", "--max-gpus", "2", "--seeds", "1"]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    assert "cheapest colocated: 1 colocated, cost 1" in shown.stdout
    plan = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert (plan["best"]["num_local"], plan["best"]["is_enough"]) == (1, True)


def test_a_plan_that_no_number_meets_fails_and_shows_what_was_tried(trace: Path) -> None:
    words = ["plan", str(trace), "--profile", "h100-llama3-8b", "--ttft-ms", "1", "--rate", "4"]
    words += ["--arrivals", "poisson", "--num-requests", "30", "--max-gpus", "2", "--seeds", "1"]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 1
    assert "cheapest split: none of up to 2 workers is enough" in shown.stdout
    assert "at 0.0%; try a weaker SLO" in shown.stdout, "no number of workers prefills in a millisecond"


def test_a_limits_file_without_slos_asks_for_nothing(trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    words = ["plan", str(trace), "--profile", "h100-llama3-8b", "--arrivals", "burst", "--limits-file", str(file)]
    file.write_text('default_lane = "a"\n[lanes.a]\nmax_queued = 9\nmax_wait_s = 5\n')
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 2
    assert "whose lanes have SLOs" in shown.output


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "--ttft-ms"),
        (["--ttft-ms", "100"], "arrivals 'trace'"),
        (["--ttft-ms", "100", "--arrivals", "sometimes"], "arrivals 'sometimes'"),
        (["--ttft-ms", "100", "--arrivals", "burst", "--attainment", "2"], "target 2"),
        (["--ttft-ms", "100", "--arrivals", "burst", "--decode-price", "0"], "price of decode 0"),
        (["--ttft-ms", "100", "--arrivals", "burst", "--decode-profile", "none"], "profile 'none'"),
        (["--ttft-ms", "100", "--arrivals", "burst", "--policy", "none"], "none"),
    ],
)
def test_an_option_that_cannot_be_used_is_named(trace: Path, words: list[str], named: str) -> None:
    shown = CliRunner().invoke(app, ["plan", str(trace), "--profile", "h100-llama3-8b", *words])
    assert shown.exit_code == 2
    assert named in shown.output


def test_pools_are_spelled_out() -> None:
    assert [str(pools) for pools in (PoolSizes(2, 3), PoolSizes(num_local=4))] == [
        "2 prefill + 3 decode",
        "4 colocated",
    ]
