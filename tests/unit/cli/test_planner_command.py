"""What `weir planner` reads from pages of metrics, what it makes of them, and what it tells."""

import json
import math
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import ClassVar

import httpx
import pytest
from tests.guard import documents
from tests.guard.sources import ROOT
from typer.testing import CliRunner

from weir.cli.app import app
from weir.cli.planner import page_server
from weir.cli.planner.capacity import MeasuredCapacity, measured_profile
from weir.cli.planner.figures import Distribution, Figures, FiguresMissing, observation_of, with_backlog
from weir.cli.planner.page import FIGURES, DecisionLog, PlannerPage
from weir.core.addresses import LOOPBACK
from weir.core.cost import StepCost
from weir.core.roles import WorkerRole
from weir.planner.capacity import Prediction
from weir.planner.decision import Decision, PoolDecision, Reason, Switch
from weir.planner.observation import ExpectedLoad, PoolCount, Pools
from weir.runtime.metrics_port import MetricsPort
from weir.scheduling.limits import CoreLimits
from weir.sim.results.metrics import Slo
from weir.sim.spec import PoolSpec

COUNTS: Mapping[WorkerRole, PoolCount] = {"prefill": PoolCount(1), "decode": PoolCount(2)}
COEFFICIENTS = ("base_ms", "prefill_token_ms", "prefill_pair_ms", "decode_sequence_ms", "context_token_ms")


def page(num_requests: int, *, decode: str = "d", queued: int = 0) -> str:
    """Of a stack in which so many requests have ended: prompts of 90 and answers of 15 tokens, half of them in time."""
    half = num_requests // 2
    return f"""
# TYPE weir_gateway_requests_accepted_total counter
weir_gateway_requests_accepted_total{{process="g"}} {num_requests}
# TYPE weir_time_to_first_token_seconds histogram
weir_time_to_first_token_seconds_bucket{{process="g",le="1.0"}} {half}
weir_time_to_first_token_seconds_bucket{{process="g",le="2.5"}} {num_requests}
weir_time_to_first_token_seconds_bucket{{process="g",le="+Inf"}} {num_requests}
weir_time_to_first_token_seconds_sum{{process="g"}} {1.2 * num_requests}
weir_time_to_first_token_seconds_count{{process="g"}} {num_requests}
# TYPE weir_time_per_output_token_seconds histogram
weir_time_per_output_token_seconds_bucket{{process="g",le="0.1"}} {num_requests}
weir_time_per_output_token_seconds_bucket{{process="g",le="+Inf"}} {num_requests}
weir_time_per_output_token_seconds_sum{{process="g"}} {0.05 * num_requests}
# TYPE weir_request_prompt_tokens histogram
weir_request_prompt_tokens_bucket{{process="g",le="50.0"}} 0
weir_request_prompt_tokens_bucket{{process="g",le="100.0"}} {num_requests}
weir_request_prompt_tokens_bucket{{process="g",le="+Inf"}} {num_requests}
weir_request_prompt_tokens_sum{{process="g"}} {90 * num_requests}
# TYPE weir_request_output_tokens histogram
weir_request_output_tokens_bucket{{process="g",le="10.0"}} {half}
weir_request_output_tokens_bucket{{process="g",le="20.0"}} {num_requests}
weir_request_output_tokens_bucket{{process="g",le="+Inf"}} {num_requests}
weir_request_output_tokens_sum{{process="g"}} {15 * num_requests}
weir_scheduler_requests_queued{{process="s"}} {queued}
weir_scheduler_prefills_in_flight{{process="s"}} 2
weir_scheduler_requests_granted{{process="s"}} 6
weir_scheduler_reserved_pages{{process="s"}} 30
weir_arena_pages{{process="t"}} 100
weir_worker_max_sequences{{role="decode",process="{decode}"}} 8
weir_worker_prompt_tokens_computed_total{{role="prefill",process="p"}} {60 * num_requests}
weir_worker_prompt_tokens_cached_total{{role="prefill",process="p"}} {30 * num_requests}
""" + "".join(
        f'weir_worker_step_cost{{role="{role}",process="{role}",coefficient="{name}"}} 0.5\n'
        for role in ("prefill", "decode")
        for name in COEFFICIENTS
    )


def figures(at_s: float, *pages: str) -> Figures:
    return Figures.parse(at_s, pages)


def test_two_looks_make_an_observation() -> None:
    before, now = figures(100.0, page(10)), figures(105.0, page(30, queued=5))
    seen = with_backlog(observation_of(before, now, COUNTS, 1.0, 0.2), now, [80, 100])
    assert (seen.at_s, seen.span_s, seen.num_arrived) == (105.0, 5.0, 20)
    assert (seen.num_first_tokens, seen.num_ttft_met, seen.num_ended, seen.num_itl_met) == (20, 10, 20, 20)
    assert [seen.sum_ttft_s, seen.sum_itl_s] == pytest.approx([24.0, 1.0])
    assert set(seen.prompt_lengths) == {90}
    assert sum(seen.output_lengths) == pytest.approx(15 * 20)
    assert seen.cached_share == pytest.approx(1 / 3)
    assert seen.booked_share == pytest.approx(6 / 8), "sequences are scarcer than pages"
    assert seen.num_backlog_tokens == pytest.approx(7 * 90 * 2 / 3)


def test_a_series_that_two_gateways_show_counts_once() -> None:
    seen = observation_of(figures(0.0, page(10), page(10)), figures(5.0, page(30), page(30)), COUNTS, 1.0, 0.2)
    assert seen.num_arrived == 20
    assert seen.booked_share == pytest.approx(6 / 8)


def test_a_process_that_came_between_two_looks_has_nothing_to_compare_with() -> None:
    now = figures(5.0, page(10).replace('process="g"', 'process="new"'))
    assert observation_of(figures(0.0, page(4)), now, COUNTS, 1.0, 0.2).num_arrived == 0


@pytest.mark.parametrize(
    "name", ["weir_gateway_requests_accepted_total", "weir_scheduler_requests_granted", "weir_worker_max_sequences"]
)
def test_a_figure_that_is_missing_is_named(name: str) -> None:
    lacking = "\n".join(line for line in page(10).splitlines() if name not in line)
    with pytest.raises(FiguresMissing, match=name):
        observation_of(figures(0.0, page(5)), figures(5.0, lacking), COUNTS, 1.0, 0.2)


@pytest.mark.parametrize("value", ["NaN", "+Inf"])
def test_a_figure_that_is_no_number_is_missing(value: str) -> None:
    odd = page(10).replace('weir_arena_pages{process="t"} 100', f'weir_arena_pages{{process="t"}} {value}')
    with pytest.raises(FiguresMissing, match="weir_arena_pages"):
        figures(0.0, odd).gauge("weir_arena_pages")


def test_without_a_scheduler_the_backlog_is_missing() -> None:
    now = figures(
        5.0, "\n".join(line for line in page(10).splitlines() if "weir_scheduler_requests_queued" not in line)
    )
    seen = observation_of(figures(0.0, page(5)), now, COUNTS, 1.0, 0.2)
    with pytest.raises(FiguresMissing, match="requests_queued"):
        with_backlog(seen, now, [80])


def test_lengths_keep_shape_and_mean_however_many_they_are() -> None:
    spread = Distribution((10.0, 100.0), (9000.0, 900.0, 100.0), 200_000.0)
    lengths = spread.lengths()
    assert len(lengths) <= 256
    assert sum(lengths) / len(lengths) == pytest.approx(20.0, rel=0.1)
    assert len(set(lengths)) == 3
    assert Distribution((10.0,), (0.0, 0.0), 0.0).lengths() == ()


def test_who_looks_first_knows_the_lengths_of_what_was_before() -> None:
    assert set(Distribution.so_far(figures(0.0, page(10)), "weir_request_prompt_tokens").lengths()) == {90}


def test_costs_are_the_mean_of_those_that_were_measured() -> None:
    other = "".join(
        f'weir_worker_step_cost{{role="decode",process="e",coefficient="{name}"}} 1.5\n' for name in COEFFICIENTS
    )
    found = figures(0.0, page(1), other)
    assert found.step_cost("decode") == StepCost(1.0, 1.0, 1.0, 1.0, 1.0)
    assert found.step_cost("prefill") == StepCost(0.5, 0.5, 0.5, 0.5, 0.5)
    assert figures(0.0, "").step_cost("decode") is None


def test_a_capacity_is_measured_anew_when_steps_take_another_time() -> None:
    def spec(role: WorkerRole, base_ms: float) -> PoolSpec:
        profile = measured_profile(StepCost(base_ms, 0.02, 0.0, 0.1, 0.0), 1000)
        return PoolSpec(role, 1, profile, 8, 512, 512)

    capacity = MeasuredCapacity(Slo(ttft_s=1.0, tpot_s=0.1), CoreLimits())
    assert not capacity.is_known
    capacity.measure(spec("prefill", 10.0), spec("decode", 10.0))
    before = capacity.prefill_s(1024)
    capacity.measure(spec("prefill", 11.0), spec("decode", 11.0))
    assert capacity.prefill_s(1024) == before
    capacity.measure(spec("prefill", 30.0), spec("decode", 30.0))
    assert capacity.prefill_s(1024) > 1.5 * before


def test_a_capacity_knows_what_requests_ask_for_at_most() -> None:
    def predicted(max_tokens: int) -> Prediction:
        profile = measured_profile(StepCost(5.0, 0.02, 1e-6, 0.01, 1e-4), 100)
        pools = (PoolSpec("prefill", 1, profile, 8, 512, 512), PoolSpec("decode", 1, profile, 8, 512, 512))
        capacity.measure(*pools, max_tokens=max_tokens)
        return capacity.predict(ExpectedLoad(10.0, (100,), (20,)), Pools(1, 1))

    capacity = MeasuredCapacity(Slo(ttft_s=1.0, tpot_s=0.1), CoreLimits())
    few = predicted(20)
    assert predicted(22) == few
    assert predicted(1400).ttft_s > few.ttft_s, "pages are kept for what is asked for"


def test_what_requests_ask_for_at_most_is_on_the_page() -> None:
    asked = """
vllm:request_params_max_tokens_sum{engine="0"} 900
vllm:request_params_max_tokens_count{engine="0"} 3
"""
    assert figures(0.0, page(1), asked).mean_max_tokens() == 300
    assert figures(0.0, page(1)).mean_max_tokens() == 0


def decision(number: int = 1, wanted: int = 3, at_s: float = 10.0) -> Decision:
    prefill, decode = PoolDecision(wanted, 2, 3, Reason.FLOOR), PoolDecision(1, 2, 1, Reason.SWITCHED)
    switch = Switch("decode", "prefill")
    return Decision(number, at_s, prefill, decode, switch, 1.0, 1.5, math.nan, 0.05, 0.97, False, 0)


def test_a_decision_is_written_when_it_is_news_and_once_in_a_while() -> None:
    lines: list[str] = []
    log = DecisionLog(lines.append, every_s=60.0, mode="advise")
    for number, at_s in enumerate((10.0, 15.0, 69.0, 70.0)):
        log.decided(decision(number, at_s=at_s))
    log.decided(decision(9, wanted=4, at_s=71.0))
    told = [json.loads(line) for line in lines]
    assert [one["number"] for one in told] == [0, 3, 9]
    assert told[0]["prefill"] == {"wanted": 3, "current": 2, "delta": 1, "floor": 3, "reason": "floor"}
    assert told[0]["predicted_ttft_s"] is None
    assert told[0]["switch"] == {"from_role": "decode", "to_role": "prefill"}
    assert (told[0]["event"], told[0]["mode"]) == ("decision", "advise")


def scraped(page: PlannerPage) -> dict[str, float]:
    """By HTTP, as an autoscaler's Prometheus has it."""
    port = MetricsPort(LOOPBACK, 0, page.families)
    with page_server.served(port):
        text = httpx.get(f"http://{LOOPBACK}:{port.port}/metrics", trust_env=False).text
        found = (LOOPBACK, port.port)
    with pytest.raises(ConnectionRefusedError), socket.create_connection(found, timeout=5):
        pass
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line[:1] != "#"]
    return {name: float(value) for name, value in lines}


def test_a_port_that_is_taken_is_named() -> None:
    with served(OtherPage) as url:
        port = url.rpartition(":")[2]
        nobody = ("--gateway", url, "--scheduler", f"{LOOPBACK}:1", "--num-looks", "1")
        shown = CliRunner().invoke(app, ["planner", "scale", "--metrics-port", port, *nobody])
    assert shown.exit_code == 1
    assert f"nothing can be served on {LOOPBACK}:{port}" in " ".join(shown.output.split())


def test_an_old_decision_is_not_on_the_page() -> None:
    now_s = [0.0]
    page = PlannerPage(max_age_s=15.0, now_s=lambda: now_s[0])
    assert 'weir_planner_wanted_workers{role="prefill"}' not in scraped(page)
    page.show(decision())
    shown = scraped(page)
    assert shown['weir_planner_wanted_workers{role="prefill"}'] == 3
    assert shown['weir_planner_wanted_workers{role="decode"}'] == 1
    assert "weir_planner_predicted_ttft_seconds" not in shown, "what is not known is not made up"
    now_s[0] = 15.1
    assert not any("wanted" in name for name in scraped(page))
    assert scraped(page)["weir_planner_decisions_total"] == 1


def test_all_that_is_on_the_page_is_in_the_documents_and_nothing_else() -> None:
    page = PlannerPage(max_age_s=15.0)
    page.show(decision())
    assert {name.partition("{")[0] for name in scraped(page)} <= FIGURES.keys()
    [rows] = documents.tables(ROOT / "shared/docs/metrics.md", "The planner")
    assert {row[0].strip("`"): row[-1] for row in rows} == FIGURES


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--min-workers", "1"], "--min-workers '1': must be two whole numbers"),
        (["--min-workers", "4,1", "--max-workers", "3,3"], "must not be below least"),
        (["--attainment", "1.5"], "target 1.5"),
        (["--profile", "nobody"], "nobody"),
        (["scale"], "give its port by --metrics-port"),
    ],
)
def test_what_cannot_be_is_named(words: list[str], message: str) -> None:
    shown = CliRunner().invoke(app, ["planner", *words])
    assert shown.exit_code == 2
    assert message in " ".join(shown.output.split())


class KeyedPage(BaseHTTPRequestHandler):
    """A gateway's page that a tenant's key opens, and an operator's does not."""

    def do_GET(self) -> None:
        is_known = self.headers["Authorization"] == "Bearer tenant"
        self.send_response(200 if is_known else 401)
        self.end_headers()
        self.wfile.write(page(10).encode() if is_known else b"")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
        """Nothing."""


@contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """URL of a gateway's HTTP port."""
    with ThreadingHTTPServer((LOOPBACK, 0), handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://{LOOPBACK}:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def missing(url: str, *words: str) -> str:
    """What one look does not find, beside a scheduler that is not there."""
    nobody = ("--scheduler", f"{LOOPBACK}:1", "--num-looks", "1", "--tick-s", "0.2")
    shown = CliRunner().invoke(app, ["planner", "--gateway", url, *nobody, *words])
    assert shown.exit_code == 0, shown.output
    [told] = [json.loads(line) for line in shown.stdout.splitlines()]
    assert told["event"] == "missing"
    return str(told["figure"])


def test_pages_are_read_with_a_tenants_key_and_workers_with_an_operators() -> None:
    with served(KeyedPage) as url:
        assert missing(url, "--admin-key", "operator") == f"{url}/metrics: status 401"
        assert missing(url, "--admin-key", "operator", "--api-key", "tenant").startswith("the workers: ")


class OtherPage(KeyedPage):
    """What no gateway answers: text, or more than fits."""

    content: ClassVar[bytes] = b"<html>It works!</html>"
    num_times: ClassVar[int] = 1

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        with suppress(ConnectionError):  # the client has had enough
            for _ in range(self.num_times):
                self.wfile.write(self.content)


class EndlessPage(OtherPage):
    content = b"# " + b"x" * (1 << 20) + b"\n"
    num_times = 10_000


def test_what_is_no_page_of_metrics_is_told_and_is_no_end() -> None:
    with served(OtherPage) as url:
        assert missing(url).startswith("a page of metrics: what a gateway answers is none")


def test_a_page_is_read_no_further_than_it_may_be_long() -> None:
    with served(EndlessPage) as url:
        assert missing(url) == f"{url}/metrics: takes more than 16 MiB or 5 s"
