"""The files of Grafana are what their description says, and ask for series that there are."""

import json
import re
from typing import Any

import yaml
from tests.metrics.dashboards import description
from tests.metrics.prometheus_server import METRICS, ROOT
from tests.metrics.test_rules import exported_names, rules


def documents() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(description().FOLDER.glob("*.json"))]


def test_the_files_are_what_the_script_writes() -> None:
    written = {path.stem: path.read_text() for path in description().FOLDER.glob("*.json")}
    assert written == {one.name: description().text_of(one) for one in description().DASHBOARDS}


def test_panels_ask_for_series_that_there_are() -> None:
    targets = [target for one in documents() for panel in one["panels"] for target in panel["targets"]]
    expressions = [target["expr"] for target in targets if "expr" in target]
    assert len(expressions) > 60
    assert {name for text in expressions for name in re.findall(r"\bweir_\w+", text)} - exported_names() == set()
    recorded = {rule["record"] for rule in rules("record")}
    assert {name for text in expressions for name in re.findall(r"\bweir:[\w:]+", text)} - recorded == set()


def test_panels_lie_beside_one_another() -> None:
    for one in documents():
        taken: set[tuple[int, int]] = set()
        for panel in one["panels"]:
            place = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert max(x for x, _ in cells) < 24, panel["title"]
            assert not cells & taken, panel["title"]
            taken |= cells


def test_what_dashboards_read_from_is_provisioned() -> None:
    sources = yaml.safe_load((METRICS / "grafana/provisioning/datasources/weir.yaml").read_text())["datasources"]
    known = {(source["type"], source["uid"]) for source in sources}
    panels = [panel["datasource"] for one in documents() for panel in one["panels"]]
    asked = {(source["type"], source["uid"]) for source in panels}
    assert asked == known


def test_prometheus_and_grafana_mount_what_is_there_and_scrape_the_ports_that_are_opened() -> None:
    overlay = yaml.safe_load((ROOT / "compose/metrics.yaml").read_text())["services"]
    for name in ("prometheus", "grafana"):
        folders = [volume.split(":")[0] for volume in overlay[name]["volumes"] if volume.startswith("./")]
        assert folders
        assert [folder for folder in folders if not (ROOT / "compose" / folder).exists()] == []
        assert re.search(r":v?\d+\.\d+\.\d+$", overlay[name]["image"]), name
    [own, _] = yaml.safe_load((METRICS / "prometheus.yml").read_text())["scrape_configs"]
    [found] = own["dns_sd_configs"]
    stack = yaml.safe_load((ROOT / "compose/compose.yaml").read_text())["services"]
    ports = {name: int(stack[name]["environment"]["WEIR_METRICS_PORT"]) for name in found["names"]}
    assert set(ports) == {"gateway", "scheduler", "transfer", "prefill", "decode"}
    assert set(ports.values()) == {found["port"]}
