"""What is started and asked in one run: the whole stack, the same with certificates, or two hosts."""

import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from tests.containers.checks import Seen, Wrong, check_answers, check_kernels, check_metrics, check_trace
from tests.containers.kills import KINDS, Killer
from tests.containers.stack import ROOT, WHOLE, ComposeStack

UID = 10001
"""Of the image's user."""
_PLAIN = """
import grpc, sys
from grpc_health.v1 import health_pb2, health_pb2_grpc
try:
    health_pb2_grpc.HealthStub(grpc.insecure_channel(sys.argv[1])).Check(health_pb2.HealthCheckRequest(), timeout=10)
except grpc.RpcError as error:
    print(error.code().name)
"""
_WITH_TLS = ("prefill", "decode", "scheduler", "gateway")


class Part(ABC):
    """One run."""

    name: ClassVar[str]
    files: Sequence[str]
    """Known once it is prepared."""
    left_out: ClassVar[Sequence[str]] = ("grafana",)
    healthy: ClassVar[str]

    def prepare(self, folder: Path) -> Mapping[str, str]:
        """Makes what it needs in `folder`; variables for Compose."""
        del folder
        return {}

    def before_up(self, stack: ComposeStack) -> None:
        """Once the image is there."""
        del stack

    @abstractmethod
    def check(self, stack: ComposeStack) -> Iterator[Seen]:
        """Raises Wrong, TimeoutError, CommandFailed."""


class WholeStack(Part):
    """All of compose.yaml, with a kill of each process."""

    name = "stack"
    files = (WHOLE,)
    healthy = "two gateways, two schedulers, one of each other service, all healthy:"

    def check(self, stack: ComposeStack) -> Iterator[Seen]:
        for check in (check_answers, check_trace, check_metrics):
            yield check(stack)
        killer = Killer(stack)
        for kind in KINDS:
            yield killer.kill(kind)
        yield from check_kernels(stack)


class WithCertificates(Part):
    """tls.yaml over it."""

    name = "tls"
    files = (WHOLE, "compose/tls.yaml")
    left_out = ("grafana", "prometheus", "jaeger")
    healthy = "two gateways, two schedulers, one of each other process, all healthy by probes with TLS:"

    def prepare(self, folder: Path) -> Mapping[str, str]:
        certs = folder / "certs"
        weir("certs", "ca", str(certs))
        for role in _WITH_TLS:
            weir("certs", "issue", str(certs), "--role", role, "--host", "compose")
        give_to_image(certs)
        return {"CERTS_DIR": str(certs), "OTLP_ENDPOINT": ""}

    def check(self, stack: ComposeStack) -> Iterator[Seen]:
        yield check_answers(stack)
        refused = {}
        for role in ("prefill", "decode", "scheduler"):
            refused[role] = stack.exec("gateway", "python3", "-c", _PLAIN, f"{role}:50051").strip()
        if set(refused.values()) != {"UNAVAILABLE"}:
            raise Wrong(f"without TLS: {refused}")
        yield Seen("health of prefill, decode and a scheduler, asked without TLS", "UNAVAILABLE, three times")


def weir(*arguments: str) -> None:
    """Raises CalledProcessError."""
    subprocess.run([sys.executable, "-m", "weir.cli.main", *arguments], cwd=ROOT, check=True, timeout=120)


def give_to_image(folder: Path) -> None:
    """The image's user reads it, and nobody else needs to."""
    for path in (folder, *folder.rglob("*")):
        os.chown(path, UID, UID)
