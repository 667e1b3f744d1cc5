"""A NATS server with a certificate, asked by who knows its authority and by who does not."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from weir.bus.nats import NatsBus
from weir.bus.protocol import BusUnavailable
from weir.bus.server import nats_server_command
from weir.core.addresses import free_port, is_port_free
from weir.runtime.authority import authority_pair, issue_public, make_authority


@pytest.fixture
def server(tmp_path: Path) -> Iterator[int]:
    """Its port; the authority is in the folder of the test."""
    make_authority(tmp_path)
    public = issue_public(tmp_path, ("localhost",))
    config = tmp_path / "nats.conf"
    config.write_text(f'tls {{ cert_file: "{public.cert}", key_file: "{public.key}" }}\n')
    with running(tmp_path, config) as port:
        yield port


@contextmanager
def running(folder: Path, config: Path | None) -> Iterator[int]:
    port = free_port()
    command = nats_server_command(port, folder / "store", config_file=config)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        ends_at_s = time.monotonic() + 20
        while is_port_free("127.0.0.1", port) and time.monotonic() < ends_at_s:
            time.sleep(0.05)
        yield port
        process.terminate()


@pytest.mark.parametrize("scheme", ["tls", "nats"])
async def test_who_names_its_authority_is_connected(server: int, tmp_path: Path, scheme: str) -> None:
    ca_file = str(authority_pair(tmp_path).cert)
    bus = await NatsBus.connect(f"{scheme}://localhost:{server}", name="a test", ca_file=ca_file)
    assert bus.is_connected
    await bus.close()


async def test_a_server_of_another_authority_is_not_believed(server: int, tmp_path: Path) -> None:
    make_authority(tmp_path / "other")
    other = str(authority_pair(tmp_path / "other").cert)
    with pytest.raises(BusUnavailable, match=rf"no connection to a NATS server at tls://localhost:{server}"):
        await NatsBus.connect(f"tls://localhost:{server}", name="a test", timeout_s=1.5, ca_file=other)


@pytest.mark.parametrize("scheme", ["tls", "nats"])
async def test_a_server_without_tls_is_told_nothing_where_tls_is_asked_for(tmp_path: Path, scheme: str) -> None:
    make_authority(tmp_path)
    ca_file = str(authority_pair(tmp_path).cert)
    with running(tmp_path, None) as port, pytest.raises(BusUnavailable, match="the server offers no TLS"):
        await NatsBus.connect(f"{scheme}://localhost:{port}", name="a test", timeout_s=1.5, ca_file=ca_file)


async def test_a_file_that_is_no_authority_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.pem").write_text("nothing")
    with pytest.raises(BusUnavailable, match=f"nats_ca_file {tmp_path}/x.pem: cannot be used"):
        await NatsBus.connect("tls://localhost:1", name="a test", ca_file=str(tmp_path / "x.pem"))
