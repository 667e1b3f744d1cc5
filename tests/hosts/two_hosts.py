"""A stack of two hosts in a lab, as `weir up --hosts` says and `weir host` runs it."""

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.hosts.lab import Host, Lab

from weir.testing.stack import START_TIMEOUT_S, wait_until

ADDRESS = "a:50051"
WEIR = (sys.executable, "-m", "weir.cli.main")
RUNTIME = ("--runtime-dir", "/run/weir")
TIMEOUT_S = 120.0
_ARENA = ("--arena-bytes", "256MiB", "--max-context-tokens", "1024")
_SHM_BYTES = 400 << 20
_FILE = """
instance = "lab"
[hosts.a]
address = "a"
serve_nats = true
schedulers = 1
gateways = 1
{a}
[hosts.b]
address = "b"
{b}
"""
PROMPTS = [f"{word} and {number} things that follow from it:" for number in range(3) for word in ("Rain", "Iron", "A")]


@dataclass
class TwoHosts:
    """A stack in a lab, of which host `a` runs and `b` does not yet."""

    a: Host
    b: Host
    commands: dict[str, list[str]]
    max_num_seqs: int
    """Of a worker."""
    environ: Mapping[str, str] = field(default_factory=dict)
    sizes: Sequence[str] = _ARENA

    def start(self, host: Host) -> "subprocess.Popen[bytes]":
        """Ready when this returns."""
        return start_host(host, [*self.commands[host.name], *self.sizes], self.max_num_seqs, self.environ)

    def figures(self, host: Host) -> dict[str, dict[str, float]]:
        """Of the processes that run at it, as `weir status` at that host says; once all of them are ready."""
        told: dict[str, Any] = {}

        def are_all_ready() -> bool:
            try:
                told.update(json.loads(host.run(*WEIR, "status", "--json", *RUNTIME, timeout_s=TIMEOUT_S)))
            except RuntimeError:  # one is being started
                return False
            return all(process["state"] == "ready" for process in told["processes"])

        wait_until(are_all_ready, timeout_s=TIMEOUT_S, what=f"all processes of {host.name} are ready")
        return {process["name"]: process["metrics"] for process in told["processes"]}

    def ask(
        self, name: str, prompts: Sequence[str] = PROMPTS, *flags: str, max_tokens: int, wait: bool = True
    ) -> "subprocess.Popen[bytes]":
        """All prompts at once, by a client at a; its answers go to a file of this name, which is new."""
        file = self.a.disk / f"{name}.prompts.jsonl"
        file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        assert not (self.a.disk / name).exists()
        options = ("--temperature", "0", "--max-tokens", str(max_tokens), "--address", ADDRESS)
        files = ("--input", str(file), "--output", str(self.a.disk / name))
        asking = self.a.start([*WEIR, "generate", *options, *flags, *files], log=self.a.disk / f"{name}.log")
        if wait:
            assert asking.wait(TIMEOUT_S) == 0, (self.a.disk / f"{name}.log").read_text()
        return asking

    def answers(self, name: str) -> dict[Any, str]:
        lines = [json.loads(line) for line in (self.a.disk / name).read_text().splitlines()]
        assert len(lines) == len(PROMPTS)
        return {line["id"]: line["text"] for line in lines}

    def num_workers(self) -> int:
        """That the scheduler knows."""
        return int(self.figures(self.a)["scheduler-0"]["workers"])


@contextmanager
def open_two_hosts(
    folder: Path,
    max_num_seqs: int,
    *flags: str,
    a_has: str = "",
    b_has: str = "",
    rate_mbit: float = 0.0,
    environ: Mapping[str, str] | None = None,
    sizes: Sequence[str] = _ARENA,
    shm_bytes: int = _SHM_BYTES,
) -> Iterator[TwoHosts]:
    """Host `a` runs. `max_num_seqs`: of a worker. `flags`: of `weir up`; `a_has`, `b_has`: lines of the hosts' file.
    `rate_mbit`: of the hosts' links; 0: what the machine can do. `environ`: of all processes; `sizes`: flags
    of `weir host`."""
    (folder / "hosts.toml").write_text(_FILE.format(a=a_has, b=b_has))
    with Lab(folder) as lab:
        a, b = (lab.host(name, shm_bytes=shm_bytes) for name in ("a", "b"))
        for host in (a, b) if rate_mbit else ():
            host.shape(rate_mbit)
        two = TwoHosts(a, b, make_credentials(folder, (a, b), flags), max_num_seqs, environ or {}, sizes)
        two.start(a)
        yield two


def make_credentials(folder: Path, hosts: Sequence[Host], flags: Sequence[str] = ()) -> dict[str, list[str]]:
    """New ones for the hosts that `hosts.toml` in `folder` names, each on its host's disk. By host the command that
    runs it. `flags`: of `weir up`."""
    made = [*WEIR, "up", "--hosts", str(folder / "hosts.toml"), "--out", str(folder / "made"), "--grace-s", "3"]
    made += flags
    printed = subprocess.run(made, check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()
    commands = {}
    for host, line in zip(hosts, printed[1::2], strict=True):
        own, copied = host.disk / "credentials", host.disk / "credentials.new"
        shutil.copytree(folder / "made" / host.name, copied)
        own.mkdir(mode=0o700, exist_ok=True)
        for file in copied.iterdir():
            file.replace(own / file.name)
        copied.rmdir()
        commands[host.name] = shlex.split(line.replace(str(folder / "made" / host.name), str(own)))
    return commands


def start_host(
    host: Host, command: Sequence[str], max_num_seqs: int, environ: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """As that command says. Ready when this returns."""
    log = host.disk / "host.log"
    environ = {"WEIR_MAX_NUM_SEQS": str(max_num_seqs), **(environ or {})}
    said = log.stat().st_size if log.exists() else 0
    process = host.start([*WEIR, *command[1:], *RUNTIME], log=log, env=environ)

    def is_ready() -> bool:
        text = log.read_bytes()[said:].decode(errors="replace")
        assert process.poll() is None, text
        return "ready after" in text and "Ctrl-C ends it" in text

    wait_until(is_ready, timeout_s=START_TIMEOUT_S, what=f"host {host.name} is ready")
    return process
