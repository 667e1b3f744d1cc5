"""NATS, a scheduler, a gateway and a worker that computes nothing, as processes of their own."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import httpx

from weir.bus.server import nats_server_command
from weir.core.addresses import LOOPBACK, free_port
from weir.rpc.identities import CertifiedIdentity, CertifiedRole
from weir.rpc.tls.public import https_context
from weir.runtime.authority import authority_pair, issue_member, issue_public, make_authority

_READY_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 15.0
_POLL_S = 0.2
_AT_ONCE = ("--max-prefills-per-worker", "1024", "--max-prefill-tokens-per-worker", "1000000")


class NullStack:
    """A context manager; `pids` by process while it is entered. What the processes say is in files of `folder`."""

    def __init__(
        self, folder: Path, model: str, step_ms: float, gateway: Sequence[str], *, with_tls: bool = False
    ) -> None:
        """`gateway`: its module, and flags of its own. `with_tls`: between the processes, and for clients, who trust
        the authority in the file `ca`."""
        self.ca = str(authority_pair(folder).cert) if with_tls else ""
        self.http_port, self.grpc_port = free_port(), free_port()
        self._folder = folder
        self._model = model
        self._step_ms = step_ms
        self._gateway = tuple(gateway)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = ExitStack()

    @property
    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self._processes.items()}

    def __enter__(self) -> "NullStack":
        """Raises RuntimeError if it does not become ready."""
        try:
            self._start_all()
            self._wait_ready()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _start_all(self) -> None:
        nats_port = free_port()
        nats_url, instance = f"nats://127.0.0.1:{nats_port}", f"null-{nats_port}"
        python = (sys.executable, "-m")
        common = ("--nats-url", nats_url, "--instance", instance)
        service = (*common, "--model", self._model, "--runtime-dir", str(self._folder))
        self._start("NATS", nats_server_command(nats_port, self._folder / "nats"))
        self._start(
            "scheduler", [*python, "weir_scheduler", *service, *self._certificates("scheduler", instance), *_AT_ONCE]
        )
        worker = ("--model", self._model, "--step-ms", str(self._step_ms))
        self._start(
            "null worker",
            [*python, "benchmarks.wire.null_worker", *common, *self._certificates("decode", instance), *worker],
        )
        ports = ("--listen", f"127.0.0.1:{self.grpc_port}", "--http-port", str(self.http_port))
        module, *flags = self._gateway
        flags += self._certificates("gateway", instance)
        if self.ca:
            public = issue_public(self._folder, ("localhost", LOOPBACK))
            flags += ["--public-tls-cert", str(public.cert), "--public-tls-key", str(public.key)]
        self._start("gateway", [*python, module, *service, *ports, *flags])

    def _certificates(self, role: CertifiedRole, instance: str) -> list[str]:
        """Flags; none without TLS."""
        if not self.ca:
            return []
        if not Path(self.ca).exists():
            make_authority(self._folder)
        made = issue_member(self._folder, CertifiedIdentity(instance, role, "here"))
        return ["--tls-cert", str(made.cert), "--tls-key", str(made.key), "--tls-ca", self.ca]

    def _start(self, name: str, command: Sequence[str]) -> None:
        log = self._stack.enter_context((self._folder / f"{name.replace(' ', '-')}.log").open("wb"))
        process = subprocess.Popen(command, env=os.environ, stdout=log, stderr=subprocess.STDOUT)
        self._processes[name] = process
        self._stack.callback(_end, process)

    def _wait_ready(self) -> None:
        """A first answer shows that all of them have found each other."""
        ends_at_s = time.monotonic() + _READY_TIMEOUT_S
        body = {"model": self._model, "prompt": [1000], "max_tokens": 1}
        while time.monotonic() < ends_at_s:
            for name, process in self._processes.items():
                if process.poll() is not None:
                    raise RuntimeError(f"{name} ended with {process.returncode}: {self._last_words(name)}")
            try:
                url = f"{'https' if self.ca else 'http'}://{LOOPBACK}:{self.http_port}/v1/completions"
                answer = httpx.post(url, json=body, timeout=_READY_TIMEOUT_S, verify=https_context(self.ca))
                if answer.status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            time.sleep(_POLL_S)
        raise RuntimeError(f"not ready within {_READY_TIMEOUT_S:.0f} s: {self._last_words('gateway')}")

    def _last_words(self, name: str) -> str:
        return (self._folder / f"{name.replace(' ', '-')}.log").read_text(errors="replace")[-500:]


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_STOP_TIMEOUT_S)
