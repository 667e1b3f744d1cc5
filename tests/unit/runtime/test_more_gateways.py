"""Several gateways of one stack: each has ports of its own, and people are told all of them."""

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from weir.runtime.config import ConfigError, resolve_config
from weir.runtime.stack.config import StackConfig
from weir.runtime.stack.host import HostConfig
from weir.runtime.stack.instances import hold_metrics_ports, more_gateways
from weir.runtime.stack.plan import GatewayPorts, num_services, plan_stack


def test_every_gateway_listens_on_its_own_ports_and_is_an_endpoint(tmp_path: Path) -> None:
    config = StackConfig(gateways=2, grpc_port=6001, http_port=7001, runtime_dir=tmp_path)
    plan = plan_stack(config, 4222, [GatewayPorts(6002, 7002)])
    commands = {spec.name: spec.command for spec in plan.specs if spec.role == "gateway"}
    assert {name: command[command.index("--listen") + 1] for name, command in commands.items()} == {
        "gateway-0": "127.0.0.1:6001",
        "gateway-1": "127.0.0.1:6002",
    }
    assert commands["gateway-1"][commands["gateway-1"].index("--http-port") + 1] == "7002"
    assert plan.endpoints["gRPC 2"] == "127.0.0.1:6002"
    assert plan.endpoints["OpenAI 2"] == "http://127.0.0.1:7002/v1"


def test_ports_are_the_next_free_ones_and_never_one_twice() -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        config = StackConfig(gateways=3, grpc_port=port - 1, http_port=port - 2)
        with ExitStack() as held:
            found = more_gateways(config, port + 1, held)
    ports = [number for gateway in found for number in (gateway.grpc, gateway.http)]
    assert len(found) == 2
    assert len(set(ports)) == 4
    assert not {port, port + 1, port - 1, port - 2} & set(ports)
    assert min(ports) > port


def test_how_many_there_may_be_is_said() -> None:
    with pytest.raises(ConfigError, match="gateways 5"):
        resolve_config(StackConfig, "up", flags={"gateways": 5}, environ={}, toml_path=None)


def test_each_process_but_nats_has_a_port_for_its_metrics(tmp_path: Path) -> None:
    config = StackConfig(prefill=2, schedulers=2, runtime_dir=tmp_path)
    with ExitStack() as held:
        ports = hold_metrics_ports(num_services(config), held)
        assert len(set(ports)) == num_services(config) == 7
    plan = plan_stack(config, 4222, metrics_ports=ports)
    urls = {spec.name: spec.metrics_url for spec in plan.specs}
    assert urls.pop("nats") == ""
    assert sorted(urls.values()) == sorted(f"http://127.0.0.1:{port}/metrics" for port in ports)
    for spec in plan.specs[1:]:
        port = spec.command[spec.command.index("--metrics-port") + 1]
        assert spec.metrics_url == f"http://127.0.0.1:{port}/metrics"
    assert not any(str(port) in where for where in plan.endpoints.values() for port in ports)


def test_pages_of_metrics_have_ports_that_there_are() -> None:
    config = HostConfig(instance="a", nats="nats://n:1", address="10.0.0.2", insecure_listen=True, metrics_port=65_534)
    message = "metrics_port 65534: must be at most 65533, for 3 processes have one each"
    with ExitStack() as held, pytest.raises(ValueError, match=message):
        hold_metrics_ports(num_services(config), held, config)


def test_a_plan_without_such_ports_has_no_such_pages(tmp_path: Path) -> None:
    plan = plan_stack(StackConfig(runtime_dir=tmp_path), 4222)
    assert not any(spec.metrics_url or "--metrics-port" in spec.command for spec in plan.specs)
