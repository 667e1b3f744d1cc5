"""A real Prometheus scrapes a real stack, and answers what dashboards and rules ask."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from tests.metrics.dashboards import description
from tests.metrics.prometheus_server import PrometheusServer, running, tool
from tests.metrics.test_rules import RULE_FILES, rules

from weir.testing.stack import Stack, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(480)]

_FLAGS = ("--load", "dummy", "--model-shape", "tiny", "--max-context-tokens", "256", "--arena-bytes", str(64 << 20))
_LONG_S = 240


@contextmanager
def load(stack: Stack) -> Iterator[None]:
    """Requests of two lanes, one after the other, some of the same beginning, while the block lasts."""
    ended = threading.Event()
    failures: list[str] = []

    def ask() -> None:
        with httpx.Client(base_url=stack.http_url, timeout=120) as client:
            model = client.get("/v1/models").json()["data"][0]["id"]
            number = 0
            while not ended.is_set():
                number += 1
                lane = ("interactive", "standard")[number % 2]
                prompt = "One two three four five six. " * 5 + str(number % 4)
                body = {"model": model, "prompt": prompt, "max_tokens": 6, "ignore_eos": True, "lane": lane}
                answer = client.post("/v1/completions", json=body)
                if answer.status_code != httpx.codes.OK:
                    failures.append(answer.text)
                    return
                ended.wait(0.1)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    assert failures == []


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrometheusServer]:
    """Beside a stack under a little load, once everything that must have data has some."""
    tool("prometheus")  # skips before a stack is started for nothing
    with Stack(tmp_path_factory.mktemp("run"), flags=_FLAGS) as stack:
        urls = [entry["metrics_url"] for entry in stack.status()["processes"] if entry["metrics_url"]]
        targets = [url.removeprefix("http://").removesuffix("/metrics") for url in urls]
        with running(tmp_path_factory.mktemp("prometheus"), {"weir": targets}, RULE_FILES) as server, load(stack):
            yield server


def expressions() -> dict[str, bool]:
    """Of every panel, with Grafana's variables as Grafana puts them in -> whether it may be without data."""
    return {
        query.expression.replace("$__rate_interval", "1m").replace("$lane", ".*"): query.may_be_empty
        for dashboard in description().DASHBOARDS
        for panel in dashboard.panels
        for query in panel.queries
    }


def has_number(series: list[dict[str, Any]]) -> bool:
    return any(one["value"][1] != "NaN" for one in series)


def wait_for_data(server: PrometheusServer, asked: list[str]) -> None:
    """Of all of them. Fails with those that have none."""
    left = list(asked)

    def is_there() -> bool:
        left[:] = [text for text in left if not has_number(server.ask(text))]
        return not left

    try:
        wait_until(is_there, timeout_s=_LONG_S, what="every expression has data", interval_s=1.0)
    except TimeoutError as error:
        raise AssertionError(f"without data: {left}") from error


def test_every_process_is_scraped(prometheus: PrometheusServer) -> None:
    def are_up() -> bool:
        return [one["value"][1] for one in prometheus.ask("up")] == ["1"] * 5

    wait_until(are_up, timeout_s=_LONG_S, what="all targets are up")
    found = {one["metric"]["role"] for one in prometheus.ask("count by (role) (weir_process_uncollected_errors_total)")}
    assert found == {"gateway", "scheduler", "transfer", "prefill", "decode"}


def test_every_panel_has_an_answer_and_data_where_it_must(prometheus: PrometheusServer) -> None:
    asked = expressions()
    assert len(asked) > 60
    for text in asked:
        prometheus.ask(text)  # raises for what is no expression
    wait_for_data(prometheus, [text for text, may_be_empty in asked.items() if not may_be_empty])


def test_every_rule_is_evaluated_without_an_error_and_what_is_recorded_has_data(prometheus: PrometheusServer) -> None:
    recorded = [rule["record"] for rule in rules("record")]
    wait_for_data(prometheus, [name for name in recorded if name != "weir:kv_pages_per_sequence"])

    def health() -> dict[str, tuple[str, str]]:
        groups = prometheus.get("rules")["groups"]
        return {
            rule["name"]: (rule["health"], rule.get("lastError", "")) for group in groups for rule in group["rules"]
        }

    # "unknown" until a group's first turn, which comes at a time of its own.
    wait_until(lambda: ("unknown", "") not in health().values(), timeout_s=_LONG_S, what="every rule has had its turn")
    states = health()
    assert states == dict.fromkeys(states, ("ok", ""))
    assert states.keys() == {*recorded, *(rule["alert"] for rule in rules("alert"))}


def test_a_stack_that_is_well_fires_no_alert(prometheus: PrometheusServer) -> None:
    wait_for_data(prometheus, ["weir:requests_ended:rate5m > 0"])
    firing = prometheus.ask('ALERTS{alertstate="firing"}')
    assert [one["metric"]["alertname"] for one in firing] == []
