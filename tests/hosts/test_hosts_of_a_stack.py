"""A stack of two hosts, as `weir up --hosts` says and `weir host` runs it: one joins, is lost, and joins again, and
what is asked meanwhile is answered as by one host."""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from tests.hosts.lab import Host, Lab, needs_hosts

from weir.testing.stack import START_TIMEOUT_S, wait_until

pytestmark = [needs_hosts, pytest.mark.stack]
_HTTP_PORT, _GRPC_PORT = 8000, 50051
_ADDRESS = f"a:{_GRPC_PORT}"
_WEIR = (sys.executable, "-m", "weir.cli.main")
_ARENA = ("--arena-bytes", "256MiB", "--max-context-tokens", "1024")
_RUNTIME = ("--runtime-dir", "/run/weir")
_TIMEOUT_S = 120.0
_FILE = """
instance = "lab"
[hosts.a]
address = "a"
serve_nats = true
schedulers = 1
gateways = 1
[hosts.b]
address = "b"
"""
_FEW = {"WEIR_MAX_NUM_SEQS": "2"}
"""Sequences of a worker, so that prompts with one beginning come to both hosts."""
_LONG = " ".join(f"Rule {number}: whoever reads this line goes on to the next one." for number in range(24))
_PROMPTS = [f"{word} and {number} things that follow from it:" for number in range(3) for word in ("Rain", "Iron", "A")]


@dataclass
class TwoHosts:
    """A stack in a lab, of which host `a` runs and `b` does not yet."""

    a: Host
    b: Host
    commands: dict[str, list[str]]

    def start(self, host: Host) -> "subprocess.Popen[bytes]":
        """Ready when this returns."""
        log = host.disk / "host.log"
        process = host.start([*_WEIR, *self.commands[host.name][1:], *_ARENA, *_RUNTIME], log=log, env=_FEW)
        said = log.stat().st_size if log.exists() else 0

        def is_ready() -> bool:
            text = log.read_bytes()[said:].decode(errors="replace")
            assert process.poll() is None, text
            return "ready after" in text and "Ctrl-C ends it" in text

        wait_until(is_ready, timeout_s=START_TIMEOUT_S, what=f"host {host.name} is ready")
        return process

    def figures(self, host: Host) -> dict[str, dict[str, float]]:
        """Of the processes that run at it, as `weir status` at that host says."""
        told = json.loads(host.run(*_WEIR, "status", "--json", *_RUNTIME, timeout_s=_TIMEOUT_S))
        assert all(process["state"] == "ready" for process in told["processes"]), told
        return {process["name"]: process["metrics"] for process in told["processes"]}

    def ask(
        self, name: str, prompts: Sequence[str] = _PROMPTS, *flags: str, max_tokens: int, wait: bool = True
    ) -> "subprocess.Popen[bytes]":
        """All prompts at once, by a client at a; its answers go to a file of this name, which is new."""
        file = self.a.disk / f"{name}.prompts.jsonl"
        file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        assert not (self.a.disk / name).exists()
        options = ("--temperature", "0", "--max-tokens", str(max_tokens), "--address", _ADDRESS)
        files = ("--input", str(file), "--output", str(self.a.disk / name))
        asking = self.a.start([*_WEIR, "generate", *options, *flags, *files], log=self.a.disk / f"{name}.log")
        if wait:
            assert asking.wait(_TIMEOUT_S) == 0, (self.a.disk / f"{name}.log").read_text()
        return asking

    def answers(self, name: str) -> dict[Any, str]:
        lines = [json.loads(line) for line in (self.a.disk / name).read_text().splitlines()]
        assert len(lines) == len(_PROMPTS)
        return {line["id"]: line["text"] for line in lines}

    def num_workers(self) -> int:
        """That the scheduler knows."""
        return int(self.figures(self.a)["scheduler-0"]["workers"])


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "hosts.toml").write_text(_FILE)
    with Lab(folder) as lab:
        a, b = (lab.host(name, shm_bytes=400 << 20) for name in ("a", "b"))
        made = [*_WEIR, "up", "--hosts", str(folder / "hosts.toml"), "--out", str(folder / "made"), "--grace-s", "3"]
        printed = subprocess.run(made, check=True, capture_output=True, text=True, timeout=60).stdout.splitlines()
        commands = {}
        for host, line in zip((a, b), printed[1::2], strict=True):
            (folder / "made" / host.name).rename(host.disk / "credentials")
            own = line.replace(str(folder / "made" / host.name), str(host.disk / "credentials"))
            commands[host.name] = shlex.split(own)
        two = TwoHosts(a, b, commands)
        two.start(a)
        yield two


def test_hosts_join_are_lost_and_join_again_and_answers_are_those_of_one_host(hosts: TwoHosts) -> None:
    hosts.ask("alone", max_tokens=64)
    expected = hosts.answers("alone")

    hosts.start(hosts.b)
    wait_until(lambda: hosts.num_workers() == 4, timeout_s=_TIMEOUT_S, what="both hosts' workers are known")
    hosts.ask("both", max_tokens=64)
    assert hosts.answers("both") == expected
    for host in (hosts.a, hosts.b):
        assert hosts.figures(host)["decode-0"]["decode_steps_total"] > 0, f"{host.name} decoded nothing"

    begun = hosts.figures(hosts.b)["decode-0"]["decode_steps_total"]
    asking = hosts.ask("lost", max_tokens=64, wait=False)
    wait_until(
        lambda: hosts.figures(hosts.b)["decode-0"]["decode_steps_total"] > begun,
        timeout_s=_TIMEOUT_S,
        what="b decodes again",
    )
    hosts.b.power_off()
    assert asking.wait(_TIMEOUT_S) == 0
    assert hosts.answers("lost") == expected, "tokens do not depend on who computed them, or died"
    wait_until(lambda: hosts.num_workers() == 2, timeout_s=_TIMEOUT_S, what="those of b are forgotten")

    hosts.b.power_on()
    hosts.start(hosts.b)
    wait_until(lambda: hosts.num_workers() == 4, timeout_s=_TIMEOUT_S, what="b's workers are known again")
    hosts.ask("again", max_tokens=64)
    assert hosts.answers("again") == expected
    assert hosts.figures(hosts.b)["decode-0"]["decode_steps_total"] > 0


def test_a_prefix_that_one_host_has_comes_to_the_other(hosts: TwoHosts) -> None:
    """Both hosts serve prompts that begin alike, and only one of them computes that beginning."""
    hosts.ask("computed", [_LONG], max_tokens=1)
    before = {host.name: hosts.figures(host) for host in (hosts.a, hosts.b)}
    hosts.ask("fetched", [_LONG + prompt for prompt in _PROMPTS], max_tokens=24)
    after = {host.name: hosts.figures(host) for host in (hosts.a, hosts.b)}

    def rises(name: str) -> list[float]:
        return [after[host]["transfer-0"][name] - before[host]["transfer-0"][name] for host in after]

    num_pages = max(rises("remote_pages_received_total"))
    assert num_pages >= 16
    assert sorted(rises("remote_pages_received_total")) == sorted(rises("remote_pages_offered_total")) == [0, num_pages]
    assert sum(rises("remote_prefixes_total")) == 1
    assert sum(rises("remote_prefixes_failed_total")) == 0
    assert {hosts.figures(host)["transfer-0"]["remote_pages_pinned"] for host in (hosts.a, hosts.b)} == {0}
    hosts.ask("anew", [_LONG + prompt for prompt in _PROMPTS], "--skip-prefix-cache", max_tokens=24)
    assert hosts.answers("fetched") == hosts.answers("anew")


def test_no_client_notices_that_a_host_is_drained(hosts: TwoHosts) -> None:
    hosts.ask("whole", max_tokens=64)
    begun = hosts.figures(hosts.b)["decode-0"]["decode_steps_total"]
    asking = hosts.ask("drained", max_tokens=64, wait=False)
    wait_until(
        lambda: hosts.figures(hosts.b)["decode-0"]["decode_steps_total"] > begun,
        timeout_s=_TIMEOUT_S,
        what="b decodes",
    )
    drain = (*_WEIR, "drain", "--host", "b", *_RUNTIME)
    hosts.a.run(*drain, "--grace-s", "0", "--wait", timeout_s=_TIMEOUT_S)
    assert asking.wait(_TIMEOUT_S) == 0
    assert hosts.answers("drained") == hosts.answers("whole")
    assert hosts.figures(hosts.b)["decode-0"]["num_live"] == 0
    hosts.a.run(*drain, "--undo", timeout_s=_TIMEOUT_S)
    with pytest.raises(RuntimeError, match="'c' has no worker; hosts with workers: a, b"):
        hosts.a.run(*_WEIR, "drain", "--host", "c", *_RUNTIME, timeout_s=_TIMEOUT_S)


def test_operators_ask_at_a_host_with_a_scheduler(hosts: TwoHosts) -> None:
    assert "interactive" in hosts.a.run(*_WEIR, "limits", "show", *_RUNTIME, timeout_s=_TIMEOUT_S)
    with pytest.raises(RuntimeError, match="lab has no scheduler that runs here"):
        hosts.b.run(*_WEIR, "limits", "show", *_RUNTIME, timeout_s=_TIMEOUT_S)


def test_nobody_without_credentials_is_let_in(hosts: TwoHosts) -> None:
    """At NATS, and at workers."""
    joined = shlex.join(hosts.commands["b"]).replace("tls://", "nats://")
    command = [*shlex.split(joined)[1:], "--insecure-listen", "--start-timeout-s", "20", "--runtime-dir", "/run/other"]
    index = command.index("--credentials-dir")
    del command[index : index + 2]
    with pytest.raises(RuntimeError, match=r"transfer-0|not ready within|decode-0|prefill-0"):
        hosts.b.run(*_WEIR, *command, *_ARENA, timeout_s=_TIMEOUT_S)
