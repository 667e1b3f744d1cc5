"""The chart, rendered with each of its values files: objects that a cluster takes, of pods that can work.
No cluster ran it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from helm_python import lint
from tests.kubernetes import checks
from tests.kubernetes.chart import CHART, VALUES_FILES, Objects, rendered, values_of
from tests.kubernetes.network import check_network
from tests.kubernetes.renew import FOLDER, shown
from tests.kubernetes.schemas import check_schemas

CHECKS: tuple[Callable[[Objects], list[str]], ...] = (
    check_schemas,
    checks.check_settings,
    checks.check_ports,
    checks.check_probes,
    checks.check_listened,
    checks.check_selectors,
    checks.check_grace,
    checks.check_arena,
    checks.check_mounts,
    checks.check_security,
    checks.check_secrets,
    checks.check_budgets,
    checks.check_figures,
    check_network,
)
SECURE = [name for name in VALUES_FILES if values_of(name)["credentials"]["source"] != "none"]


@pytest.mark.parametrize("name", VALUES_FILES)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_it_is_right(check: Callable[[Objects], list[str]], name: str) -> None:
    assert check(rendered(name)) == []


@pytest.mark.parametrize("name", VALUES_FILES)
def test_it_comes_to_what_it_came_to(name: str) -> None:
    """`make chart-renders` shows what a change changes, to be looked at."""
    assert shown(name) == (FOLDER / f"{name}.yaml").read_text()


def test_helm_finds_nothing_to_say() -> None:
    report = lint(str(CHART), values_of("minimal"))
    assert [message for message in report["messages"] if message["severity"] > 1] == []


@pytest.mark.parametrize("name", SECURE)
def test_with_credentials_everybody_proves_who_he_is(name: str) -> None:
    objects = rendered(name)
    weir = objects.configuration["weir.toml"]
    assert "insecure_listen = false" in weir
    assert 'nats_url = "tls://' in weir
    for component in ("host", "scheduler", "gateway"):
        pod = objects.pod(component)
        assert pod is not None
        assert pod.volume("credentials") is not None


def test_certificates_are_of_the_identities_that_processes_look_for() -> None:
    from weir.rpc.identities import try_parse_identity  # noqa: PLC0415

    certificates = {one["metadata"]["name"]: one["spec"] for one in rendered("tls").of("Certificate")}
    assert certificates.keys() == {
        f"weir-tls-{role}" for role in ("transfer", "prefill", "decode", "scheduler", "gateway", "nats")
    }
    for name, spec in certificates.items():
        if name == "weir-tls-nats":
            continue
        [uri] = spec["uris"]
        identity = try_parse_identity(uri)
        assert identity is not None
        assert (f"weir-tls-{identity.role}", identity.instance) == (name, "weir")
        assert identity.dns_name in spec["dnsNames"]
    hosts = {name for name in certificates["weir-tls-decode"]["dnsNames"] if name.startswith("weir-host-")}
    assert {"weir-host-0.weir-host.serving.svc", "weir-host-1.weir-host.serving.svc"} <= hosts
    assert "weir-nats-2.weir-nats-nodes" in certificates["weir-tls-nats"]["dnsNames"]


def test_rules_and_dashboards_are_those_of_compose() -> None:
    objects, metrics = rendered("tls"), CHART.parent / "metrics"
    groups = [group for name in ("recorded", "alerts") for group in _rules(metrics / "rules" / f"{name}.yml")]
    assert objects.one("PrometheusRule", "weir")["spec"]["groups"] == groups
    shown_files = objects.one("ConfigMap", "weir-dashboards")["data"]
    files = sorted((metrics / "grafana" / "dashboards").glob("*.json"))
    assert shown_files == {path.name: path.read_text() for path in files}


def _rules(path: Path) -> list[object]:
    groups: list[object] = yaml.safe_load(path.read_text())["groups"]
    return groups


def test_its_image_of_nats_is_the_one_of_compose() -> None:
    image = yaml.safe_load((CHART / "values.yaml").read_text())["nats"]["image"]
    assert f"image: {image['repository']}:{image['tag']}\n" in (CHART.parent / "compose.yaml").read_text()


def test_its_readme_says_that_no_cluster_ran_it_as_long_as_that_is_so() -> None:
    assert "It has not run on a cluster." in (CHART / "README.md").read_text()
