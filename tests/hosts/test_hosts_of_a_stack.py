"""A stack of two hosts, as `weir up --hosts` says and `weir host` runs it: one joins, is lost, and joins again, and
what is asked meanwhile is answered as by one host."""

import shlex
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.hosts.lab import needs_hosts
from tests.hosts.streams import Asked, Streams
from tests.hosts.two_hosts import PROMPTS, RUNTIME, TIMEOUT_S, WEIR, TwoHosts, open_two_hosts

from weir.testing.stack import wait_until

pytestmark = [needs_hosts, pytest.mark.stack]
_FEW = 2
"""Sequences of a worker, so that prompts with one beginning come to both hosts."""
_QUICK_LINKS = {"WEIR_LINK_MBIT_S": "100000"}
"""On a quick machine computing is as soon as the transfer over a link that is believed slow."""
_LONG = " ".join(f"Rule {number}: whoever reads this line goes on to the next one." for number in range(24))


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    with open_two_hosts(tmp_path_factory.mktemp("hosts"), _FEW, environ=_QUICK_LINKS) as two:
        yield two


@pytest.fixture
def both(hosts: TwoHosts) -> TwoHosts:
    """Also where the test in which b joins is not run."""
    if hosts.num_workers() < 4:
        hosts.start(hosts.b)
        wait_until(lambda: hosts.num_workers() == 4, timeout_s=TIMEOUT_S, what="both hosts' workers are known")
    return hosts


_MANY = 600
"""Tokens, so that a stream on a busy machine does not end before a host is drained."""
STORIES = [
    Asked("Once it rained for a year, and", {"temperature": 0.0, "max_tokens": _MANY, "logprobs": 2}),
    Asked("The oldest bridge of the town", {"temperature": 0.9, "seed": 7, "max_tokens": _MANY, "logprobs": 0}),
]
OTHERS = [
    Asked("Whoever finds the key will", {"temperature": 0.7, "seed": 5, "max_tokens": _MANY}),
    Asked("Nobody had seen the sea before", {"temperature": 0.0, "max_tokens": _MANY}),
]


def drain_host(hosts: TwoHosts, host: str, *flags: str) -> None:
    hosts.a.run(*WEIR, "drain", "--host", host, *RUNTIME, *flags, timeout_s=TIMEOUT_S)


def check_nothing_is_left(hosts: TwoHosts) -> None:
    """No page is pinned or on its way, and no sequence lives; `weir status` finds nothing wrong anywhere."""

    def is_idle() -> bool:
        figures = [hosts.figures(host) for host in (hosts.a, hosts.b)]
        pages = [one["transfer-0"][f"remote_pages_{name}"] for one in figures for name in ("pinned", "reserved")]
        live = [one["decode-0"][name] for one in figures for name in ("num_live", "stagings_under_way")]
        return not any((*pages, *live, figures[0]["gateway-0"]["migrations_under_way"]))

    wait_until(is_idle, timeout_s=TIMEOUT_S, what="nothing is left of what was migrated")


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


@pytest.mark.long
def test_a_prefix_that_one_host_has_comes_to_the_other(both: TwoHosts) -> None:
    """Both hosts serve prompts that begin alike, and only one of them computes that beginning."""
    both.ask("computed", [_LONG], max_tokens=1)
    before = {host.name: both.figures(host) for host in (both.a, both.b)}
    both.ask("fetched", [_LONG + prompt for prompt in PROMPTS], max_tokens=24)
    after = {host.name: both.figures(host) for host in (both.a, both.b)}

    def rises(name: str) -> list[float]:
        return [after[host]["transfer-0"][name] - before[host]["transfer-0"][name] for host in after]

    num_pages = max(rises("remote_pages_received_total"))
    assert num_pages >= 16
    assert sorted(rises("remote_pages_received_total")) == sorted(rises("remote_pages_offered_total")) == [0, num_pages]
    assert sum(rises("remote_prefixes_total")) == 1
    assert sum(rises("remote_prefixes_failed_total")) == 0
    assert {both.figures(host)["transfer-0"]["remote_pages_pinned"] for host in (both.a, both.b)} == {0}
    both.ask("anew", [_LONG + prompt for prompt in PROMPTS], "--skip-prefix-cache", max_tokens=24)
    assert both.answers("fetched") == both.answers("anew")


@pytest.mark.long
def test_no_client_notices_that_a_host_is_drained(both: TwoHosts) -> None:
    both.ask("whole", max_tokens=64)
    begun = both.figures(both.b)["decode-0"]["decode_steps_total"]
    asking = both.ask("drained", max_tokens=64, wait=False)
    wait_until(
        lambda: both.figures(both.b)["decode-0"]["decode_steps_total"] > begun,
        timeout_s=TIMEOUT_S,
        what="b decodes",
    )
    drain = (*WEIR, "drain", "--host", "b", *RUNTIME)
    both.a.run(*drain, "--grace-s", "0", "--wait", timeout_s=TIMEOUT_S)
    assert asking.wait(TIMEOUT_S) == 0
    assert both.answers("drained") == both.answers("whole")
    assert both.figures(both.b)["decode-0"]["num_live"] == 0
    both.a.run(*drain, "--undo", timeout_s=TIMEOUT_S)
    with pytest.raises(RuntimeError, match="'c' has no worker; hosts with workers: a, b"):
        both.a.run(*WEIR, "drain", "--host", "c", *RUNTIME, timeout_s=TIMEOUT_S)


def test_streams_migrate_amid_decoding_with_the_same_tokens(both: TwoHosts) -> None:
    """Greedy and seeded ones, with log-probabilities, from b to a; nothing of them stays behind."""
    drain_host(both, "a", "--grace-s", "0", "--wait")
    before = both.figures(both.a)
    streams = Streams(both.a, STORIES)
    streams.wait_begun()
    drain_host(both, "a", "--undo")
    drain_host(both, "b", "--wait")
    migrated = streams.read()
    after = both.figures(both.a)
    assert after["gateway-0"]["migrations_moved_total"] - before["gateway-0"]["migrations_moved_total"] == 2
    assert after["gateway-0"]["interruptions_total"] == before["gateway-0"]["interruptions_total"]
    num_pages = after["transfer-0"]["remote_pages_received_total"] - before["transfer-0"]["remote_pages_received_total"]
    assert num_pages > 0
    anew = [replace(one, options=one.options | {"skips_prefix_cache": True}) for one in STORIES]
    assert [one.answer for one in migrated] == [one.answer for one in Streams(both.a, anew).read()]
    check_nothing_is_left(both)
    drain_host(both, "b", "--undo")


@pytest.mark.long
def test_a_worker_that_dies_amid_a_migration_and_a_client_that_goes(both: TwoHosts) -> None:
    """From a, which alone decodes at first, to b."""
    drain_host(both, "b", "--grace-s", "0", "--wait")
    expected = Streams(both.a, OTHERS[:1]).read()
    streams = Streams(both.a, [OTHERS[0], replace(OTHERS[1], most=40)])
    streams.wait_begun()
    drain_host(both, "b", "--undo")
    drain_host(both, "a")
    both.a.run("sh", "-c", "kill -9 $(pgrep -f [w]eir_decode)")
    found, gone = streams.read()
    assert found.answer == expected[0].answer
    assert len(gone.token_ids) >= 40
    wait_until(lambda: both.num_workers() == 4, timeout_s=TIMEOUT_S, what="a decodes again")
    drain_host(both, "a", "--undo")
    check_nothing_is_left(both)


@pytest.mark.long
def test_a_host_that_dies_while_streams_come_to_it(both: TwoHosts) -> None:
    expected = Streams(both.a, OTHERS).read()
    drain_host(both, "b", "--grace-s", "0", "--wait")
    streams = Streams(both.a, OTHERS)
    streams.wait_begun()
    drain_host(both, "b", "--undo")
    drain_host(both, "a")
    both.b.power_off()
    drain_host(both, "a", "--undo")
    assert [one.answer for one in streams.read()] == [one.answer for one in expected]
    both.b.power_on()
    both.start(both.b)
    wait_until(lambda: both.num_workers() == 4, timeout_s=TIMEOUT_S, what="b's workers are known again")
    check_nothing_is_left(both)


def test_operators_ask_at_a_host_with_a_scheduler(both: TwoHosts) -> None:
    assert "interactive" in both.a.run(*WEIR, "limits", "show", *RUNTIME, timeout_s=TIMEOUT_S)
    with pytest.raises(RuntimeError, match="lab has no scheduler that runs here"):
        both.b.run(*WEIR, "limits", "show", *RUNTIME, timeout_s=TIMEOUT_S)


def test_nobody_without_credentials_is_let_in(both: TwoHosts) -> None:
    """At NATS, and at workers."""
    joined = shlex.join(both.commands["b"]).replace("tls://", "nats://")
    command = [*shlex.split(joined)[1:], "--insecure-listen", "--start-timeout-s", "20", "--runtime-dir", "/run/other"]
    index = command.index("--credentials-dir")
    del command[index : index + 2]
    with pytest.raises(RuntimeError, match=r"transfer-0|not ready within|decode-0|prefill-0"):
        both.b.run(*WEIR, *command, "--arena-bytes", "256MiB", timeout_s=TIMEOUT_S)
