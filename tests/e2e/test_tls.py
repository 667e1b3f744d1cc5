"""Processes that meet by TCP and prove who they are: who is let in, who is not, and with what he is told."""

import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from tests.chaos.hosts import Cluster, Served
from tests.e2e.certified import HOST, Lab, open_channel

from weir.client import GenerateOptions, WeirClient
from weir.core.errors import Unavailable
from weir.rpc.identities import CertifiedIdentity
from weir.runtime.authority import Pair
from weir.testing.stack import wait_until
from weir.wire.v1 import admin_pb2, admin_pb2_grpc, worker_pb2, worker_pb2_grpc

pytestmark = pytest.mark.stack

CALL_S = 20.0
_MOMENT_DAYS = 3 / 86400


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def cluster(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("run"), certified=lab) as cluster:
        cluster.add_host("one")
        yield cluster


@pytest.fixture(scope="module")
def worker(cluster: Cluster) -> Served:
    return cluster.hosts[0].workers[-1]


def serve(channel: grpc.Channel, gateway_id: str) -> grpc.StatusCode:
    """How a stream to a worker ends that begins with this Hello, and says nothing else; OK: it was welcomed."""
    hello = worker_pb2.ServeRequest(hello=worker_pb2.Hello(gateway_id=gateway_id))
    with channel:
        try:
            first = next(iter(worker_pb2_grpc.WorkerStub(channel).Serve(iter([hello]), timeout=CALL_S)))
        except grpc.RpcError as error:
            return error.code()
    return grpc.StatusCode.OK if first.HasField("welcome") else grpc.StatusCode.UNKNOWN


def gateway_id_of(instance: str, name: str = HOST) -> str:
    return f"gateway-7-0a0b0c0d{CertifiedIdentity(instance, 'gateway', name).mark}"


def test_a_request_goes_through_by_grpc_and_by_http(cluster: Cluster, lab: Lab) -> None:
    with WeirClient(cluster.grpc_address, ca=str(lab.ca)) as client:
        chunks = list(client.generate("The sky is", GenerateOptions(max_tokens=8, ignore_eos=True)))
    assert chunks[-1].num_output_tokens == 8
    context = ssl.create_default_context(cafile=str(lab.ca))
    body = {"prompt": "The sky is", "max_tokens": 8, "ignore_eos": True}
    answer = httpx.post(f"https://127.0.0.1:{cluster.http_port}/v1/completions", json=body, verify=context, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] == 8
    assert cluster.integrity_errors() == []


def test_a_gateway_may_greet_a_worker_by_an_id_of_its_own(cluster: Cluster, lab: Lab, worker: Served) -> None:
    pair = lab.member("gateway", cluster.instance)
    channel = lab.channel(worker.address, "decode", cluster.instance, pair)
    assert serve(channel, gateway_id_of(cluster.instance)) is grpc.StatusCode.OK


def test_who_says_the_id_of_another_gateway_is_refused(cluster: Cluster, lab: Lab, worker: Served) -> None:
    """With a gateway's certificate of another host, whether the other's id is in use there or not."""
    stranger = lab.member("gateway", cluster.instance, name="host-2")
    in_use = cluster.gateway.describe().process_id
    for gateway_id in (in_use, gateway_id_of(cluster.instance), "gateway-0-1a2b3c4d"):
        channel = lab.channel(worker.address, "decode", cluster.instance, stranger)
        assert serve(channel, gateway_id) is grpc.StatusCode.PERMISSION_DENIED, gateway_id
    own = lab.channel(worker.address, "decode", cluster.instance, stranger)
    assert serve(own, gateway_id_of(cluster.instance, "host-2")) is grpc.StatusCode.OK


@pytest.mark.parametrize("role", ["prefill", "decode", "scheduler", "transfer", "operator"])
def test_a_role_that_may_not_is_refused_and_written_down(cluster: Cluster, lab: Lab, worker: Served, role: str) -> None:
    channel = lab.channel(worker.address, "decode", cluster.instance, lab.member(role, cluster.instance))
    assert serve(channel, gateway_id_of(cluster.instance)) is grpc.StatusCode.PERMISSION_DENIED
    uri = f"spiffe://weir.internal/weir/{cluster.instance}/{role}/{HOST}"
    assert f"peer:{uri} at ipv4:127.0.0.1:" in worker.log
    assert "may not call weir.v1.Worker/Serve" in worker.log


def test_a_gateway_of_another_instance_is_refused(cluster: Cluster, lab: Lab, worker: Served) -> None:
    channel = lab.channel(worker.address, "decode", cluster.instance, lab.member("gateway", "other"))
    assert serve(channel, gateway_id_of("other")) is grpc.StatusCode.PERMISSION_DENIED


def test_who_shows_no_certificate_or_one_that_is_not_valid_does_not_connect(
    cluster: Cluster, lab: Lab, worker: Served, tmp_path_factory: pytest.TempPathFactory
) -> None:
    strangers = Lab(tmp_path_factory.mktemp("strangers"))
    short = lab.member("gateway", cluster.instance, name="late", days=_MOMENT_DAYS)
    shown: list[Pair | None] = [None, strangers.member("gateway", cluster.instance), short]
    time.sleep(4)
    for pair in shown:
        channel = lab.channel(worker.address, "decode", cluster.instance, pair)
        assert serve(channel, gateway_id_of(cluster.instance)) is grpc.StatusCode.UNAVAILABLE, pair


def test_a_port_with_tls_answers_nothing_without_it(cluster: Cluster, worker: Served) -> None:
    for address in (worker.address, cluster.schedulers[0].address, cluster.grpc_address):
        assert serve(grpc.insecure_channel(address), "gateway-0-1") is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(Unavailable), WeirClient(cluster.grpc_address, timeout_s=CALL_S) as client:
        list(client.generate("The sky is"))
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://127.0.0.1:{cluster.http_port}/health", timeout=CALL_S)


def test_clients_find_out_a_worker_that_stands_where_a_scheduler_should(
    cluster: Cluster, lab: Lab, worker: Served
) -> None:
    pair = lab.member("operator", cluster.instance)
    for role, expected in (("scheduler", grpc.StatusCode.UNAVAILABLE), ("decode", None)):
        with lab.channel(worker.address, role, cluster.instance, pair) as channel:
            stub = admin_pb2_grpc.AdminStub(channel)
            try:
                stub.Describe(admin_pb2.DescribeRequest(), timeout=CALL_S)
                found = None
            except grpc.RpcError as error:
                found = error.code()
        assert found is expected, role


def test_old_versions_of_tls_are_refused(cluster: Cluster, worker: Served) -> None:
    """By a client that takes part in nothing else: the handshake does not come that far."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        context.minimum_version, context.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    for address in (worker.address, cluster.grpc_address, f"127.0.0.1:{cluster.http_port}"):
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), CALL_S) as connection, pytest.raises(ssl.SSLError):
            context.wrap_socket(connection).close()


def test_operators_ask_the_scheduler_with_their_certificate_alone(cluster: Cluster, lab: Lab) -> None:
    """Nobody has keys here: without certificates whoever reaches the scheduler could."""
    scheduler = cluster.schedulers[0]
    found = {}
    for role in ("operator", "gateway", "decode"):
        pair = lab.member(role, cluster.instance)
        with lab.channel(scheduler.address, "scheduler", cluster.instance, pair) as channel:
            try:
                admin_pb2_grpc.AdminStub(channel).ListWorkers(admin_pb2.ListWorkersRequest(), timeout=CALL_S)
                found[role] = grpc.StatusCode.OK
            except grpc.RpcError as error:
                found[role] = error.code()
    denied = grpc.StatusCode.PERMISSION_DENIED
    assert found == {"operator": grpc.StatusCode.OK, "gateway": denied, "decode": denied}


def test_operators_commands_take_their_certificate_from_the_environment(cluster: Cluster, lab: Lab) -> None:
    pair = lab.member("operator", cluster.instance)
    own = {"WEIR_TLS_CERT": str(pair.cert), "WEIR_TLS_KEY": str(pair.key), "WEIR_TLS_CA": str(lab.ca)}
    command = [sys.executable, "-m", "weir.cli.main", "limits", "show", "--scheduler", cluster.schedulers[0].address]
    codes = [
        subprocess.run(command, env={**os.environ, **environ}, capture_output=True, timeout=60, check=False).returncode
        for environ in (own, {}, {"WEIR_TLS_CERT": str(pair.cert)})
    ]
    assert codes == [0, 1, 2]


def test_the_probe_of_containers_asks_as_the_process_itself(cluster: Cluster, lab: Lab, worker: Served) -> None:
    probe = [sys.executable, "compose/healthcheck.py"]
    pair, public = lab.member("decode", cluster.instance), lab.public()
    own = {"WEIR_TLS_CERT": str(pair.cert), "WEIR_TLS_KEY": str(pair.key), "WEIR_TLS_CA": str(lab.ca)}
    front = {"WEIR_PUBLIC_TLS_CERT": str(public.cert), "WEIR_PUBLIC_TLS_KEY": str(public.key)}
    asked = [(worker.address, "weir.v1.Worker", own), (cluster.grpc_address, "weir.v1.Inference", own | front)]
    for address, service, environ in asked:
        command = [*probe, address, service]
        done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout
        assert subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 1


def test_the_probe_asks_a_gateway_that_has_no_certificate_for_clients_without_tls(cluster: Cluster, lab: Lab) -> None:
    """As compose/tls.yaml starts it."""
    pair = lab.member("gateway", cluster.instance)
    own = {"WEIR_TLS_CERT": str(pair.cert), "WEIR_TLS_KEY": str(pair.key), "WEIR_TLS_CA": str(lab.ca)}
    servicer = health.HealthServicer()
    servicer.set("weir.v1.Inference", health_pb2.HealthCheckResponse.SERVING)
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    command = [sys.executable, "compose/healthcheck.py", f"127.0.0.1:{port}", "weir.v1.Inference"]
    done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, timeout=60, check=False)
    server.stop(None).wait()
    assert done.returncode == 0, done.stdout


def test_how_long_certificates_last_is_a_figure_of_each_process(cluster: Cluster, worker: Served) -> None:
    metrics = cluster.gateway.metrics() | worker.metrics()
    for name in ("certificate_left_s_tls", "certificate_left_s_public_tls"):
        assert 80_000 < metrics[name] < 86_400, name


def test_a_process_keeps_its_name(cluster: Cluster, lab: Lab, worker: Served) -> None:
    """A certificate of another host in the place of its own is not used, and that is told."""
    own = lab.member("decode", cluster.instance)
    kept = own.cert.read_bytes(), own.key.read_bytes()
    other = lab.member("decode", cluster.instance, name="host-2")
    try:
        own.key.write_bytes(other.key.read_bytes())
        own.cert.write_bytes(other.cert.read_bytes())
        wait_until(lambda: "as before" in worker.log, timeout_s=CALL_S, what="the worker says that it is not used")
    finally:
        own.key.write_bytes(kept[1])
        own.cert.write_bytes(kept[0])
    pair = lab.member("gateway", cluster.instance)
    channel = open_channel(worker.address, f"worker.{cluster.instance}.weir.internal", lab.ca, pair)
    assert serve(channel, gateway_id_of(cluster.instance)) is grpc.StatusCode.OK
