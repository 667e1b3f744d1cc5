"""A stack of two hosts, as `weir up --hosts` says and `weir host` runs it: one joins, is lost, and joins again, and
what is asked meanwhile is answered as by one host."""

import shlex
from collections.abc import Iterator

import pytest
from tests.hosts.lab import needs_hosts
from tests.hosts.two_hosts import PROMPTS, RUNTIME, TIMEOUT_S, WEIR, TwoHosts, open_two_hosts

from weir.testing.stack import wait_until

pytestmark = [needs_hosts, pytest.mark.stack]
_FEW = 2
"""Sequences of a worker, so that prompts with one beginning come to both hosts."""
_LONG = " ".join(f"Rule {number}: whoever reads this line goes on to the next one." for number in range(24))


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    with open_two_hosts(tmp_path_factory.mktemp("hosts"), _FEW) as two:
        yield two


def test_hosts_join_are_lost_and_join_again_and_answers_are_those_of_one_host(hosts: TwoHosts) -> None:
    hosts.ask("alone", max_tokens=64)
    expected = hosts.answers("alone")

    hosts.start(hosts.b)
    wait_until(lambda: hosts.num_workers() == 4, timeout_s=TIMEOUT_S, what="both hosts' workers are known")
    hosts.ask("both", max_tokens=64)
    assert hosts.answers("both") == expected
    for host in (hosts.a, hosts.b):
        assert hosts.figures(host)["decode-0"]["decode_steps_total"] > 0, f"{host.name} decoded nothing"

    begun = hosts.figures(hosts.b)["decode-0"]["decode_steps_total"]
    asking = hosts.ask("lost", max_tokens=64, wait=False)
    wait_until(
        lambda: hosts.figures(hosts.b)["decode-0"]["decode_steps_total"] > begun,
        timeout_s=TIMEOUT_S,
        what="b decodes again",
    )
    hosts.b.power_off()
    assert asking.wait(TIMEOUT_S) == 0
    assert hosts.answers("lost") == expected, "tokens do not depend on who computed them, or died"
    wait_until(lambda: hosts.num_workers() == 2, timeout_s=TIMEOUT_S, what="those of b are forgotten")

    hosts.b.power_on()
    hosts.start(hosts.b)
    wait_until(lambda: hosts.num_workers() == 4, timeout_s=TIMEOUT_S, what="b's workers are known again")
    hosts.ask("again", max_tokens=64)
    assert hosts.answers("again") == expected
    assert hosts.figures(hosts.b)["decode-0"]["decode_steps_total"] > 0


def test_a_prefix_that_one_host_has_comes_to_the_other(hosts: TwoHosts) -> None:
    """Both hosts serve prompts that begin alike, and only one of them computes that beginning."""
    hosts.ask("computed", [_LONG], max_tokens=1)
    before = {host.name: hosts.figures(host) for host in (hosts.a, hosts.b)}
    hosts.ask("fetched", [_LONG + prompt for prompt in PROMPTS], max_tokens=24)
    after = {host.name: hosts.figures(host) for host in (hosts.a, hosts.b)}

    def rises(name: str) -> list[float]:
        return [after[host]["transfer-0"][name] - before[host]["transfer-0"][name] for host in after]

    num_pages = max(rises("remote_pages_received_total"))
    assert num_pages >= 16
    assert sorted(rises("remote_pages_received_total")) == sorted(rises("remote_pages_offered_total")) == [0, num_pages]
    assert sum(rises("remote_prefixes_total")) == 1
    assert sum(rises("remote_prefixes_failed_total")) == 0
    assert {hosts.figures(host)["transfer-0"]["remote_pages_pinned"] for host in (hosts.a, hosts.b)} == {0}
    hosts.ask("anew", [_LONG + prompt for prompt in PROMPTS], "--skip-prefix-cache", max_tokens=24)
    assert hosts.answers("fetched") == hosts.answers("anew")


def test_no_client_notices_that_a_host_is_drained(hosts: TwoHosts) -> None:
    hosts.ask("whole", max_tokens=64)
    begun = hosts.figures(hosts.b)["decode-0"]["decode_steps_total"]
    asking = hosts.ask("drained", max_tokens=64, wait=False)
    wait_until(
        lambda: hosts.figures(hosts.b)["decode-0"]["decode_steps_total"] > begun,
        timeout_s=TIMEOUT_S,
        what="b decodes",
    )
    drain = (*WEIR, "drain", "--host", "b", *RUNTIME)
    hosts.a.run(*drain, "--grace-s", "0", "--wait", timeout_s=TIMEOUT_S)
    assert asking.wait(TIMEOUT_S) == 0
    assert hosts.answers("drained") == hosts.answers("whole")
    assert hosts.figures(hosts.b)["decode-0"]["num_live"] == 0
    hosts.a.run(*drain, "--undo", timeout_s=TIMEOUT_S)
    with pytest.raises(RuntimeError, match="'c' has no worker; hosts with workers: a, b"):
        hosts.a.run(*WEIR, "drain", "--host", "c", *RUNTIME, timeout_s=TIMEOUT_S)


def test_operators_ask_at_a_host_with_a_scheduler(hosts: TwoHosts) -> None:
    assert "interactive" in hosts.a.run(*WEIR, "limits", "show", *RUNTIME, timeout_s=TIMEOUT_S)
    with pytest.raises(RuntimeError, match="lab has no scheduler that runs here"):
        hosts.b.run(*WEIR, "limits", "show", *RUNTIME, timeout_s=TIMEOUT_S)


def test_nobody_without_credentials_is_let_in(hosts: TwoHosts) -> None:
    """At NATS, and at workers."""
    joined = shlex.join(hosts.commands["b"]).replace("tls://", "nats://")
    command = [*shlex.split(joined)[1:], "--insecure-listen", "--start-timeout-s", "20", "--runtime-dir", "/run/other"]
    index = command.index("--credentials-dir")
    del command[index : index + 2]
    with pytest.raises(RuntimeError, match=r"transfer-0|not ready within|decode-0|prefill-0"):
        hosts.b.run(*WEIR, *command, "--arena-bytes", "256MiB", timeout_s=TIMEOUT_S)
