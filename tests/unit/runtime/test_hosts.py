"""Hosts of one stack: the file that names them, their credentials, and what each starts."""

import re
import shlex
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weir.bus.nats_users import NATS_ROLES
from weir.cli.app import app
from weir.rpc.identities import CertifiedIdentity
from weir.runtime.authority import authority_pair
from weir.runtime.config import ConfigError, read_config, resolve_config
from weir.runtime.stack.config import StackConfig
from weir.runtime.stack.credentials import HostCredentials
from weir.runtime.stack.host import HostConfig
from weir.runtime.stack.host_secrets import make_credentials
from weir.runtime.stack.hosts_file import Hosts, host_command, read_hosts
from weir.runtime.stack.models import StackModel, StackModels
from weir.runtime.stack.plan import STOP_ORDER, ProcessSpec, num_services, plan_stack
from weir_transfer.config import TransferConfig

TWO = """
instance = "lab"
[hosts.a]
address = "10.0.0.1"
serve_nats = true
schedulers = 1
gateways = 1
prefill = 0
decode = 0
[hosts.b]
address = "b.example"
prefill = 2
"""


def read(tmp_path: Path, text: str) -> Hosts:
    path = tmp_path / "hosts.toml"
    path.write_text(text)
    return read_hosts(path)


def flag(spec: ProcessSpec, name: str) -> str | None:
    command = list(spec.command)
    return command[command.index(f"--{name}") + 1] if f"--{name}" in command else None


def specs_of(config: StackConfig) -> dict[str, ProcessSpec]:
    return {spec.name: spec for spec in plan_stack(config, config.nats_port or 0).specs}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TWO.replace('instance = "lab"', ""), "instance '': use 1 to 40 characters"),
        (TWO.replace('"lab"', '"Lab"'), "hosts.a.instance 'Lab': in certificates use"),
        (TWO.replace('"lab"', '"lab"\nspeed = 1'), "speed: there is no such setting; known are instance, nats"),
        (TWO.replace("prefill = 2", "prefil = 2"), "hosts.b.prefil: there is no such setting; known are address"),
        (TWO.replace("prefill = 2", "prefill = 'x'"), "hosts.b.prefill = 'x': must be"),
        (TWO.replace("prefill = 2", "prefill = 65"), "hosts.b.prefill 65: must be in [0, 64]"),
        (TWO.replace('address = "b.example"', ""), "hosts.b.address is empty: give an address of this host"),
        (TWO.replace("b.example", "10.0.0.1"), "hosts.b.address '10.0.0.1': is also that of hosts.a"),
        (TWO.replace("b.example", "localhost"), "hosts.b.address 'localhost': at every other host that is the host"),
        (TWO.replace("b.example", "b.example:1"), "hosts.b.address 'b.example:1': must be a host name or address"),
        (TWO.replace("serve_nats = true", ""), "serve_nats is set for none; must be so for one host"),
        (TWO.replace("prefill = 2", "serve_nats = true"), "serve_nats is set for a, b; must be so for one host"),
        ('nats = "tls://n:1"\n' + TWO, "serve_nats is set for a; must be so for no host, since nats names a server"),
        (TWO.replace("schedulers = 1", ""), "hosts: none has schedulers; set it to 1 or more at one of them"),
        (TWO.replace("prefill = 2", "decode = 0"), "hosts: none has decode"),
        (
            TWO.replace("serve_nats = true", "").replace("[hosts.a]", 'nats = "nats://n:1"\n[hosts.a]', 1),
            "'nats://n:1'",
        ),
        ("instance = 'lab'\nhosts = 1", "hosts: must be tables, each begun with [hosts.NAME]"),
        ("instance = 'lab'\n[hosts]\na = 1", "hosts.a: must be a table"),
        ("instance = 'lab'", "hosts: 0, must be in [1, 1000]"),
        ("instance = ", "hosts.toml: "),
    ],
)
def test_what_is_wrong_in_a_file_of_hosts_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert message in caught.value.message
    assert caught.value.message.startswith(f"{tmp_path}/hosts.toml: ")


def test_what_is_printed_for_a_host_starts_just_that_host(tmp_path: Path) -> None:
    hosts = read(tmp_path, TWO)
    printed = [host_command(host.config(hosts, f"lab/{host.name}"), {"policy": "ltr"}) for host in hosts.hosts]
    common = "weir host --join tls://10.0.0.1:4222 --instance lab --address"
    assert [shlex.join(words) for words in printed] == [
        f"{common} 10.0.0.1 --credentials-dir lab/a --serve-nats --prefill 0 --decode 0 --schedulers 1 --gateways 1 "
        "--policy ltr",
        f"{common} b.example --credentials-dir lab/b --prefill 2 --policy ltr",
    ]
    insecure = read(tmp_path, "insecure_listen = true\n" + TWO)
    words = host_command(insecure.hosts[1].config(insecure, ""), {})
    assert words[3:] == shlex.split(
        "nats://10.0.0.1:4222 --instance lab --address b.example --insecure-listen --prefill 2"
    )


def test_the_command_makes_credentials_and_prints_hosts_and_again_new_certificates(tmp_path: Path) -> None:
    (tmp_path / "hosts.toml").write_text(TWO)
    folder = tmp_path / "made"
    command = ["up", "--hosts", str(tmp_path / "hosts.toml"), "--out", str(folder), "--policy", "ltr"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == "# a, 10.0.0.1"
    assert f"--credentials-dir {folder}/b --prefill 2 --policy ltr" in lines[3]
    kept = (folder / "a" / "admin.key", folder / "a" / "nats-worker.seed", folder / "b" / "ca.pem")
    before = [path.read_text() for path in kept], (folder / "b" / "decode.pem").read_text()
    assert CliRunner().invoke(app, command).exit_code == 0
    after = [path.read_text() for path in kept], (folder / "b" / "decode.pem").read_text()
    assert before[0] == after[0]
    assert before[1] != after[1]
    refused = CliRunner().invoke(app, [*command, "--prefill", "3"])
    assert refused.exit_code == 2
    assert f"--prefill: with --hosts say it in {tmp_path}/hosts.toml, for each host" in refused.output


def test_a_host_is_given_no_more_than_its_processes_need(tmp_path: Path) -> None:
    hosts, folder = read(tmp_path, TWO), tmp_path / "lab"
    make_credentials(hosts, folder)
    names = {path.name for path in (folder / "b").iterdir()}
    assert names == {
        "ca.pem",
        *(f"{role}.{suffix}" for role in ("transfer", "prefill", "decode") for suffix in ("pem", "key")),
        "nats-worker.seed",
        "nats-transfer.seed",
    }
    names = {path.name for path in (folder / "a").iterdir()}
    assert names == {
        "ca.pem",
        "admin.key",
        *(f"{role}.{suffix}" for role in ("scheduler", "gateway", "operator", "nats") for suffix in ("pem", "key")),
        *(f"nats-{role}.seed" for role in NATS_ROLES),
    }
    for path in (*(folder / "a").iterdir(), *(folder / "b").iterdir()):
        if path.suffix != ".pem":
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    certificate = HostCredentials(folder / "b").certificate("decode").load()
    assert certificate.identity == CertifiedIdentity("lab", "decode", "b")
    assert certificate.ca_pem == authority_pair(folder).cert.read_bytes()
    assert HostCredentials(folder / "a").certificate("nats").load().addresses == ("10.0.0.1",)


def test_services_of_a_host_listen_at_its_address_and_prove_who_they_are(tmp_path: Path) -> None:
    hosts = read(tmp_path, TWO)
    config = hosts.hosts[1].config(hosts, str(tmp_path / "b"))
    specs = specs_of(config)
    assert list(specs) == ["transfer-0", "prefill-0", "prefill-1", "decode-0"]
    assert num_services(config) == 4
    for name in ("prefill-0", "decode-0"):
        assert flag(specs[name], "listen") == "b.example:0"
        assert flag(specs[name], "tls-cert") == str(tmp_path / "b" / f"{name[:-2]}.pem")
        assert flag(specs[name], "nats-seed-file") == str(tmp_path / "b" / "nats-worker.seed")
        assert flag(specs[name], "nats-ca-file") == str(tmp_path / "b" / "ca.pem")
    assert (flag(specs["transfer-0"], "listen") or "").startswith("unix:"), "nobody but workers of this host reaches it"
    assert flag(specs["transfer-0"], "pages-listen") == "b.example:0"
    assert all(spec.environ["WEIR_NATS_URL"] == "tls://10.0.0.1:4222" for spec in specs.values())


def test_a_host_without_workers_has_no_arena_and_knows_the_model(tmp_path: Path) -> None:
    hosts = read(tmp_path, TWO)
    config = hosts.hosts[0].config(hosts, str(tmp_path / "a"))
    specs = specs_of(config)
    assert list(specs) == ["nats", "scheduler-0", "gateway-0"]
    assert num_services(config) == 2
    assert flag(specs["gateway-0"], "model") == "smollm2-135m"
    assert flag(specs["gateway-0"], "listen") == "10.0.0.1:50051"
    assert "-a 10.0.0.1 -p 4222" in " ".join(specs["nats"].command)
    assert str(config.paths.nats_config_file) in specs["nats"].command


def test_without_credentials_a_host_says_so_to_its_processes(tmp_path: Path) -> None:
    config = HostConfig(
        instance="lab", nats="nats://10.0.0.1:4222", address="::1:2", insecure_listen=True, serve_nats=True
    )
    specs = specs_of(config)
    assert "--insecure-listen" in specs["decode-0"].command
    assert flag(specs["decode-0"], "listen") == "[::1:2]:0"
    assert flag(specs["decode-0"], "nats-seed-file") is None
    assert "-c" not in specs["nats"].command
    for changed, message in (
        ({"insecure_listen": False}, "credentials_dir is empty: other hosts would not know who calls"),
        ({"nats": ""}, "nats is empty: give the URL"),
        ({"instance": ""}, "instance is empty"),
        ({"credentials_dir": "x"}, "'nats://10.0.0.1:4222'"),
        ({"prefill": 0, "decode": 0, "serve_nats": False}, "this host would have no process at all"),
    ):
        values = {name: getattr(config, name) for name in ("instance", "nats", "address", "insecure_listen")}
        with pytest.raises(ValueError, match=re.escape(message)):
            HostConfig(**{"serve_nats": True, **values, **changed})


def test_in_a_stack_of_one_machine_somebody_decodes_each_model(tmp_path: Path) -> None:
    models = StackModels((StackModel("a", decode=0), StackModel("b")))
    with pytest.raises(ValueError, match=r"models\.a\.decode 0: must be in \[1, 64\]"):
        plan_stack(StackConfig(runtime_dir=tmp_path), 4222, models=models)
    config = HostConfig(instance="lab", nats="nats://n:1", address="b", insecure_listen=True, runtime_dir=tmp_path)
    specs = plan_stack(config, 0, models=StackModels((StackModel("a", prefill=0, decode=0), StackModel("b")))).specs
    assert [spec.model for spec in specs] == ["b"] * 3


def test_workers_of_a_host_have_as_long_to_end_as_a_gateway_for_they_serve_gateways_of_others(tmp_path: Path) -> None:
    config = HostConfig(instance="lab", nats="nats://n:1", address="10.0.0.2", insecure_listen=True, grace_s=90.0)
    plan = plan_stack(config, 0)
    graces = {spec.name: flag(spec, "grace-s") for spec in plan.specs}
    assert graces == {"transfer-0": "3.0", "prefill-0": "90.0", "decode-0": "90.0"}
    by_role = {role: seconds for roles, seconds in zip(STOP_ORDER, plan.stage_grace_s, strict=True) for role in roles}
    assert by_role == {"gateway": 90.0, "prefill": 90.0, "decode": 90.0, "scheduler": 3.0, "transfer": 3.0, "nats": 3.0}


def test_pages_of_metrics_of_a_host_are_where_it_says_so_that_others_can_name_them() -> None:
    config = HostConfig(instance="lab", nats="nats://n:1", address="10.0.0.2", insecure_listen=True, metrics_port=9464)
    plan = plan_stack(config, 0, metrics_ports=range(9464, 9467))
    urls = {spec.name: spec.metrics_url for spec in plan.specs}
    assert urls == {
        "transfer-0": "http://10.0.0.2:9464/metrics",
        "prefill-0": "http://10.0.0.2:9465/metrics",
        "decode-0": "http://10.0.0.2:9466/metrics",
    }
    assert {flag(spec, "metrics-host") for spec in plan.specs} == {"10.0.0.2"}


def test_ports_of_a_host_are_where_it_says_so_that_a_firewall_can_name_them() -> None:
    config = HostConfig(
        instance="lab",
        nats="nats://n:1",
        address="10.0.0.2",
        insecure_listen=True,
        schedulers=1,
        decode=2,
        first_port=7000,
    )
    specs = specs_of(config)
    listens = {name: flag(spec, "listen") for name, spec in specs.items() if spec.role != "transfer"}
    assert listens == {
        "scheduler-0": "10.0.0.2:7040",
        "prefill-0": "10.0.0.2:7060",
        "decode-0": "10.0.0.2:7080",
        "decode-1": "10.0.0.2:7081",
    }
    transfer = specs["transfer-0"]
    assert (flag(transfer, "pages-listen"), flag(transfer, "page-streams-port")) == ("10.0.0.2:7000", "7020")
    many = replace(config, decode=21)
    with pytest.raises(ValueError, match="first_port 7000: has ports for 20 of each role; set it to 0"):
        plan_stack(many, 0)


def test_a_host_has_a_table_of_the_file_that_its_processes_read_too(tmp_path: Path) -> None:
    path = tmp_path / "weir.toml"
    path.write_text('log_level = "warning"\n[host]\ninstance = "lab"\nnats = "nats://n:1"\ninsecure_listen = true\n')
    read = resolve_config(HostConfig, "host", flags={"address": "10.0.0.2"}, environ={}, toml_path=path)
    assert (read.instance, read.nats, read.log_level) == ("lab", "nats://n:1", "warning")
    of_process = read_config(TransferConfig, ["--instance", "lab"], environ={}, toml_path=path)
    assert (of_process.instance, of_process.log_level) == ("lab", "warning")
