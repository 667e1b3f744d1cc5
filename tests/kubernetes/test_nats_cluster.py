"""The chart's NATS: three servers by its configuration, of which any may be lost."""

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.kubernetes.chart import rendered
from tests.kubernetes.test_secrets import folder, secrets

from weir.bus.nats import NatsBus
from weir.bus.nats_kv import NatsBucket
from weir.bus.protocol import BusError
from weir.bus.server import find_nats_server
from weir.bus.subjects import Subjects, stream_of
from weir.core.addresses import LOOPBACK, free_port
from weir.runtime.authority import issue_public

__all__ = ["folder"]  # a fixture
_SUBJECTS = Subjects("weir")
_TIMEOUT_S = 120.0


@dataclass
class Server:
    port: int
    process: "subprocess.Popen[bytes]"


@dataclass
class Cluster:
    servers: list[Server]
    credentials: Path

    async def connect(self, server: Server) -> NatsBus:
        return await NatsBus.connect(
            f"tls://{LOOPBACK}:{server.port}",
            name="test",
            timeout_s=_TIMEOUT_S,
            seed_file=str(self.credentials / "nats-scheduler.seed"),
            ca_file=str(self.credentials / "ca.pem"),
            inbox=_SUBJECTS.inbox("scheduler"),
            num_replicas=3,
        )


@pytest.fixture
def cluster(folder: Path, tmp_path: Path) -> Iterator[Cluster]:
    """As the chart says, but for addresses and the names in the certificate."""
    files = secrets(folder)["weir-credentials-nats"]
    shown = issue_public(folder, (LOOPBACK,), days=1, force=True, out=tmp_path / "issued", stem="nats")
    files |= {"nats.pem": shown.cert.read_bytes(), "nats.key": shown.key.read_bytes()}
    routes = [free_port() for _ in range(3)]
    with ExitStack() as stack:
        servers = []
        for index in range(3):
            own = tmp_path / f"{index}"
            for name in ("config", "credentials"):
                (own / name).mkdir(parents=True)
            for name, content in files.items():
                (own / "credentials" / name).write_bytes(content.replace(b"/etc/nats", str(own).encode()))
            port = free_port()
            (own / "config" / "nats.conf").write_text(_conf(own, index, port, routes))
            log = stack.enter_context((own / "log").open("wb"))
            command = [str(find_nats_server()), "--config", str(own / "config" / "nats.conf")]
            environ = {"POD_NAME": f"weir-nats-{index}"}
            process = stack.enter_context(subprocess.Popen(command, env=environ, stdout=log, stderr=log))
            stack.callback(process.kill)
            servers.append(Server(port, process))
        yield Cluster(servers, folder / "scheduler")


def _conf(folder: Path, index: int, port: int, routes: list[int]) -> str:
    conf = rendered("tls").configuration["nats.conf"]
    replaced = {
        "port: 4222": f"port: {port}",
        "http_port: 8222": f"http_port: {free_port()}",
        "port: 6222": f"port: {routes[index]}",
        "/etc/nats": str(folder),
        "/data": str(folder / "data"),
        "/tmp/nats.pid": str(folder / "pid"),
        **{f"weir-nats-{n}.weir-nats-nodes:6222": f"{LOOPBACK}:{route}" for n, route in enumerate(routes)},
    }
    for old, new in replaced.items():
        assert old in conf, old
        conf = conf.replace(old, new)
    return f"host: {LOOPBACK}\n{conf}".replace("cluster {", f"cluster {{\n  host: {LOOPBACK}")


async def _bucket(bus: NatsBus) -> NatsBucket:
    """Once the cluster has a leader that can make it."""
    async with asyncio.timeout(_TIMEOUT_S):
        while True:
            try:
                return await bus.bucket(_SUBJECTS.configuration_bucket, durable=True)
            except BusError:
                await asyncio.sleep(0.2)


async def test_what_is_in_a_bucket_outlives_any_one_server(cluster: Cluster) -> None:
    first = await cluster.connect(cluster.servers[0])
    await (await _bucket(first)).put("a", b"1")
    await first.close()
    other = await cluster.connect(cluster.servers[1])
    bucket = await _bucket(other)
    stream = await other._client.jetstream().stream_info(stream_of(_SUBJECTS.configuration_bucket))
    assert stream.config.num_replicas == 3, "else it is lost with one server, if with the right one"
    cluster.servers[0].process.kill()
    cluster.servers[0].process.wait(10)
    async with asyncio.timeout(_TIMEOUT_S):
        while True:
            try:
                entry = await bucket.get("a")
                revision = await bucket.put("b", b"2")
                break
            except BusError:  # another one is being elected
                await asyncio.sleep(0.2)
    assert entry is not None
    assert entry.value == b"1"
    assert revision > entry.revision
    await other.close()
