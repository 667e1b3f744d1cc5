"""The stack that is disturbed: hosts `a` and `b` with all that can stand in for one another, and `n` with NATS."""

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tests.hosts.lab import Host, Lab
from tests.hosts.two_hosts import RUNTIME, TIMEOUT_S, WEIR, make_credentials, start_host

from weir.runtime.stack.observe import try_describe
from weir.runtime.stack.paths import InstancePaths
from weir.runtime.stack.state import ProcessState, try_read_state
from weir.wire.v1 import admin_pb2

INSTANCE = "lab"
ARENA = ("--arena-bytes", "160MiB", "--max-context-tokens", "1024")
"""Less than all that is asked for has room: prefixes are evicted at one host and come again from the other."""
MAX_NUM_SEQS = 3
"""Of a worker, so that prompts of one beginning come to both hosts."""
_SHM_BYTES = 300 << 20
_GRPC_PORT = 50051
_FILE = """
instance = "lab"
[hosts.n]
address = "n"
serve_nats = true
prefill = 0
decode = 0
[hosts.a]
address = "a"
schedulers = 1
gateways = 1
[hosts.b]
address = "b"
schedulers = 1
gateways = 1
"""


@dataclass(frozen=True)
class HostProcess:
    """A process as its host's supervisor has written it down. `state.identity` is as the host sees it."""

    host: Host
    state: ProcessState

    @property
    def name(self) -> str:
        return f"{self.state.name} of {self.host.name}"

    @property
    def pid(self) -> int:
        """0: none at the moment."""
        return self.state.identity.pid if self.state.identity else 0

    @property
    def is_ready(self) -> bool:
        return self.state.phase == "ready" and self.pid > 0


class StackOfHosts:
    """Made by `open_hosts`. The caller is at the switch."""

    def __init__(self, folder: Path, nats: Host, pair: Sequence[Host]) -> None:
        self._folder = folder
        self.nats = nats
        self.pair = pair
        """Those with workers, a scheduler and a gateway each."""
        self._commands = make_credentials(folder, self.hosts)

    @property
    def hosts(self) -> tuple[Host, ...]:
        return (self.nats, *self.pair)

    @property
    def gateways(self) -> list[str]:
        return [f"{host.address}:{_GRPC_PORT}" for host in self.pair]

    def start(self, host: Host) -> None:
        start_host(host, [*self._commands[host.name], *ARENA], MAX_NUM_SEQS)

    def renew_certificates(self) -> None:
        make_credentials(self._folder, self.hosts)

    def processes(self, *hosts: Host) -> list[HostProcess]:
        """None of a host that is off, or starts. Default: of all."""
        found = []
        for host in hosts or self.hosts:
            with contextlib.suppress(OSError, RuntimeError):
                state = try_read_state(host.files / f"run/weir/{INSTANCE}/state.json")
                found += [HostProcess(host, process) for process in (state.processes if state else ())]
        return found

    def send(self, victim: HostProcess, name: str) -> bool:
        """A signal, by its name. False: it is gone already."""
        try:
            victim.host.run("sh", "-c", f"kill -{name} {victim.pid}")
        except (RuntimeError, subprocess.TimeoutExpired):
            return False
        return True

    def weir(self, host: Host, *arguments: str) -> str:
        """Of the command line program there. Raises RuntimeError, TimeoutExpired."""
        return host.run(*WEIR, *arguments, *RUNTIME, timeout_s=TIMEOUT_S)

    async def try_describe(self, process: HostProcess) -> admin_pb2.DescribeResponse | None:
        """None: it does not answer."""
        if not process.pid or not process.state.address:
            return None
        try:
            files = process.host.files
            key = InstancePaths(files / f"run/weir/{INSTANCE}").try_read_admin_key()
            key_file = process.host.disk / "credentials" / "admin.key"
            key = key or (key_file.read_text().strip() if key_file.exists() else "")
        except (OSError, RuntimeError):  # it has lost its power
            return None
        state = process.state
        unix, socket = state.address.startswith("unix:"), state.address.removeprefix("unix:")
        port = state.address.rpartition(":")[2]
        address = f"unix:{files}{socket}" if unix else f"{process.host.address}:{port}"
        return await try_describe(replace(state, address=address, ready_file=f"{files}{state.ready_file}"), key)


@contextmanager
def open_hosts(folder: Path) -> Iterator[StackOfHosts]:
    """All run. Takes this thread to the switch for good."""
    (folder / "hosts.toml").write_text(_FILE)
    with Lab(folder) as lab:
        lab.join()
        nats, *pair = (lab.host(name, shm_bytes=_SHM_BYTES) for name in ("n", "a", "b"))
        stack = StackOfHosts(folder, nats, pair)
        for host in stack.hosts:
            stack.start(host)
        yield stack
