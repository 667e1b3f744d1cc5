"""What somebody in another network tries at a stack whose ports he reaches, without certificates and with stolen ones.

    python -m tests.attacks.stranger FOLDER < what the defender said

Prints a JSON list for each attempt: the finding, what it was, what was to come of it, and what did.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
from tests.attacks.defender import Defended
from tests.e2e.certified import Lab, open_channel

from weir.bus.nats import NatsBus
from weir.bus.protocol import BusError
from weir.rpc.identities import CertifiedIdentity, dns_name_of
from weir.runtime.authority import Pair
from weir.wire.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc

_TIMEOUT_S = 15.0
_AT_ONCE = 500
_NETWORK = "3 anybody inside the network"
Trying = Callable[["Stranger"], Coroutine[Any, Any, str]]


@dataclass(frozen=True, slots=True)
class Stranger:
    """`own`: an authority that nobody trusts. `stolen`: certificates of the stack's own."""

    defended: Defended
    own: Lab
    stolen: Lab

    @property
    def ca(self) -> Path:
        return self.stolen.ca

    def gateway_id(self, name: str) -> str:
        return f"gateway-7-0a0b0c0d{CertifiedIdentity(self.defended.instance, 'gateway', name).mark}"


def _status(call: Callable[[], object]) -> str:
    try:
        call()
    except grpc.RpcError as error:
        return error.code().name
    return "OK"


def _hello(channel: grpc.Channel, gateway_id: str) -> str:
    """How a stream to a worker ends that begins with this id."""
    hello = worker_pb2.ServeRequest(hello=worker_pb2.Hello(gateway_id=gateway_id))
    with channel:
        return _status(lambda: next(iter(worker_pb2_grpc.WorkerStub(channel).Serve(iter([hello]), timeout=_TIMEOUT_S))))


def _greeting(pair_of: Callable[[Stranger], Pair | None], gateway_id: Callable[[Stranger], str]) -> Trying:
    """By TLS, as whoever this certificate names."""

    async def greet(one: Stranger) -> str:
        server_name = dns_name_of("worker", one.defended.instance)
        channel = open_channel(one.defended.addresses["decode"], server_name, one.ca, pair_of(one))
        return _hello(channel, gateway_id(one))

    return greet


async def _greeting_without_tls(one: Stranger) -> str:
    return _hello(grpc.insecure_channel(one.defended.addresses["decode"]), one.defended.gateway_id)


async def _workers_of_a_scheduler_without_tls(one: Stranger) -> str:
    with grpc.insecure_channel(one.defended.addresses["scheduler"]) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)
        return _status(lambda: stub.ListWorkers(admin_pb2.ListWorkersRequest(), timeout=_TIMEOUT_S))


def _draining(role: str) -> Trying:
    """As a process of this role, which is no operator."""

    async def drain(one: Stranger) -> str:
        instance, pair = one.defended.instance, one.stolen.member(role, one.defended.instance, name="host-2")
        address = one.defended.addresses["scheduler"]
        with open_channel(address, dns_name_of("scheduler", instance), one.ca, pair) as channel:
            stub = admin_pb2_grpc.AdminStub(channel)
            return _status(lambda: stub.Drain(admin_pb2.DrainRequest(worker_id="decode-0"), timeout=_TIMEOUT_S))

    return drain


async def _standing_where_a_scheduler_should(one: Stranger) -> str:
    """What an operator notices who is led to a worker."""
    instance, pair = one.defended.instance, one.stolen.member("operator", one.defended.instance, name="host-2")
    with open_channel(one.defended.addresses["decode"], dns_name_of("scheduler", instance), one.ca, pair) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)
        return _status(lambda: stub.Describe(admin_pb2.DescribeRequest(), timeout=_TIMEOUT_S))


async def _asking_without_tls(one: Stranger) -> str:
    with grpc.insecure_channel(one.defended.addresses["gateway"]) as channel:
        return _generate(channel)


async def _asking_without_key(one: Stranger) -> str:
    credentials = grpc.ssl_channel_credentials(one.ca.read_bytes())
    with grpc.secure_channel(one.defended.addresses["gateway"], credentials) as channel:
        return _generate(channel)


def _generate(channel: grpc.Channel) -> str:
    request = inference_pb2.GenerateRequest(text="x")
    return _status(lambda: list(inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=_TIMEOUT_S)))


def _get(scheme: str) -> Trying:
    async def get(one: Stranger) -> str:
        url = f"{scheme}://{one.defended.host}:{one.defended.http_port}/v1/models"
        try:
            async with httpx.AsyncClient(verify=False, timeout=_TIMEOUT_S) as http:
                return str((await http.get(url)).status_code)
        except httpx.HTTPError:
            return "no answer"

    return get


async def _nats_without_key(one: Stranger) -> str:
    try:
        bus = await NatsBus.connect(f"nats://{one.defended.addresses['nats']}", name="nobody", timeout_s=2.0)
    except BusError as error:
        return "no credentials" if "credentials" in str(error) else str(error)
    await bus.close()
    return "connected"


async def _all_ports(one: Stranger) -> str:
    """Those that answer and are not of the addresses that everybody knows."""
    limit = asyncio.Semaphore(_AT_ONCE)

    async def is_open(port: int) -> bool:
        async with limit:
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    _, writer = await asyncio.open_connection(one.defended.host, port)
            except (OSError, TimeoutError):
                return False
            writer.close()
            return True

    ports = range(1, 65_536)
    found = {port for port, is_there in zip(ports, await asyncio.gather(*map(is_open, ports)), strict=True) if is_there}
    if not one.defended.ports <= found:
        return f"not all that are open were seen: {sorted(one.defended.ports - found)}"
    return f"{sorted(found - one.defended.ports)}" if found > one.defended.ports else "none"


async def _listening_without_certificate(one: Stranger) -> str:
    """What a worker's process says that is to listen in a network, with neither."""
    folder = one.own.folder.parent / "alone"
    command = [sys.executable, "-m", "weir_decode", "--listen", "0.0.0.0:0", "--runtime-dir", str(folder)]
    made = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=120)
    return "refused" if made.returncode == 2 and b"insecure_listen" in made.stderr + made.stdout else "it listens"


def _member(role: str, name: str = "host-2") -> Callable[[Stranger], Pair]:
    return lambda one: one.stolen.member(role, one.defended.instance, name=name)


def _own_id(one: Stranger) -> str:
    return one.gateway_id("host-2")


def _taken_id(one: Stranger) -> str:
    return one.defended.gateway_id


ATTEMPTS: tuple[tuple[str, str, Trying], ...] = (
    ("any port but those of gateways, schedulers, workers and NATS", "none", _all_ports),
    ("a worker without TLS", "UNAVAILABLE", _greeting_without_tls),
    ("a worker without a certificate", "UNAVAILABLE", _greeting(lambda one: None, _taken_id)),
    (
        "a worker with another authority's certificate",
        "UNAVAILABLE",
        _greeting(lambda one: one.own.member("gateway", one.defended.instance), _taken_id),
    ),
    (
        "a worker as a gateway of another instance",
        "PERMISSION_DENIED",
        _greeting(lambda one: one.stolen.member("gateway", "other"), _own_id),
    ),
    *(
        (f"a worker, with the certificate of a role: {role}", "PERMISSION_DENIED", _greeting(_member(role), _own_id))
        for role in ("prefill", "decode", "scheduler", "transfer", "operator")
    ),
    ("to compare: a worker as a gateway, with an id of its own", "OK", _greeting(_member("gateway"), _own_id)),
    ("the streams of another gateway", "PERMISSION_DENIED", _greeting(_member("gateway"), _taken_id)),
    ("a scheduler without TLS", "UNAVAILABLE", _workers_of_a_scheduler_without_tls),
    *((f"drain a worker as a {role}", "PERMISSION_DENIED", _draining(role)) for role in ("gateway", "decode")),
    ("stand where a scheduler should", "UNAVAILABLE", _standing_where_a_scheduler_should),
    ("gRPC for clients without TLS", "UNAVAILABLE", _asking_without_tls),
    ("gRPC for clients without a key", "UNAUTHENTICATED", _asking_without_key),
    ("HTTP without TLS", "no answer", _get("http")),
    ("HTTPS without a key", "401", _get("https")),
    ("NATS without a key", "no credentials", _nats_without_key),
    ("a worker that listens without certificates", "refused", _listening_without_certificate),
)


def main() -> None:
    defended = Defended(**json.load(sys.stdin))
    stranger = Stranger(defended, Lab(Path(sys.argv[1]) / "own"), Lab(Path(defended.lab)))
    for what, expected, run in ATTEMPTS:
        print(json.dumps([_NETWORK, what, expected, asyncio.run(run(stranger))]), flush=True)


if __name__ == "__main__":
    main()
