"""The processes of a stack on one machine meet on sockets that only their user can open."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from weir.testing.stack import Stack

pytestmark = pytest.mark.stack

_LISTENS = "0A"
_NOBODY = 65_534
_CONNECT = "import os, socket, sys; os.setuid(int(sys.argv[1])); socket.socket(socket.AF_UNIX).connect(sys.argv[2])"


def listening_ports(pid: int) -> set[int]:
    """TCP ports that this process listens on."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(str(descriptor.readlink()))
        except FileNotFoundError:  # closed meanwhile
            continue
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == _LISTENS and f"socket:[{rest[5]}]" in inodes:
                ports.add(int(local.rpartition(":")[2], 16))
    return ports


def test_only_the_gateway_nats_and_pages_of_metrics_have_ports(stack: Stack) -> None:
    processes = stack.processes()
    assert {process.role for process in processes} == {"nats", "transfer", "scheduler", "prefill", "decode", "gateway"}
    for process in processes:
        ports = listening_ports(process.pid or 0)
        if process.role == "gateway":
            assert {stack.grpc_port, stack.http_port} < ports
            assert len(ports) == 3
        elif process.role == "nats":
            assert ports == {int(process.address.rpartition(":")[2])}
        else:
            [metrics_port] = ports
            assert httpx.get(f"http://127.0.0.1:{metrics_port}/metrics", timeout=30).status_code == 200
            path = Path(process.address.removeprefix("unix:"))
            assert path.is_socket()
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_another_user_cannot_connect_to_a_worker(stack: Stack) -> None:
    worker = stack.processes("decode")[0]
    path = worker.address.removeprefix("unix:")

    def connect(user: int) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-c", _CONNECT, str(user), path]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)

    assert connect(os.getuid()).returncode == 0
    refused = connect(_NOBODY)
    assert refused.returncode != 0
    assert "PermissionError" in refused.stderr
