"""compose/tracing: the collector's configuration has the keys that the collector documents, and keeps errors and what
was slow. What is checked is the form: no collector runs here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="PyYAML is needed to read the configuration; `make setup-dev` installs it")

COMPOSE = Path(__file__).parents[2] / "compose"
# https://github.com/open-telemetry/opentelemetry-collector-contrib/tree/main/processor/tailsamplingprocessor
TAIL_SAMPLING_KEYS = {"decision_wait", "num_traces", "expected_new_traces_per_sec", "decision_cache", "policies"}
DECISION_CACHE_KEYS = {"sampled_cache_size", "non_sampled_cache_size"}
POLICY_KEYS: Mapping[str, set[str]] = {
    "status_code": {"status_codes"},
    "latency": {"threshold_ms", "upper_threshold_ms"},
    "probabilistic": {"sampling_percentage"},
}


@pytest.fixture(scope="module")
def collector() -> Any:
    return yaml.safe_load((COMPOSE / "tracing" / "collector.yaml").read_text())


def test_pipelines_are_made_of_what_is_configured_and_nothing_is_configured_in_vain(collector: Any) -> None:
    pipeline = collector["service"]["pipelines"]["traces"]
    for kind in ("receivers", "processors", "exporters"):
        assert set(pipeline[kind]) == set(collector[kind])
    assert pipeline["processors"][0] == "memory_limiter"


def test_the_tail_rule_has_documented_keys_alone(collector: Any) -> None:
    rule = collector["processors"]["tail_sampling"]
    assert rule.keys() <= TAIL_SAMPLING_KEYS
    assert rule["decision_cache"].keys() <= DECISION_CACHE_KEYS
    for policy in rule["policies"]:
        assert policy.keys() == {"name", "type", policy["type"]}
        assert policy[policy["type"]].keys() <= POLICY_KEYS[policy["type"]]


def test_errors_and_slow_requests_are_kept_and_a_share_of_the_rest(collector: Any) -> None:
    rule = collector["processors"]["tail_sampling"]
    by_type = {policy["type"]: policy[policy["type"]] for policy in rule["policies"]}
    assert by_type["status_code"]["status_codes"] == ["ERROR"]
    wait_s = float(rule["decision_wait"].removesuffix("s"))
    assert 0 < by_type["latency"]["threshold_ms"] < 1000 * wait_s, "a slow one is over before it is judged"
    assert 0 < by_type["probabilistic"]["sampling_percentage"] < 100


def test_the_overlay_starts_it_with_this_file_where_weir_may_send_to(collector: Any) -> None:
    overlay = yaml.safe_load((COMPOSE / "tracing" / "compose.yaml").read_text())
    whole = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
    (name,) = overlay["services"]
    assert (COMPOSE / overlay["configs"]["collector"]["file"]).is_file(), "relative to the first file's folder"
    assert collector["exporters"]["otlp"]["endpoint"].split(":")[0] in whole["services"]
    port = collector["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].split(":")[1]
    documented = (COMPOSE / "tracing" / "compose.yaml").read_text()
    assert f"OTLP_ENDPOINT=http://{name}:{port} " in documented
