"""What `weir planner tune` reads from pages of metrics and from the limits in force."""

import json
import random
from typing import Any

import pytest
from typer.testing import CliRunner

from weir.cli.app import app
from weir.cli.planner.figures import Figures, FiguresMissing
from weir.cli.planner.page import DecisionLog
from weir.cli.planner.tune import TuneLoop, fixed_bounds, parse_knob, slos_of_lanes, tick_of
from weir.client.scheduling import SchedulingView
from weir.planner.tuning.settings import Knob, TunerSettings
from weir.planner.tuning.tuner import Tuner

ID = "decode-0-1a2b3c4d"


def view(toml: str = "", **values: dict[str, str]) -> SchedulingView:
    return SchedulingView(1, "fcfs", toml, "", "", "", values.pop("overrides", {}), {}, {}, **values)


def page(num_steps: int, *, queued: int = 3) -> str:
    """Of one decode worker whose steps take 20 ms and have two tokens, and one prefill worker that does nothing."""
    labels = f'process="{ID}",role="decode"'
    other = 'process="prefill-0-00000000",role="prefill"'
    return f"""
# TYPE weir_scheduler_requests_queued gauge
weir_scheduler_requests_queued{{process="s"}} {queued}
# TYPE weir_worker_max_sequences gauge
weir_worker_max_sequences{{{labels}}} 8
weir_worker_max_sequences{{{other}}} 4
weir_worker_max_sequences{{process="decode-9-00000000",role="prefill"}} 4
# TYPE weir_worker_max_batched_tokens gauge
weir_worker_max_batched_tokens{{{labels}}} 512
# TYPE weir_worker_sequences_running gauge
weir_worker_sequences_running{{{labels}}} 2
# TYPE weir_worker_tokens_generated counter
weir_worker_tokens_generated_total{{{labels}}} {2 * num_steps}
# TYPE weir_step_seconds histogram
weir_step_seconds_bucket{{{labels},sequences="1",le="+Inf"}} {num_steps // 2}
weir_step_seconds_bucket{{{labels},sequences="2",le="+Inf"}} {num_steps // 2}
weir_step_seconds_sum{{{labels},sequences="1"}} {0.01 * num_steps}
weir_step_seconds_sum{{{labels},sequences="2"}} {0.01 * num_steps}
weir_step_seconds_count{{{labels},sequences="1"}} {num_steps // 2}
weir_step_seconds_count{{{labels},sequences="2"}} {num_steps // 2}
"""


def test_a_look_has_each_workers_tokens_steps_and_bounds() -> None:
    before, now = Figures.parse(10.0, [page(100)]), Figures.parse(12.0, [page(200)])
    tick = tick_of(before, now, view("[workers.decode-0]\nmax_num_seqs = 8\n"))
    assert (tick.span_s, tick.num_queued) == (2.0, 3.0)
    decode, prefill = tick.workers
    assert (decode.worker_id, decode.role, decode.num_tokens, decode.num_steps) == (ID, "decode", 200, 100)
    assert decode.step_s == pytest.approx(0.02)
    assert (decode.num_running, dict(decode.bounds)) == (2, {"max_num_seqs": 8, "max_num_batched_tokens": 512})
    assert decode.fixed == {"max_num_seqs"}
    assert (prefill.role, prefill.num_steps, dict(prefill.bounds)) == ("prefill", 0, {"max_num_seqs": 4})
    with pytest.raises(FiguresMissing, match="weir_scheduler_requests_queued"):
        tick_of(before, Figures.parse(12.0, ["\n"]), view())


def test_a_worker_that_is_drained_or_a_spare_is_not_looked_at() -> None:
    drained = f'# TYPE weir_worker_is_drained gauge\nweir_worker_is_drained{{process="{ID}",role="decode"}} 1\n'
    before, now = Figures.parse(10.0, [page(100)]), Figures.parse(12.0, [page(200) + drained])
    assert [one.worker_id for one in tick_of(before, now, view()).workers] == ["prefill-0-00000000"]


@pytest.mark.parametrize(
    ("toml", "values", "fixed"),
    [
        ("", {}, set()),
        ("[workers.decode]\nmax_num_seqs = 8\n", {}, {"max_num_seqs"}),
        ("[workers.prefill]\nmax_num_seqs = 8\n", {}, set()),
        ("[workers.decode]\nmax_num_seqs = 8\n", {"tuned": {"workers.decode.max_num_seqs": "8"}}, set()),
        (f"[workers.{ID}]\nmax_num_seqs = 8\n", {"trial": {f"workers.{ID}.max_num_seqs": "8"}}, set()),
        (
            "[workers.decode]\nmax_num_seqs = 8\n",
            {"tuned": {"workers.decode.max_num_seqs": "4"}, "overrides": {"workers.decode.max_num_seqs": "8"}},
            {"max_num_seqs"},
        ),
        (
            "[workers.decode]\nmax_num_seqs = 4\n",
            {"tuned": {"workers.decode.max_num_seqs": "4"}, "overrides": {"workers.decode.max_num_seqs": "0"}},
            set(),
        ),
    ],
)
def test_what_is_set_by_hand_is_told_from_what_was_tuned(
    toml: str, values: dict[str, dict[str, str]], fixed: set[str]
) -> None:
    assert fixed_bounds(view(toml, **values), ID) == fixed


def test_the_strictest_lane_says_the_slo() -> None:
    toml = """
[lanes.a]
max_queued = 1
max_wait_s = 5
ttft_slo_ms = 900
[lanes.b]
max_queued = 1
max_wait_s = 5
ttft_slo_ms = 500
itl_slo_ms = 80
"""
    assert slos_of_lanes(view(f'default_lane = "a"\n{toml}')) == (0.5, 0.08)
    assert slos_of_lanes(view()) == (0.0, 0.0)


def test_a_knob_is_a_bound_of_a_role_and_two_numbers() -> None:
    assert parse_knob("decode.max_num_seqs=4,32") == Knob("decode", "max_num_seqs", 4, 32)
    for text in ("decode.max_num_seqs", "gateway.max_num_seqs=1,2", "decode.chunk_tokens=1,2", "decode.max_num_seqs=1"):
        with pytest.raises(ValueError, match="must be ROLE"):
            parse_knob(text)


class Scripted:
    """Pages of two decode workers before which requests wait, and a scheduler of which one can end what is tried."""

    def __init__(self) -> None:
        self.trial: dict[str, str] = {}
        self.num_asked = 0
        self.num_looks = 0
        self.lines: list[dict[str, Any]] = []
        settings = TunerSettings((parse_knob("decode.max_num_seqs=2,16"),), 2.0, 0.2, window_s=2.0)
        log = DecisionLog(lambda line: self.lines.append(json.loads(line)), every_s=1.0, mode="tune")
        itself: Any = self
        self.loop = TuneLoop(itself, itself, Tuner(settings, random.Random(0)), log, 2.0, acts=True)

    def read(self) -> Figures:
        self.num_looks += 1
        one = page(100 * self.num_looks)
        return Figures.parse(2.0 * self.num_looks, [one, one.replace(ID, "decode-1-00000000")])

    def describe(self) -> SchedulingView:
        return view(trial=self.trial)

    def try_limits(self, changes: dict[str, str], **_: object) -> None:
        self.num_asked += 1
        self.trial = dict(changes)


def test_what_is_tried_is_renewed_until_somebody_else_has_ended_it() -> None:
    scripted = Scripted()
    for _ in range(3):
        scripted.loop.step()
    tried = {"workers.decode-0-1a2b3c4d.max_num_seqs": "16"}
    assert (scripted.trial, scripted.num_asked) == (tried, 2)
    for ended in ({}, {"workers.decode-1-00000000.max_num_seqs": "4"}):
        scripted.trial, scripted.num_asked = dict(ended), 0
        scripted.loop.step()
        assert (scripted.trial, scripted.num_asked) == (ended, 0)
        assert scripted.lines[-1]["event"] == "tune_lost"
        scripted.loop.step()
        scripted.loop.step()
        assert scripted.lines[-1]["event"] == "tune_try", "another trial, later"


def test_options_of_tuning_go_with_its_mode() -> None:
    ended = CliRunner().invoke(app, ["planner", "switch", "--apply"])
    assert ended.exit_code == 2
    assert "go with the mode tune" in ended.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--tick-s", "101"), "--tick-s 101: must be at most 100 with tune"),
        (("--metrics-port", "9464"), "tune has no page of metrics"),
    ],
)
def test_options_that_tuning_cannot_go_by_are_refused(options: tuple[str, str], words: str) -> None:
    where = ("--gateway", "http://127.0.0.1:1", "--scheduler", "127.0.0.1:1", "--num-looks", "1")
    ended = CliRunner().invoke(app, ["planner", "tune", "--tune", "decode.max_num_seqs=4,32", *where, *options])
    assert (ended.exit_code, words in " ".join(ended.output.split())) == (2, True), ended.output
