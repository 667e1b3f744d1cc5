"""Two hosts of one decode worker each: streams that all run at one of them spread by themselves."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.hosts.lab import needs_hosts
from tests.hosts.streams import Asked, Streams
from tests.hosts.two_hosts import RUNTIME, TIMEOUT_S, WEIR, TwoHosts, open_two_hosts

from weir.testing.stack import wait_until

pytestmark = [needs_hosts, pytest.mark.stack, pytest.mark.long]
_NO_PREFILL = "prefill = 0"
"""A worker that computes prompts and answers soon knows what both cost."""
_SIZES = ("--arena-bytes", "1GiB", "--max-context-tokens", "8192")
_SHM_BYTES = 1200 << 20
_MAX_NUM_SEQS = 8
_LONG = 4000
"""Tokens, that no machine computes before others are seen to have moved."""
STORIES = [
    Asked("Once it rained for a year, and", {"temperature": 0.0, "max_tokens": _LONG, "logprobs": 2}),
    Asked("The oldest bridge of the town", {"temperature": 0.9, "seed": 7, "max_tokens": _LONG}),
    Asked("Whoever finds the key will", {"temperature": 0.7, "seed": 5, "max_tokens": _LONG}),
    Asked("Nobody had seen the sea before", {"temperature": 0.0, "max_tokens": _LONG}),
    Asked("A clock that runs backwards", {"temperature": 0.9, "seed": 3, "max_tokens": _LONG}),
]
"""So many that what a step takes for each need hardly be anything for a move to pay."""


@contextmanager
def open_measured_hosts(folder: Path) -> Iterator[TwoHosts]:
    """Of which b is drained, and a has measured its steps."""
    with open_two_hosts(
        folder, _MAX_NUM_SEQS, a_has=_NO_PREFILL, b_has=_NO_PREFILL, sizes=_SIZES, shm_bytes=_SHM_BYTES
    ) as two:
        two.start(two.b)
        wait_until(lambda: two.num_workers() == 2, timeout_s=TIMEOUT_S, what="both workers are known")
        two.a.run(*WEIR, "limits", "set", "rebalances=true", *RUNTIME, timeout_s=TIMEOUT_S)
        drain_b(two, "--grace-s", "0", "--wait")
        rounds = itertools.count()

        def has_measured() -> bool:
            """After steps of many kinds: a busy machine may have too few of one in a round."""
            name = f"measured-{next(rounds)}"
            two.ask(name, [" ".join([name, *["rain"] * (4 + 5 * number)]) for number in range(40)], max_tokens=16)
            return "step_cost_base_ms" in two.figures(two.a)["decode-0"]

        wait_until(has_measured, timeout_s=TIMEOUT_S, what="a knows its steps")
        yield two


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    with open_measured_hosts(tmp_path_factory.mktemp("hosts")) as two:
        yield two


def drain_b(hosts: TwoHosts, *flags: str) -> None:
    hosts.a.run(*WEIR, "drain", "--host", "b", *RUNTIME, *flags, timeout_s=TIMEOUT_S)


def test_streams_of_a_crowded_host_spread_by_themselves(hosts: TwoHosts) -> None:
    """With the same tokens, and nothing of them is left behind."""
    before_a, before_b = hosts.figures(hosts.a), hosts.figures(hosts.b)
    streams = Streams(hosts.a, STORIES)
    streams.wait_begun()
    drain_b(hosts, "--undo")

    def have_moved() -> bool:
        after = hosts.figures(hosts.a)
        rises = [
            after[name][counter] - before_a[name][counter]
            for name, counter in (("scheduler-0", "rebalanced_total"), ("gateway-0", "migrations_moved_total"))
        ]
        return min(rises) >= 1

    def decode_there() -> bool:
        return hosts.figures(hosts.b)["decode-0"]["decode_steps_total"] > before_b["decode-0"]["decode_steps_total"]

    wait_until(have_moved, timeout_s=TIMEOUT_S, what="streams were moved")
    wait_until(decode_there, timeout_s=TIMEOUT_S, what="the other host decodes")
    after = hosts.figures(hosts.a)["gateway-0"]
    streams.leave()
    spread = streams.read()
    assert after["interruptions_total"] == before_a["gateway-0"]["interruptions_total"]
    drain_b(hosts, "--grace-s", "0", "--wait")
    alone = [replace(story, most=len(one.token_ids)) for story, one in zip(STORIES, spread, strict=True)]
    expected = Streams(hosts.a, alone).read()
    for one, other in zip(spread, expected, strict=True):
        num_tokens = min(len(one.token_ids), len(other.token_ids))
        assert num_tokens > 0
        assert one.token_ids[:num_tokens] == other.token_ids[:num_tokens]
        assert one.logprobs[:num_tokens] == other.logprobs[:num_tokens]

    def is_idle() -> bool:
        figures = [hosts.figures(host) for host in (hosts.a, hosts.b)]
        pages = [one["transfer-0"][f"remote_pages_{name}"] for one in figures for name in ("pinned", "reserved")]
        return not any((*pages, *(one["decode-0"]["num_live"] for one in figures)))

    wait_until(is_idle, timeout_s=TIMEOUT_S, what="nothing is pinned, on its way or alive")
