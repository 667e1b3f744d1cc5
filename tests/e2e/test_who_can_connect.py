"""The processes of a stack on one machine meet on sockets that only their user can open."""

import gc
import os
import stat
import subprocess
import sys
import warnings
from pathlib import Path

import httpx
import pytest

from weir.bus.nats import NatsBus
from weir.bus.nats_users import NATS_ROLES
from weir.bus.protocol import BusUnavailable
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


async def test_nobody_uses_the_stacks_nats_without_one_of_its_keys(stack: Stack) -> None:
    url = f"nats://{stack.processes('nats')[0].address}"
    with pytest.raises(BusUnavailable, match="credentials"):
        await NatsBus.connect(url, name="nobody", timeout_s=1.0)
    bus = await NatsBus.connect(url, name="an operator", seed_file=stack.nats_seed_file("operator"))
    await bus.close()
    with warnings.catch_warnings():  # the client leaves the sockets of refused attempts to the garbage collector
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def test_keys_are_files_of_this_user_and_nowhere_else(stack: Stack) -> None:
    paths = [Path(stack.nats_seed_file(role)) for role in NATS_ROLES]
    folder = paths[0].parent.parent
    secrets = [path.read_bytes() for path in paths] + [(folder / "admin.key").read_bytes()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in [*paths, folder / "admin.key"]} == {0o600}
    files = [*(folder / "logs").iterdir(), folder / "state.json", folder / "nats.conf", *(folder / "ready").iterdir()]
    shown = [path.read_bytes() for path in files]
    for process in stack.processes():
        shown += [Path(f"/proc/{process.pid}/{name}").read_bytes() for name in ("cmdline", "environ")]
    assert len(shown) > 2 * len(stack.processes())
    assert not any(secret in text for secret in secrets for text in shown)


def test_nobody_of_a_stack_is_denied_what_he_does(stack: Stack) -> None:
    shown = stack.weir("generate", "--address", stack.grpc_address, "--max-tokens", "2", "Hello")
    assert shown.returncode == 0, shown.stderr
    body = {
        "model": httpx.get(f"{stack.http_url}/v1/models", timeout=60).json()["data"][0]["id"],
        "input": "Hello",
        "max_output_tokens": 2,
    }
    kept = httpx.post(f"{stack.http_url}/v1/responses", json=body, timeout=60).json()
    assert httpx.get(f"{stack.http_url}/v1/responses/{kept['id']}", timeout=60).json() == kept
    logs = Path(stack.nats_seed_file("worker")).parent.parent / "logs"
    assert "violation" not in "".join(path.read_text() for path in logs.iterdir()).lower()
