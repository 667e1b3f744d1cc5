"""Probe of a container's health: exit 0 when the process at ADDRESS says SERVING, else 1 with the reason on stdout.

Usage: healthcheck.py ADDRESS, where ADDRESS is HOST:PORT or unix:/PATH.
"""

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0


def probe(address: str) -> tuple[bool, str]:
    """Whether the whole process (health service name "") is SERVING, and what it said."""
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=""), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return False, f"{error.code().name}: {error.details()}"
    return answer.status == health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.ServingStatus.Name(
        answer.status
    )


def main() -> int:
    if len(sys.argv) != 2:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    is_serving, said = probe(sys.argv[1])
    sys.stdout.write(f"{sys.argv[1]}: {said}\n")
    return 0 if is_serving else 1


if __name__ == "__main__":
    raise SystemExit(main())
