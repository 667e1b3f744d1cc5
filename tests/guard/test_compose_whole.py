"""compose/ as Compose's own parser reads it: what one command brings up, the overlays, and what reaches the builder."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer.main
from tests.containers.packages import compose_program
from tests.guard.sources import ROOT
from tests.guard.test_compose import ROLES, config_class

from weir.cli.app import app
from weir.runtime.config import ServiceConfig, read_config, resolve_config
from weir.runtime.stack.host import HostConfig
from weir.runtime.stack.hosts_file import read_hosts
from weir.runtime.stack.plan import plan_stack

COMPOSE = ROOT / "compose"
OF_WEIR = ("host", *ROLES)


def read_by_compose(*overlays: str, variables: dict[str, str] | None = None, whole: str = "compose.yaml") -> Any:
    """The whole document, every include, anchor and variable resolved. Raises CalledProcessError for a wrong one."""
    files = [word for name in (whole, *overlays) for word in ("--file", str(COMPOSE / name))]
    try:
        program = compose_program()
    except RuntimeError as error:
        pytest.skip(str(error))
    command = [str(program), *files, "config", "--format", "json"]
    printed = subprocess.run(command, env=variables or {}, capture_output=True, text=True, timeout=60, check=True)
    return json.loads(printed.stdout)


@pytest.fixture(scope="module")
def gpu() -> Any:
    return read_by_compose("gpu.yaml")


def config_on_gpu(document: Any, role: str) -> Any:
    service = document["services"][role]
    kind: type[ServiceConfig] = config_class(role)
    return read_config(kind, service["command"][3:], environ=service["environment"])


def test_one_command_brings_up_everything() -> None:
    services = read_by_compose()["services"]
    assert services.keys() == {*OF_WEIR, "nats", "jaeger", "prometheus", "grafana"}
    assert [services[role]["deploy"]["replicas"] for role in ("gateway", "scheduler")] == [2, 2]
    command = "docker compose -f compose/compose.yaml up -d --wait "
    assert command in (COMPOSE / "README.md").read_text()


def test_grafana_has_its_dashboards_and_prometheus_its_rules() -> None:
    services = read_by_compose()["services"]
    for name in ("prometheus", "grafana"):
        sources = [Path(mount["source"]) for mount in services[name]["volumes"] if mount["type"] == "bind"]
        assert sources
        assert [source for source in sources if not source.exists()] == []


def test_compose_refuses_a_word_that_it_does_not_know(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("services: {gateway: {depnds_on: [nats]}}\n")
    with pytest.raises(subprocess.CalledProcessError) as refused:
        read_by_compose(str(wrong))
    assert "depnds_on" in refused.value.stderr


@pytest.mark.parametrize("overlay", ["gpu.yaml", "tls.yaml", "tracing/compose.yaml"])
def test_an_overlay_changes_services_that_are_there(overlay: str) -> None:
    services = read_by_compose(overlay)["services"]
    assert services.keys() - read_by_compose()["services"].keys() <= {"collector"}
    assert [name for name, service in services.items() if "image" not in service] == []


@pytest.mark.parametrize("name", ["host-a", "host-b"])
def test_each_of_two_hosts_is_one_that_the_file_of_hosts_names(name: str) -> None:
    service = read_by_compose(whole="two-hosts.yaml")["services"][name]
    [entry] = [host for host in read_hosts(COMPOSE / "two-hosts.toml").hosts if host.name == name]
    given = make_context("host", service["command"][2:]).params
    flags = {key: value for key, value in given.items() if value is not None and key != "config"}
    environ = {key: str(value) for key, value in service["environment"].items()}
    config = resolve_config(HostConfig, "host", flags=flags, environ=environ, toml_path=None)
    said = entry.config(read_hosts(COMPOSE / "two-hosts.toml"), config.credentials_dir)
    for what in ("address", "nats", "instance", "serve_nats", "prefill", "decode", "schedulers", "gateways"):
        assert getattr(config, what) == getattr(said, what), what
    assert service["healthcheck"]["test"][-1] == f"http://{config.address}:{config.probe_port}/ready"
    assert (service["ipc"], service["read_only"], service["cap_drop"]) == ("private", True, ["ALL"])
    assert int(service["shm_size"]) > config.arena_bytes
    assert [mount["target"] for mount in service["volumes"]] == [config.credentials_dir, "/opt/weir-models"]
    plan = plan_stack(config, config.nats_port)
    assert parse_seconds(service["stop_grace_period"]) >= sum(plan.stage_grace_s)


def parse_seconds(text: str) -> float:
    minutes, _, seconds = text.removesuffix("s").rpartition("m")
    return 60 * float(minutes or 0) + float(seconds or 0)


def make_context(name: str, words: list[str]) -> Any:
    group: Any = typer.main.get_command(app)
    return group.commands[name].make_context(name, words)


@pytest.mark.parametrize("role", ROLES)
def test_on_a_gpu_every_process_knows_it_and_takes_its_settings(gpu: Any, role: str) -> None:
    config = config_on_gpu(gpu, role)
    assert config.device == "cuda"
    assert config.precision == config_on_gpu(gpu, "transfer").precision


@pytest.mark.parametrize("role", ["prefill", "decode", "scheduler", "gateway"])
def test_with_certificates_every_process_that_others_reach_has_one_of_its_role(role: str) -> None:
    service = read_by_compose("tls.yaml")["services"][role]
    kind: type[ServiceConfig] = config_class(role)
    config = read_config(kind, service["command"][3:], environ=service["environment"])
    assert not config.insecure_listen
    folders = [mount["target"] for mount in service["volumes"] if mount["type"] == "bind"]
    stem = f"{folders[-1]}/{role}-compose"
    assert (config.tls_cert, config.tls_key) == (f"{stem}.pem", f"{stem}.key")
    assert config.tls_ca == f"{folders[-1]}/ca.pem"


def test_on_a_gpu_those_that_share_its_memory_get_the_same_one(gpu: Any) -> None:
    devices = {
        role: service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices")
        for role, service in gpu["services"].items()
    }
    given = {role: found for role, found in devices.items() if found}
    assert given.keys() == {"transfer", "prefill", "decode"}
    assert given["transfer"] == [{"driver": "nvidia", "device_ids": ["0"], "capabilities": ["gpu"]}]
    assert given["prefill"] == given["decode"] == given["transfer"]


def test_on_a_gpu_the_arena_is_what_its_memory_leaves_and_its_tables_are_still_shared(gpu: Any) -> None:
    assert config_on_gpu(gpu, "transfer").arena_bytes == 0
    for role in ("transfer", "prefill", "decode"):
        service = gpu["services"][role]
        assert service["pid"] == "service:host"
        assert "/dev/shm" in [mount["target"] for mount in service["volumes"]]
        assert service["environment"]["WEIR_RUNTIME_DIR"].startswith("/dev/shm/")


def test_on_a_gpu_the_image_is_another_one_with_the_cuda_build_and_a_compiler(gpu: Any) -> None:
    images = {gpu["services"][name]["image"] for name in OF_WEIR}
    assert images == {"weir:cuda"}
    arguments = gpu["services"]["host"]["build"]["args"]
    assert arguments["TORCH_VARIANT"] == "cuda"
    assert re.search(r'"\$TORCH_VARIANT" = cuda \]; then .*\n.*install .*\bgcc\b', (COMPOSE / "Dockerfile").read_text())


def test_the_builder_gets_every_file_that_the_dockerfile_copies() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copies = re.findall(r"^COPY (?!--from)(.+) \S+$", (COMPOSE / "Dockerfile").read_text(), re.MULTILINE)
    sources = [source for line in copies for source in line.split()]
    assert sources
    assert [source for source in sources if source not in allowed] == []
    assert [source for source in allowed if not (ROOT / source).exists()] == []
