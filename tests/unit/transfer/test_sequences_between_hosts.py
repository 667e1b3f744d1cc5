"""The pages of a sequence that runs at one host come to another as they are filled, and nothing is left behind."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import numpy as np
import pytest
from tests.unit.transfer.host import Host, open_two_hosts, until

from weir.core.errors import Unavailable
from weir.core.life import Attempt
from weir.core.sampling import SamplingParams, StopRules
from weir.kv.geometry import PAGE_TOKENS
from weir.kv.messages import Acquired, PageChain
from weir.kv.prefixes import page_hashes, prefix_seed
from weir.kv.records.record import SequenceParams, SequenceRecord
from weir.rpc.arena.client import ArenaClient

SEED = prefix_seed("digest")
TOKENS = tuple(range(100, 300))
NUM_PAGES = 8


@pytest.fixture
async def hosts() -> AsyncIterator[list[Host]]:
    async with open_two_hosts() as made:
        yield made


class Running:
    """A sequence as its worker keeps it: each token has its position computed one step later."""

    def __init__(self, client: ArenaClient, held: Acquired, num_tokens: int, seed: bytes = SEED) -> None:
        self.client = client
        self.held = held
        self.num_tokens = num_tokens
        self.record: SequenceRecord = client.segment.record(held.slots[0])
        params = SequenceParams(
            "r1", Attempt(), "g", TOKENS[:10], SamplingParams(), StopRules(200), NUM_PAGES, "", prefix_seed=seed
        )
        rng = np.random.default_rng(3)
        client.segment.pages[list(held.page_ids)] = rng.integers(0, 256, (NUM_PAGES, 4096), np.uint8)
        self.record.begin(params, TOKENS[10:num_tokens])
        self.record.set_block_table(held.page_ids)
        self.record.publish(num_tokens - 1)

    def go_on(self, num_tokens: int) -> None:
        for token_id in TOKENS[self.num_tokens : num_tokens]:
            self.record.append_token(token_id)
        self.num_tokens = num_tokens
        self.record.publish(num_tokens - 1)

    async def end(self) -> None:
        hashes = page_hashes(TOKENS[: self.num_tokens - 1], SEED)
        self.record.clear()
        await self.client.release((), self.held.slots, [PageChain(self.held.page_ids, hashes)])


async def begin(client: ArenaClient, num_tokens: int, seed: bytes = SEED) -> Running:
    return Running(client, await client.acquire(NUM_PAGES, 1), num_tokens, seed)


async def test_pages_come_while_the_sequence_goes_on(hosts: list[Host]) -> None:
    there, here = [await host.client("w0") for host in hosts]
    running = await begin(there, 40)
    async with aclosing(here.stage("r1", hosts[0].pages_address)) as staged:
        assert await anext(staged) == 2
        running.go_on(3 * PAGE_TOKENS)  # the last token's position is yet to be computed
        running.go_on(3 * PAGE_TOKENS + 1)
        assert await anext(staged) == 3
        running.go_on(5 * PAGE_TOKENS + 1)
        assert await anext(staged) == 5
        assert hosts[1].metric("remote_pages_pinned") == 5
        await running.end()
        assert [num_pages async for num_pages in staged] == []
    match = await here.match(page_hashes(TOKENS[: 5 * PAGE_TOKENS + 1], SEED), 6, 1)
    assert len(match.page_ids) == 5
    assert (here.segment.pages[list(match.page_ids)] == there.segment.pages[list(running.held.page_ids[:5])]).all()
    assert hosts[1].metric("remote_pages_received_total") == hosts[0].metric("remote_pages_offered_total") == 5
    await here.release((), match.acquired.slots, [PageChain((*match.page_ids, *match.acquired.page_ids))])


async def test_a_sequence_that_has_no_full_page_yet_is_awaited(hosts: list[Host]) -> None:
    there, here = [await host.client("w0") for host in hosts]
    running = await begin(there, 11)
    async with aclosing(here.stage("r1", hosts[0].pages_address)) as staged:
        assert await anext(staged) == 0
        running.go_on(PAGE_TOKENS + 1)
        assert await anext(staged) == 1
    await running.end()


async def test_what_is_here_already_does_not_come_again(hosts: list[Host]) -> None:
    there, here = [await host.client("w0") for host in hosts]
    first = await begin(here, 40)
    await first.end()
    running = await begin(there, 60)
    async with aclosing(here.stage("r1", hosts[0].pages_address)) as staged:
        assert await anext(staged) == 3
    assert hosts[1].metric("remote_pages_received_total") == 1
    await running.end()


async def test_what_is_being_computed_here_is_waited_for_and_does_not_come(hosts: list[Host]) -> None:
    there, here = [await host.client("w0") for host in hosts]
    hashes = page_hashes(TOKENS[: 2 * PAGE_TOKENS], SEED)
    computing = await here.match(hashes, 3, 1)
    running = await begin(there, 60)
    async with aclosing(here.stage("r1", hosts[0].pages_address)) as staged:
        first = asyncio.ensure_future(anext(staged))
        await until(lambda: hosts[0].metric("remote_pages_offered_total") == 3)
        await asyncio.sleep(0.2)
        assert not first.done()
        chain = PageChain(computing.acquired.page_ids, hashes)
        await here.release((), computing.acquired.slots, [chain], [computing.match_id])
        assert await first == 3
    assert hosts[1].metric("remote_pages_received_total") == 1
    await running.end()


@pytest.mark.parametrize(("request_id", "seed"), [("unknown", SEED), ("r1", b"")], ids=["not there", "not shared"])
async def test_what_has_no_pages_to_share_ends_at_once(hosts: list[Host], request_id: str, seed: bytes) -> None:
    there, here = [await host.client("w0") for host in hosts]
    running = await begin(there, 40, seed)
    async with aclosing(here.stage(request_id, hosts[0].pages_address)) as staged:
        assert [num_pages async for num_pages in staged] in ([], [0])
    running.record.clear()
    await there.release(running.held.page_ids, running.held.slots)


async def test_who_gives_up_leaves_nothing(hosts: list[Host]) -> None:
    """The pages that have come stay as a prefix, evictable; the source's go on being its worker's."""
    there, here = [await host.client("w0") for host in hosts]
    running = await begin(there, 60)
    async with aclosing(here.stage("r1", hosts[0].pages_address)) as staged:
        assert await anext(staged) == 3
    for host in hosts:
        await until(lambda host=host: host.metric("remote_pages_pinned") == 0)  # type: ignore[misc]
    running.go_on(80)
    await running.end()
    assert hosts[0].metric("cached_pages") == 4


async def test_a_sequence_whose_worker_goes_comes_no_further(hosts: list[Host]) -> None:
    there, here = [await host.client("w0") for host in hosts]
    await begin(there, 60)
    async with aclosing(here.stage("r1", hosts[0].pages_address)) as staged:
        assert await anext(staged) == 3
        await there.close()
        assert [num_pages async for num_pages in staged] == []


async def test_a_host_that_cannot_be_reached_is_an_error(hosts: list[Host]) -> None:
    here = await hosts[1].client("w0")
    async with aclosing(here.stage("r1", "127.0.0.1:1")) as staged:
        with pytest.raises(Unavailable):
            await anext(staged)


async def test_a_service_that_ends_waits_for_no_sequence(hosts: list[Host]) -> None:
    there, here = [await host.client("w0") for host in hosts]
    await begin(there, 60)
    async with aclosing(here.stage("r1", hosts[0].pages_address)) as staged:
        assert await anext(staged) == 3
        async with asyncio.timeout(5):
            await hosts[1].service._exchange.close()  # type: ignore[union-attr]
        with pytest.raises(Unavailable):
            await anext(here.stage("r1", hosts[0].pages_address))
