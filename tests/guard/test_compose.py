"""compose/compose.yaml says what the programs understand, and keeps what the arena needs."""

import asyncio
import importlib
import importlib.util
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from weir.core.addresses import LOOPBACK
from weir.runtime.config import ConfigError, ServiceConfig, read_config
from weir.runtime.metrics_port import MetricsPort
from weir.scheduling.limits import CoreLimits
from weir.scheduling.limits_file import parse_limits
from weir.worker.roles.kinds import KINDS

yaml = pytest.importorskip("yaml", reason="PyYAML is needed to read compose.yaml; `make setup-dev` installs it")

COMPOSE = Path(__file__).parents[2] / "compose"
ROLES = ("transfer", "prefill", "decode", "scheduler", "gateway")
SHARING = ("transfer", "prefill", "decode")
HEALTH_NAMES = {
    "transfer": ["weir.v1.Arena"],
    "prefill": ["weir.v1.Worker"],
    "decode": ["weir.v1.Worker"],
    "scheduler": ["weir.v1.Scheduling"],
    "gateway": ["weir.v1.Inference"],
}
UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}")


def with_defaults(text: str) -> str:
    """Compose's ${NAME:-default}, in an environment where nothing is set."""
    return _VARIABLE.sub(lambda match: match[2] or "", text)


@pytest.fixture(scope="module")
def document() -> Any:
    return yaml.safe_load(with_defaults((COMPOSE / "compose.yaml").read_text()))


def config_class(role: str) -> type[ServiceConfig]:
    if role in KINDS:
        return KINDS[role].config_type
    module = importlib.import_module(f"weir_{role}.config")
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, ServiceConfig) and value.__module__ == module.__name__
    ]
    assert len(found) == 1, found
    return found[0]


def config_of(document: Any, role: str) -> Any:
    service = document["services"][role]
    assert service["command"][:3] == ["weir", "serve", role]
    environ = {name: str(value) for name, value in service["environment"].items()}
    return read_config(config_class(role), service["command"][3:], environ=environ)


@pytest.mark.parametrize("role", ROLES)
def test_every_variable_is_a_setting_of_the_service_with_a_value_that_it_accepts(document: Any, role: str) -> None:
    known = {f"WEIR_{entry.name.upper()}" for entry in fields(config_class(role)) if entry.init}
    given = document["services"][role]["environment"]
    assert sorted(name for name in given if name not in known) == []
    config = config_of(document, role)
    assert config.nats_url == "nats://nats:4222"


def test_the_arena_fits_its_volume(document: Any) -> None:
    options = document["volumes"]["arena"]["driver_opts"]
    assert options["type"] == "tmpfs"
    size = re.search(r"size=(\d+)([kmg])", options["o"])
    assert size is not None
    assert int(size[1]) * UNITS[size[2]] > config_of(document, "transfer").arena_bytes


def test_transfer_and_workers_share_pid_namespace_and_memory_and_survive_each_others_restart(document: Any) -> None:
    services = document["services"]
    # Its owner does nothing and so has no reason to end: the kernel kills all of a namespace with its first process.
    assert services["host"]["command"] == ["sleep", "infinity"]
    assert services["host"]["init"] is True
    for role in ("host", *SHARING):
        assert "arena:/dev/shm:nocopy" in services[role]["volumes"]
    assert {role: services[role].get("pid") for role in ROLES} == {
        role: "service:host" if role in SHARING else None for role in ROLES
    }
    segment = config_of(document, "transfer").segment_path
    assert str(segment).startswith("/dev/shm/")


def test_workers_share_packed_weights_and_kernels_where_the_image_lets_them_write(document: Any) -> None:
    dockerfile = (COMPOSE / "Dockerfile").read_text()
    cache = re.search(r"WEIR_CACHE=(\S+) PYTHONUNBUFFERED", dockerfile)
    assert cache is not None
    assert f"--chown=10001:10001 {cache[1]} {cache[1]}" in dockerfile
    for role in ("prefill", "decode"):
        assert f"cache:{cache[1]}" in document["services"][role]["volumes"]
    assert "cache" in document["volumes"]


def test_pages_outlive_the_stack_on_a_volume_of_their_own_where_a_setting_says_so(document: Any) -> None:
    [target] = [
        mount.partition(":")[2] for mount in document["services"]["transfer"]["volumes"] if mount.startswith("pages:")
    ]
    assert config_of(document, "transfer").page_files_dir == "", "not unless asked"
    asked = re.sub(r"\$\{PAGE_FILES_DIR-\}", target, (COMPOSE / "compose.yaml").read_text())
    assert config_of(yaml.safe_load(with_defaults(asked)), "transfer").page_files_dir == target
    assert document["volumes"]["pages"] is None, "a plain one, which takes the owner of the image's folder"
    dockerfile = (COMPOSE / "Dockerfile").read_text()
    assert re.search(rf"install -d -o weir -g weir -m 0700 .*{re.escape(target)}$", dockerfile, re.MULTILINE)
    assert f"`PAGE_FILES_DIR={target}`" in (COMPOSE / "README.md").read_text()


def test_pages_go_to_a_valkey_without_tls_only_where_a_variable_says_so() -> None:
    whole = (COMPOSE / "compose.yaml").read_text().replace("${PAGE_VALKEY_URL-}", "redis://10.0.0.7")
    with pytest.raises(ConfigError, match=r"page_valkey_url 'redis://10.0.0.7:6379/0': pages can be turned back"):
        config_of(yaml.safe_load(with_defaults(whole)), "transfer")
    allowed = whole.replace("${PAGE_VALKEY_INSECURE:-false}", "true")
    assert config_of(yaml.safe_load(with_defaults(allowed)), "transfer").page_valkey_insecure


def test_the_password_of_a_valkey_comes_from_a_folder_that_is_mounted(document: Any) -> None:
    mounts = [str(mount) for mount in document["services"]["transfer"]["volumes"]]
    assert "./valkey:/etc/weir/valkey:ro" in mounts
    assert (COMPOSE / "valkey").is_dir()
    names = {"PAGE_VALKEY_PASSWORD_FILE", "PAGE_VALKEY_CA_FILE"}
    assert names <= {name.removeprefix("WEIR_") for name in document["services"]["transfer"]["environment"]}
    assert all(f"`{name}`" in (COMPOSE / "README.md").read_text() for name in names)


def test_workers_call_the_transfer_service_where_it_listens(document: Any) -> None:
    listen = config_of(document, "transfer").listen
    assert listen.startswith("unix:/dev/shm/")
    for role in ("prefill", "decode"):
        assert f"unix:{config_of(document, role).arena_socket_path}" == listen


def test_the_scheduler_reads_its_limits_from_a_folder_that_is_mounted_and_they_are_right(document: Any) -> None:
    [mount] = document["services"]["scheduler"]["volumes"]
    source, target, mode = mount.split(":")
    inside = Path(config_of(document, "scheduler").limits_file)
    assert (str(inside.parent), mode) == (target, "ro")
    shipped = (COMPOSE / source / inside.name).read_text()
    assert parse_limits(shipped, CoreLimits()) == CoreLimits()
    example = re.sub(r"^# (?=\[|\w+ = )", "", shipped, flags=re.MULTILINE).replace('"…"', f'"{"0" * 64}"', 1)
    limits = parse_limits(example.replace("…", "1" * 64), CoreLimits())
    assert limits.admin_key_digests
    assert limits.has_tenant_keys


@pytest.mark.parametrize("role", ["prefill", "decode", "scheduler", "gateway"])
def test_other_containers_can_reach_the_service(document: Any, role: str) -> None:
    config = config_of(document, role)
    assert config.listen.startswith("0.0.0.0:")
    assert config.listen != "0.0.0.0:0"


def test_the_published_ports_are_those_that_the_gateway_listens_on(document: Any) -> None:
    config = config_of(document, "gateway")
    published = [text.rsplit(":", 2)[1:] for text in document["services"]["gateway"]["ports"]]
    assert published == [["8000-8001", str(config.http_port)], ["50051-50052", config.listen.rpartition(":")[2]]]
    assert config.http_host == "0.0.0.0"


def test_each_gateway_has_a_published_port_of_each_kind(document: Any) -> None:
    gateway = document["services"]["gateway"]
    for text in gateway["ports"]:
        first, last = text.rsplit(":", 2)[1].split("-")
        assert int(last) - int(first) + 1 == int(gateway["deploy"]["replicas"])


@pytest.mark.parametrize("role", ROLES)
def test_health_is_asked_where_and_by_the_name_that_the_service_answers_to(document: Any, role: str) -> None:
    listen = config_of(document, role).listen
    address = listen.replace("0.0.0.0", "127.0.0.1")
    probe = document["services"][role]["healthcheck"]["test"]
    assert probe == ["CMD", "python3", "/opt/weir/healthcheck.py", address, *HEALTH_NAMES[role]]
    assert f"COPY compose/healthcheck.py {probe[2]}" in (COMPOSE / "Dockerfile").read_text()


def test_every_container_has_a_health_check_and_comes_back_by_itself(document: Any) -> None:
    for name, service in document["services"].items():
        assert service["healthcheck"]["test"], name
        assert service["restart"] == "unless-stopped", name


def test_no_service_waits_for_another(document: Any) -> None:
    assert [name for name, service in document["services"].items() if "depends_on" in service] == []


@pytest.mark.parametrize("role", ROLES)
def test_a_drain_ends_before_docker_kills(document: Any, role: str) -> None:
    allowed_s = int(document["services"][role]["stop_grace_period"].removesuffix("s"))
    assert allowed_s >= config_of(document, role).grace_s + 15


def test_images_are_pinned(document: Any) -> None:
    built = [service["image"] for service in document["services"].values() if "build" in service]
    images = {service["image"] for service in document["services"].values()} - set(built)
    assert built == ["weir:local"]
    assert len(images) == 2
    bases = re.findall(r"^FROM (\S+)", (COMPOSE / "Dockerfile").read_text(), re.MULTILINE)
    assert set(bases) == {"python:3.11-slim-bookworm"}
    unpinned = [image for image in images if not re.search(r":\d+\.\d+\.\d+", image)]
    assert unpinned == []


@pytest.mark.parametrize("name", ["compose.yaml", "metrics.yaml", "tracing/compose.yaml"])
def test_no_container_has_a_privilege_or_can_get_one(name: str) -> None:
    services = yaml.safe_load(with_defaults((COMPOSE / name).read_text()))["services"]
    for service_name, service in services.items():
        assert service["cap_drop"] == ["ALL"], service_name
        assert service["security_opt"] == ["no-new-privileges:true"], service_name
        assert service.keys().isdisjoint({"privileged", "cap_add", "devices", "user"}), service_name


def test_files_of_an_image_stay_as_they_are(document: Any) -> None:
    """Of those whose programs are known to write on volumes alone."""
    services = document["services"]
    for name in ("host", *ROLES, "nats"):
        assert services[name]["read_only"] is True, name
        assert services[name]["tmpfs"] == ["/tmp"], name
    for role in ROLES:
        config = config_of(document, role)
        assert str(config.runtime_dir).startswith("/dev/shm/"), role
    prometheus = yaml.safe_load(with_defaults((COMPOSE / "metrics.yaml").read_text()))["services"]["prometheus"]
    assert prometheus["read_only"] is True
    assert any(volume.endswith(":/prometheus") for volume in prometheus["volumes"])


@pytest.fixture(scope="module")
def healthcheck() -> ModuleType:
    spec = importlib.util.spec_from_file_location("weir_compose_healthcheck", COMPOSE / "healthcheck.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_probe_tells_ready_from_starting_from_absent(healthcheck: ModuleType) -> None:
    servicer = health.HealthServicer()
    servicer.set("weir.v1.Worker", health_pb2.HealthCheckResponse.NOT_SERVING)
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        assert healthcheck.probe(address, "weir.v1.Worker") == (False, "NOT_SERVING")
        assert healthcheck.probe(address, "weir.v1.Arena")[1].startswith("NOT_FOUND")
        servicer.set("weir.v1.Worker", health_pb2.HealthCheckResponse.SERVING)
        assert healthcheck.probe(address, "weir.v1.Worker") == (True, "SERVING")
    finally:
        server.stop(None).wait(5)
    is_serving, said = healthcheck.probe(address, "weir.v1.Worker")
    assert not is_serving
    assert said.startswith("UNAVAILABLE")


async def test_a_probe_by_http_asks_the_process_and_no_proxy(
    healthcheck: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    is_ready = False
    port = MetricsPort(LOOPBACK, 0, None, is_ready=lambda: is_ready)
    await port.start()
    try:
        url = f"http://{LOOPBACK}:{port.port}/ready"
        assert await asyncio.to_thread(healthcheck.probe_http, url) == (False, "503")
        is_ready = True
        assert await asyncio.to_thread(healthcheck.probe_http, url) == (True, "200")
    finally:
        await port.stop()
