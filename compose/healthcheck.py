"""Probe of a container's health: exit 0 when SERVICE at ADDRESS is SERVING, else 1 with the reason on stdout.

Usage: healthcheck.py ADDRESS [SERVICE]
       healthcheck.py http://HOST:PORT/PATH

ADDRESS is HOST:PORT or unix:/PATH. A process reports each of its gRPC services as SERVING once it is warmed up and
NOT_SERVING when it drains; without SERVICE the question is only whether the process is alive. Where the process has a
certificate, by the same variables of the environment, so has this: WEIR_PUBLIC_TLS_CERT for a gateway's port, which it
has where SERVICE is weir.v1.Inference, else WEIR_TLS_CERT.
"""

import os
import sys
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import grpc

TIMEOUT_S = 3.0
_PUBLIC_SERVICE = "weir.v1.Inference"


def open_channel(address: str, service: str) -> "grpc.Channel":
    """To the process in this container: it is known by its certificate's file, whoever signed it."""
    import grpc  # noqa: PLC0415 - probes by HTTP are spared it

    setting = "PUBLIC_TLS" if service == _PUBLIC_SERVICE else "TLS"
    if address.startswith("unix:") or not os.environ.get(f"WEIR_{setting}_CERT"):
        return grpc.insecure_channel(address)
    from weir.rpc.tls.certificates import CertificateFiles  # noqa: PLC0415 - no other probe needs it

    paths = [os.environ.get(f"WEIR_{setting}_{part}", "") for part in ("CERT", "KEY", "CA")]
    found = CertificateFiles(*paths, setting=setting.lower()).load()
    if setting == "TLS":
        credentials = grpc.ssl_channel_credentials(found.ca_pem, found.key_pem, found.chain_pem)
    else:
        credentials = grpc.ssl_channel_credentials(found.chain_pem)
    name = [*found.dns_names, *found.addresses][0]
    return grpc.secure_channel(address, credentials, options=[("grpc.ssl_target_name_override", name)])


def probe(address: str, service: str) -> tuple[bool, str]:
    """Whether `service` is SERVING at `address`, and what was said."""
    import grpc  # noqa: PLC0415
    from grpc_health.v1 import health_pb2, health_pb2_grpc  # noqa: PLC0415

    with open_channel(address, service) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # its stubs know no methods
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return False, f"{error.code().name}: {error.details()}"
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return status == "SERVING", status


def probe_http(url: str) -> tuple[bool, str]:
    """Whether it answers with a status of 200 to 299, and what was said. No proxy is asked: it is this container's."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=TIMEOUT_S) as answer:
            return True, str(answer.status)
    except urllib.error.HTTPError as error:
        return False, str(error.code)
    except OSError as error:
        return False, str(error)


def main() -> int:
    if len(sys.argv) not in {2, 3}:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    address, service = [*sys.argv[1:], ""][:2]
    is_serving, said = probe_http(address) if address.startswith("http://") else probe(address, service)
    sys.stdout.write(f"{service or 'process'} at {address}: {said}\n")
    return 0 if is_serving else 1


if __name__ == "__main__":
    raise SystemExit(main())
