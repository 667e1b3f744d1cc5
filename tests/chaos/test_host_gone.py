"""Two hosts under one NATS: requests stay on one host each, and when a host is gone, with its arena and all of its
processes, the other one reads prompts and tokens so far again and goes on with the same tokens."""

import asyncio
from collections.abc import Iterator

import grpc
import pytest
from tests.chaos.hosts import Cluster, Host

from weir.testing.load import StreamRecord, greedy_request, open_stub, stream
from weir.testing.stack import wait_until
from weir.wire.v1 import inference_pb2

pytestmark = [pytest.mark.stack, pytest.mark.long, pytest.mark.timeout(300)]

NUM_STREAMS = 8
MAX_PAUSE_S = 30.0


def request_of(number: int) -> inference_pb2.GenerateRequest:
    """Greedy and seeded ones, short and long prompts."""
    request = greedy_request([900 + number] * (20 + 40 * number), max_tokens=120, ignore_eos=True)
    if number % 2:
        request.options.sampling.temperature = 0.9
        request.options.sampling.seed = number
        request.options.sampling.presence_penalty = 0.5
    return request


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The first host has two decode workers, so that what is left of one is first sought at the other."""
    # Which way a prompt goes depends on load; a hand-off shows who was paired with whom.
    environ = {"WEIR_SERVES_LOCALLY": "false"}
    with Cluster(tmp_path_factory.mktemp("hosts"), environ=environ) as cluster:
        cluster.add_host("a", num_decode=2)
        cluster.add_host("b")
        yield cluster


async def run_all(cluster: Cluster, gone: Host | None = None) -> list[StreamRecord]:
    """All at once; amid them the host goes."""
    channel, stub = open_stub(cluster.grpc_address)
    async with channel:
        running = [asyncio.create_task(stream(stub, request_of(i), timeout_s=120)) for i in range(NUM_STREAMS)]
        if gone is not None:
            await asyncio.to_thread(wait_until, lambda: decodes(gone), timeout_s=60, what="the host decodes")
            gone.kill()
        return list(await asyncio.gather(*running))


def decodes(host: Host) -> bool:
    return sum(worker.metrics()["num_running"] for worker in host.workers) >= 2


def is_clean(cluster: Cluster, *hosts: Host) -> bool:
    """Nothing is booked, held or waited for, and nobody speaks of a host that is gone."""
    num_workers = sum(len(host.workers) for host in hosts)
    return (
        cluster.metric("scheduler", "workers") == num_workers
        and cluster.metric("scheduler", "reserved_pages") == 0
        and cluster.metric("scheduler", "queued") == 0
        and cluster.metric("gateway", "requests_in_flight") == 0
        and all(host.num_pages_held() == 0 for host in hosts)
    )


def test_what_a_host_that_is_gone_was_doing_goes_on_at_the_other_one(cluster: Cluster) -> None:
    a, b = cluster.hosts
    undisturbed = asyncio.run(run_all(cluster))
    assert {record.code for record in undisturbed} == {grpc.StatusCode.OK}
    # Prefill and decode workers of two hosts have no arena in common: such a pair would have been interrupted.
    assert cluster.metric("gateway", "interruptions_total") == 0
    handoffs = [host.transfer.metrics()["handoffs_total"] for host in (a, b)]
    assert sum(handoffs) == NUM_STREAMS
    assert min(handoffs) > 0

    records = asyncio.run(run_all(cluster, gone=a))

    for record, expected in zip(records, undisturbed, strict=True):
        assert record.code is grpc.StatusCode.OK, record
        assert (record.num_terminal_events, record.num_index_errors) == (1, 0), record
        assert record.token_ids == expected.token_ids
        assert record.text == expected.text
        assert record.max_pause_s < MAX_PAUSE_S
    assert cluster.metric("gateway", "interruptions_total") >= 2
    wait_until(lambda: is_clean(cluster, b), timeout_s=20, what="nothing is booked on what is gone")
    assert cluster.integrity_errors() == []


def test_a_host_that_comes_back_frees_what_its_dead_held_and_serves_again(cluster: Cluster) -> None:
    _, b = cluster.hosts
    a = cluster.add_host("a", num_decode=2)
    wait_until(lambda: is_clean(cluster, a, b), timeout_s=20, what="both hosts are known and hold nothing")

    records = asyncio.run(run_all(cluster))

    assert {record.code for record in records} == {grpc.StatusCode.OK}
    assert a.transfer.metrics()["handoffs_total"] > 0
    wait_until(lambda: is_clean(cluster, a, b), timeout_s=20, what="nothing is left")
    assert cluster.integrity_errors() == []
