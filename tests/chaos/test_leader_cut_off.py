"""A scheduler that leads and is cut off from NATS by a relay: the other one takes over, and when the first is back it
stands by in the same process. Grants of one epoch alone are taken at any time, and no stream notices."""

import asyncio
from collections.abc import Callable, Iterator

import grpc
import pytest
from tests.chaos.hosts import Cluster, Served
from tests.chaos.relay import Relay

from weir.testing.load import StreamRecord, greedy_request, open_stub, stream
from weir.testing.stack import wait_until

pytestmark = [pytest.mark.stack, pytest.mark.long, pytest.mark.timeout(240)]

NUM_RUNNING = 4
NUM_WAITING = 40
"""More than run at a time, so that some wait in the leader's queue."""


class CutOff:
    """`first` leads, through a relay; `second` stands by."""

    def __init__(self, cluster: Cluster, relay: Relay) -> None:
        self.cluster = cluster
        self.relay = relay
        self.first = cluster.serve("scheduler", index=0, nats_url=f"nats://127.0.0.1:{relay.port}")
        self.first.wait_ready()
        self.second = cluster.serve("scheduler", index=1)
        self.second.wait_ready()
        cluster.schedulers += [self.first, self.second]


@pytest.fixture(scope="module")
def cut_off(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CutOff]:
    with (
        Cluster(tmp_path_factory.mktemp("cut"), num_schedulers=0) as cluster,
        Relay("127.0.0.1", cluster.nats_port) as relay,
    ):
        made = CutOff(cluster, relay)
        cluster.add_host("a")
        yield made
        relay.restore()
        for scheduler in (made.first, made.second):  # they take leave of NATS while the relay is there
            scheduler.end()


def leads(scheduler: Served) -> bool:
    return scheduler.metrics()["is_leader"] == 1


def make_first_lead(cut_off: CutOff) -> None:
    """The second one leads after the test before, or because the first stood still for a moment: it makes way."""
    wait_until(lambda: leads(cut_off.first) or leads(cut_off.second), timeout_s=30, what="one leads")
    if not leads(cut_off.first):
        cut_off.second.end()
        wait_until(lambda: leads(cut_off.first), timeout_s=30, what="the first one leads")
        cut_off.second = cut_off.cluster.serve("scheduler", index=1)
        cut_off.second.wait_ready()
        cut_off.cluster.schedulers[1] = cut_off.second


async def run_all(cluster: Cluster, disturb: Callable[[], None] = lambda: None) -> list[StreamRecord]:
    """Some run and some wait when `disturb` is called, in a thread; some come after."""
    channel, stub = open_stub(cluster.grpc_address)
    async with channel:

        def start(number: int) -> asyncio.Task[StreamRecord]:
            request = greedy_request([40 + number % 7] * 30, max_tokens=30, ignore_eos=True)
            return asyncio.create_task(stream(stub, request, timeout_s=120))

        tasks = [start(number) for number in range(NUM_RUNNING + NUM_WAITING)]
        await asyncio.sleep(0.5)
        await asyncio.to_thread(disturb)
        tasks += [start(number) for number in range(NUM_RUNNING)]
        return list(await asyncio.gather(*tasks))


def assert_all_served(records: list[StreamRecord], expected: list[StreamRecord]) -> None:
    for record, undisturbed in zip(records, expected, strict=True):
        assert (record.code, record.num_terminal_events, record.num_index_errors) == (grpc.StatusCode.OK, 1, 0), record
        assert record.token_ids == undisturbed.token_ids


@pytest.mark.parametrize("how", ["cut", "refuse"])
def test_a_leader_that_was_cut_off_stands_by_when_it_is_back(cut_off: CutOff, how: str) -> None:
    cluster = cut_off.cluster
    expected = asyncio.run(run_all(cluster))
    make_first_lead(cut_off)
    depositions = cut_off.first.metrics()["depositions_total"]
    epoch = cut_off.first.metrics()["epoch"]

    def disturb() -> None:
        cut_off.relay.cut() if how == "cut" else cut_off.relay.refuse()
        wait_until(lambda: leads(cut_off.second), timeout_s=30, what="the other one leads")
        cut_off.relay.restore()

    records = asyncio.run(run_all(cluster, disturb))

    assert_all_served(records, expected)
    wait_until(lambda: not leads(cut_off.first), timeout_s=30, what="the first one has stepped down")
    assert leads(cut_off.second)
    assert cut_off.first.is_alive
    assert cut_off.first.metrics()["depositions_total"] == depositions + 1
    assert cut_off.second.metrics()["epoch"] > epoch
    assert cluster.metric("gateway", "scheduler_epoch") == cut_off.second.metrics()["epoch"]
    assert cluster.metric("gateway", "interruptions_total") == 0
    wait_until(lambda: cut_off.second.metrics()["reserved_pages"] == 0, timeout_s=30, what="nothing is booked")
    assert cluster.integrity_errors() == []


def test_a_slow_way_to_nats_deposes_nobody(cut_off: CutOff) -> None:
    leader, standby = sorted((cut_off.first, cut_off.second), key=leads, reverse=True)
    epoch = leader.metrics()["epoch"]
    cut_off.relay.delay(0.1)
    try:
        records = asyncio.run(run_all(cut_off.cluster))
    finally:
        cut_off.relay.restore()
    assert {record.code for record in records} == {grpc.StatusCode.OK}
    assert leads(leader)
    assert not leads(standby)
    assert leader.metrics()["epoch"] == epoch
