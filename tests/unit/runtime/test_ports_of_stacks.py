import socket
from pathlib import Path

from weir.core.addresses import LOOPBACK, server_ports
from weir.runtime.stack.config import StackConfig
from weir.runtime.stack.instances import hold_nats_port


def nats_port(folder: Path, grpc_port: int = 50_051, http_port: int = 8000) -> int:
    config = StackConfig(runtime_dir=folder, instance="a", grpc_port=grpc_port, http_port=http_port)
    with hold_nats_port(config) as holder:
        port: int = holder.getsockname()[1]
    return port


def test_the_nats_of_an_instance_has_the_same_port_unless_that_is_taken(tmp_path: Path) -> None:
    usual = nats_port(tmp_path)
    assert usual in server_ports()
    assert nats_port(tmp_path) == usual
    with socket.create_server((LOOPBACK, usual)):
        assert nats_port(tmp_path) in {*server_ports()} - {usual}


def test_nats_does_not_take_a_port_that_the_gateway_is_to_have(tmp_path: Path) -> None:
    usual = nats_port(tmp_path)
    second = nats_port(tmp_path, grpc_port=usual)
    assert len({usual, second, nats_port(tmp_path, grpc_port=second, http_port=usual)}) == 3
