"""The transfer service stays away for longer than anybody waits for anything else: streams pause where they need pages
or a hand-off, and go on with the same tokens when it is back. No request is interrupted."""

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator

import grpc
import pytest
from tests.chaos.hosts import Cluster, Host

from weir.testing.load import StreamRecord, greedy_request, open_stub, stream
from weir.testing.stack import wait_until
from weir.wire.v1 import inference_pb2

pytestmark = [pytest.mark.stack, pytest.mark.long, pytest.mark.timeout(300)]

NUM_RUNNING = 6
NUM_LATE = 4
AWAY_S = 14.0
"""Above `max_stall_s`, a lease, the keep-alive of a connection, and every deadline of a call but that of a hand-off."""


def request_of(number: int) -> inference_pb2.GenerateRequest:
    """Greedy and seeded ones, which need some pages more while they run."""
    request = greedy_request([300 + number] * (10 + 30 * number), max_tokens=200, ignore_eos=True)
    if number % 2:
        request.options.sampling.temperature = 0.9
        request.options.sampling.seed = number
    return request


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("away"), environ={"WEIR_SERVES_LOCALLY": "false"}) as cluster:
        cluster.add_host("a")
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[list[int]]:
    return [record.token_ids for record in asyncio.run(run_all(cluster))]


async def run_all(cluster: Cluster, disturb: Callable[[], Awaitable[None]] | None = None) -> list[StreamRecord]:
    """Most at once; the last ones come when the service is away."""
    channel, stub = open_stub(cluster.grpc_address)
    async with channel:

        def start(number: int) -> asyncio.Task[StreamRecord]:
            return asyncio.create_task(stream(stub, request_of(number), timeout_s=150))

        running = [start(number) for number in range(NUM_RUNNING)]
        if disturb is not None:
            await asyncio.sleep(1.0)
            disturbing = asyncio.ensure_future(disturb())
            await asyncio.sleep(1.0)
        running += [start(number) for number in range(NUM_RUNNING, NUM_RUNNING + NUM_LATE)]
        if disturb is not None:
            await disturbing
        return list(await asyncio.gather(*running))


def assert_nothing_lost(cluster: Cluster, host: Host, records: list[StreamRecord], expected: list[list[int]]) -> None:
    for record, token_ids in zip(records, expected, strict=True):
        assert record.code is grpc.StatusCode.OK, record
        assert (record.num_terminal_events, record.num_index_errors) == (1, 0), record
        assert record.token_ids == token_ids
    assert cluster.metric("gateway", "interruptions_total") == 0
    assert sum(worker.metrics()["arena_silences_total"] for worker in host.workers) > 0
    assert host.transfer.metrics()["fenced_total"] == 0
    wait_until(lambda: host.num_pages_held() == 0, timeout_s=20, what="no page is held")
    assert cluster.integrity_errors() == []


async def test_a_transfer_service_that_stands_still_costs_no_stream_a_token(
    cluster: Cluster, undisturbed: list[list[int]]
) -> None:
    (host,) = cluster.hosts

    async def stand_still() -> None:
        host.transfer.send(signal.SIGSTOP)
        await asyncio.sleep(AWAY_S)
        host.transfer.send(signal.SIGCONT)

    records = await run_all(cluster, stand_still)

    assert_nothing_lost(cluster, host, records, undisturbed)


async def test_a_transfer_service_that_is_away_for_long_costs_no_stream_a_token(
    cluster: Cluster, undisturbed: list[list[int]]
) -> None:
    (host,) = cluster.hosts

    async def stay_away() -> None:
        host.transfer.kill()
        await asyncio.sleep(AWAY_S)
        host.transfer = cluster.serve_transfer("a")
        await asyncio.to_thread(host.transfer.wait_ready)

    records = await run_all(cluster, stay_away)

    assert_nothing_lost(cluster, host, records, undisturbed)
