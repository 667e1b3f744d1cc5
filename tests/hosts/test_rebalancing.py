"""Two hosts of one decode worker each: streams that all run at one of them spread by themselves."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.hosts.lab import needs_hosts
from tests.hosts.streams import Asked, Streams
from tests.hosts.two_hosts import RUNTIME, TIMEOUT_S, WEIR, TwoHosts, open_two_hosts

from weir.testing.stack import wait_until

pytestmark = [needs_hosts, pytest.mark.stack]
_NO_PREFILL = "prefill = 0"
"""A worker that computes prompts and answers soon knows what both cost."""
STORIES = [
    Asked("Once it rained for a year, and", {"temperature": 0.0, "max_tokens": 400, "logprobs": 2}),
    Asked("The oldest bridge of the town", {"temperature": 0.9, "seed": 7, "max_tokens": 400}),
    Asked("Whoever finds the key will", {"temperature": 0.7, "seed": 5, "max_tokens": 400}),
    Asked("Nobody had seen the sea before", {"temperature": 0.0, "max_tokens": 400}),
]


@contextmanager
def open_measured_hosts(folder: Path) -> Iterator[TwoHosts]:
    """Of which b is drained, and a has measured its steps."""
    with open_two_hosts(folder, 4, a_has=_NO_PREFILL, b_has=_NO_PREFILL) as two:
        two.start(two.b)
        wait_until(lambda: two.num_workers() == 2, timeout_s=TIMEOUT_S, what="both workers are known")
        two.a.run(*WEIR, "limits", "set", "rebalances=true", *RUNTIME, timeout_s=TIMEOUT_S)
        drain_b(two, "--grace-s", "0", "--wait")
        two.ask("measured", [" ".join(["rain"] * (4 + 5 * number)) for number in range(40)], max_tokens=16)
        wait_until(
            lambda: "step_cost_base_ms" in two.figures(two.a)["decode-0"], timeout_s=TIMEOUT_S, what="a knows its steps"
        )
        yield two


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    with open_measured_hosts(tmp_path_factory.mktemp("hosts")) as two:
        yield two


def drain_b(hosts: TwoHosts, *flags: str) -> None:
    hosts.a.run(*WEIR, "drain", "--host", "b", *RUNTIME, *flags, timeout_s=TIMEOUT_S)


def test_streams_of_a_crowded_host_spread_by_themselves(hosts: TwoHosts) -> None:
    """With the same tokens, and nothing of them is left behind."""
    expected = Streams(hosts.a, STORIES).read()
    before = hosts.figures(hosts.a)["gateway-0"]
    streams = Streams(hosts.a, STORIES)
    streams.wait_begun()
    drain_b(hosts, "--undo")
    spread = streams.read()
    assert [one.answer for one in spread] == [one.answer for one in expected]
    after = hosts.figures(hosts.a)
    assert after["scheduler-0"]["rebalanced_total"] >= 1
    assert after["gateway-0"]["migrations_moved_total"] - before["migrations_moved_total"] >= 1
    assert after["gateway-0"]["interruptions_total"] == before["interruptions_total"]
    assert hosts.figures(hosts.b)["decode-0"]["decode_steps_total"] > 0

    def is_idle() -> bool:
        figures = [hosts.figures(host) for host in (hosts.a, hosts.b)]
        pages = [one["transfer-0"][f"remote_pages_{name}"] for one in figures for name in ("pinned", "reserved")]
        return not any((*pages, *(one["decode-0"]["num_live"] for one in figures)))

    wait_until(is_idle, timeout_s=TIMEOUT_S, what="nothing is pinned, on its way or alive")
