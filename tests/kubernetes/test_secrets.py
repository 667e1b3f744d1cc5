"""Secrets of the folders that `weir up --hosts` makes: they have what pods read, and not what these may not see."""

import base64
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.kubernetes.chart import CHART, Objects, rendered
from tests.kubernetes.commands import command_of
from typer.testing import CliRunner

from weir.bus.server import find_nats_server
from weir.cli.app import app

_NATS = "/etc/nats"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the README makes it."""
    made = tmp_path_factory.mktemp("secrets") / "credentials"
    done = CliRunner().invoke(app, ["up", "--hosts", str(CHART / "hosts.toml"), "--out", str(made)])
    assert done.exit_code == 0, done.output
    return made


def secrets(folder: Path, *flags: str) -> dict[str, dict[str, bytes]]:
    command = [sys.executable, str(CHART / "make_secrets.py"), str(folder), *flags]
    printed = subprocess.run(command, capture_output=True, check=True, timeout=120).stdout
    found: list[Any] = list(yaml.safe_load_all(printed))
    return {
        one["metadata"]["name"]: {name: base64.b64decode(text) for name, text in one["data"].items()} for one in found
    }


def needed(objects: Objects) -> dict[str, set[str]]:
    """By Secret, what pods read of it."""
    found: dict[str, set[str]] = {}
    for pod in objects.pods():
        volume = pod.volume("credentials")
        if volume is None:
            continue
        command = command_of(pod.spec["containers"][0], objects)
        assert command is not None
        read = {Path(path).name for path in command.files if "/credentials/" in path}
        for source in (one["secret"] for one in volume["projected"]["sources"]):
            given = {item["path"]: item["key"] for item in source.get("items", [])}
            found[source["name"]] = {given.get(name, name) for name in read if not given or name in given}
    return found


@pytest.mark.parametrize("name", ["two-hosts", "gpu"])
def test_every_file_that_a_pod_reads_is_in_its_secret(folder: Path, name: str) -> None:
    made = secrets(folder)
    for secret, files in needed(rendered(name)).items():
        assert files
        assert files <= made[secret].keys(), secret


def test_with_cert_manager_the_keys_are_in_a_secret_of_their_own(folder: Path) -> None:
    made = secrets(folder, "--keys-only")
    assert made.keys() == {"weir-credentials-nats-keys"}
    wanted = needed(rendered("tls"))
    assert wanted["weir-credentials-nats-keys"] <= made["weir-credentials-nats-keys"].keys()
    assert not any(b"CERTIFICATE" in content for content in made["weir-credentials-nats-keys"].values())


def test_no_pod_gets_more_than_it_needs(folder: Path) -> None:
    made = secrets(folder)
    assert not any("ca.key" in files for files in made.values())
    private = {name: {file for file in files if file.endswith((".key", ".seed"))} for name, files in made.items()}
    assert private == {
        "weir-credentials-host": {
            "transfer.key",
            "prefill.key",
            "decode.key",
            "nats-transfer.seed",
            "nats-worker.seed",
        },
        "weir-credentials-gateway": {"gateway.key", "nats-gateway.seed"},
        "weir-credentials-scheduler": {
            *("scheduler.key", "nats-scheduler.seed"),
            *("operator.key", "nats-operator.seed", "admin.key"),
        },
        "weir-credentials-nats": {"nats.key"},
    }


@pytest.mark.parametrize("name", ["two-hosts", "gpu", "tls", "minimal"])
def test_nats_takes_its_configuration_with_that_secret(folder: Path, name: str, tmp_path: Path) -> None:
    conf = rendered(name).configuration["nats.conf"]
    files = {"config/nats.conf": conf.encode()}
    if name != "minimal":
        files |= {f"credentials/{file}": content for file, content in secrets(folder)["weir-credentials-nats"].items()}
    for file, content in files.items():
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content.replace(_NATS.encode(), str(tmp_path).encode()).replace(b"/data", b"/tmp"))
    command = [str(find_nats_server()), "-t", "--config", str(tmp_path / "config" / "nats.conf")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={"POD_NAME": "weir-nats-0"}, check=False
    )
    assert done.returncode == 0, done.stderr
