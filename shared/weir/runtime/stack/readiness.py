"""When a supervised process counts as ready."""

import asyncio
import json
from pathlib import Path
from typing import Any, Protocol

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from weir.rpc.channel import make_channel
from weir.rpc.tls.certificates import CertificateError, CertificateFiles
from weir.rpc.tls.credentials import make_named_channel
from weir.rpc.tls.public import make_pinned_channel

_PROBE_S = 2.0


class Probe(Protocol):
    """Asked again and again while a process starts."""

    async def try_reach(self, pid: int) -> str | None:
        """The address of the process once it is ready, else None. Returns within a few seconds."""
        ...


def read_notes(ready_file: Path) -> tuple[str, ...]:
    """What the process that has written the file tells its supervisor, a line each; nothing if it is gone."""
    try:
        return tuple(str(line) for line in json.loads(ready_file.read_text()).get("notes", ()))
    except (OSError, ValueError):
        return ()


def open_channel(address: str, ready_file: Path, certificate: CertificateFiles | None) -> grpc.aio.Channel:
    """To a process that has written this file, with TLS where it says so. `certificate`: one of the stack's, where it
    has some. Raises CertificateError for one that cannot be used."""
    try:
        fields = json.loads(ready_file.read_text())
    except (OSError, ValueError):  # it is gone
        fields = {}
    if fields.get("tls_cert_pem"):
        return make_pinned_channel(address, fields["tls_cert_pem"], fields["tls_name"])
    if fields.get("tls_name") and certificate is not None:
        return make_named_channel(address, fields["tls_name"], certificate.load())
    return make_channel(address)


class GrpcProbe:
    """Ready: the process itself has written its ready file, and its health service says SERVING."""

    def __init__(self, ready_file: Path, service_name: str, certificate: CertificateFiles | None = None) -> None:
        """`certificate`: as of `open_channel`."""
        self._ready_file = ready_file
        self._service_name = service_name
        self._certificate = certificate

    async def try_reach(self, pid: int) -> str | None:
        address = self._try_read_address(pid)
        if address is None:
            return None
        try:
            opened = open_channel(address, self._ready_file, self._certificate)
        except CertificateError:  # being replaced
            return None
        async with opened as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)  # its stubs know no methods
            request = health_pb2.HealthCheckRequest(service=self._service_name)
            try:
                response = await stub.Check(request, timeout=_PROBE_S)
            except grpc.aio.AioRpcError:
                return None
        return address if response.status == health_pb2.HealthCheckResponse.SERVING else None

    def _try_read_address(self, pid: int) -> str | None:
        try:
            fields = json.loads(self._ready_file.read_text())
        except FileNotFoundError:
            return None
        # Another pid: left by an earlier process of the same name.
        return str(fields["address"]) if fields["pid"] == pid else None


class NatsProbe:
    """Ready: the server greets, and says that it has JetStream."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port

    async def try_reach(self, pid: int) -> str | None:
        del pid
        try:
            async with asyncio.timeout(_PROBE_S):
                reader, writer = await asyncio.open_connection(self._host, self._port)
                try:
                    greeting = await reader.readline()
                finally:
                    writer.close()
                    await writer.wait_closed()
        except (OSError, TimeoutError):
            return None
        return f"{self._host}:{self._port}" if b'"jetstream":true' in greeting else None
