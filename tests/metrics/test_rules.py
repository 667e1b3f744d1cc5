"""Rules of Prometheus: valid, tested against a made-up past, and about series that there are."""

import re
import subprocess
from typing import Any

import pytest
import yaml
from tests.metrics.prometheus_server import METRICS, RULES, tool

from weir.telemetry.catalog.histograms import HISTOGRAMS
from weir.telemetry.described import CATALOG

RULE_FILES = (RULES / "recorded.yml", RULES / "alerts.yml")
TEST_FILES = (RULES / "tests.yml", RULES / "tests_of_hours.yml")
_NAME = re.compile(r"\bweir_\w+")
_RECORDED = re.compile(r"\bweir:[\w:]+")


def rules(kind: str) -> list[dict[str, Any]]:
    groups = [group for path in RULE_FILES for group in yaml.safe_load(path.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


def exported_names() -> set[str]:
    parts = ("_bucket", "_sum", "_count")
    return {entry.name for entry in CATALOG} | {f"{entry.name}{part}" for entry in HISTOGRAMS for part in parts}


def test_promtool_finds_the_rules_valid() -> None:
    checked = subprocess.run(
        [tool("promtool"), "check", "rules", *map(str, RULE_FILES)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_promtool_finds_the_configuration_valid() -> None:
    checked = subprocess.run(
        [tool("promtool"), "check", "config", "--syntax-only", str(METRICS / "prometheus.yml")],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("path", TEST_FILES, ids=lambda path: path.stem)
def test_alerts_fire_when_they_should_and_not_before(path: Any) -> None:
    checked = subprocess.run(
        [tool("promtool"), "test", "rules", path.name],
        cwd=RULES, capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_alert_is_tested_for_silence_and_for_firing() -> None:
    cases: dict[str, set[bool]] = {}
    for path in TEST_FILES:
        for group in yaml.safe_load(path.read_text())["tests"]:
            for case in group["promql_expr_test"]:
                if named := re.search(r'alertname="(\w+)",alertstate="firing"', case["expr"]):
                    cases.setdefault(named[1], set()).add(bool(case["exp_samples"]))
    assert cases == {rule["alert"]: {True, False} for rule in rules("alert")}


def test_rules_ask_for_series_that_there_are() -> None:
    recorded = {rule["record"] for rule in rules("record")}
    expressions = [rule["expr"] for kind in ("record", "alert") for rule in rules(kind)]
    assert {name for text in expressions for name in _NAME.findall(text)} - exported_names() == set()
    assert {name for text in expressions for name in _RECORDED.findall(text)} - recorded == set()
    assert len(recorded) == len(rules("record"))


def test_every_alert_says_how_urgent_it_is_and_what_is_wrong() -> None:
    for rule in rules("alert"):
        assert rule["labels"]["severity"] in ("page", "ticket", "info"), rule["alert"]
        assert rule["annotations"]["summary"].endswith("."), rule["alert"]
