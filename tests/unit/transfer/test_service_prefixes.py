"""Prefixes over a real Unix socket: found, waited for, and healed when an owner or the service goes away."""

import asyncio
from collections.abc import Sequence

import grpc.aio
import pytest
from tests.unit.transfer.host import ATTEMPT, Host, until, write_sequence

from weir.kv.messages import PageChain, PrefixMatch
from weir.kv.prefixes import page_hashes, prefix_seed
from weir.rpc.arena.client import ArenaClient, HandedOff
from weir.rpc.channel import make_channel
from weir.wire.v1 import arena_pb2, arena_pb2_grpc

_HASHES = page_hashes(range(160), prefix_seed("digest"))
_NUM_PAGES = 11


async def match(client: ArenaClient, hashes: Sequence[bytes] = _HASHES) -> PrefixMatch:
    return await client.match(hashes, _NUM_PAGES, 1)


async def give_back(client: ArenaClient, match: PrefixMatch, num_computed: int = 0) -> None:
    page_ids = (*match.page_ids, *match.acquired.page_ids)
    await client.release((), match.acquired.slots, [PageChain(page_ids, _HASHES[:num_computed])], [match.match_id])


async def is_waiting(task: "asyncio.Task[PrefixMatch]") -> bool:
    await asyncio.sleep(0.15)
    return not task.done()


async def test_many_that_want_one_new_prefix_at_once_compute_it_once(host: Host) -> None:
    clients = [await host.client(f"w{number}") for number in range(3)]
    first = await match(clients[0])
    others = [asyncio.create_task(match(client)) for client in clients]
    assert all([await is_waiting(task) for task in others])
    assert host.metric("shared_pages") == 0  # who waits holds nothing
    assert host.metric("leased_pages") == _NUM_PAGES

    await give_back(clients[0], first, num_computed=10)

    found = await asyncio.gather(*others)
    assert {each.page_ids for each in found} == {first.acquired.page_ids[:10]}
    assert [len(each.acquired.page_ids) for each in found] == [1, 1, 1]
    assert host.metric("shared_pages") == 10
    for client, each in zip(clients, found, strict=True):
        await give_back(client, each)


async def test_who_waits_for_a_prefix_that_is_sealed_in_steps_waits_to_its_end(host: Host) -> None:
    first, second = await host.client("w0"), await host.client("w1")
    held = await match(first)
    waiting = asyncio.create_task(match(second))
    assert await is_waiting(waiting)

    await first.seal(PageChain(held.acquired.page_ids[:8], _HASHES[:8]))
    assert await is_waiting(waiting)  # two pages are few, but as near as the others were

    await give_back(first, held, num_computed=10)
    assert len((await waiting).page_ids) == 10
    await give_back(second, waiting.result())


@pytest.mark.parametrize("how", ["gives up", "closes"])
async def test_when_an_owner_goes_away_one_of_those_who_wait_takes_its_place(host: Host, how: str) -> None:
    clients = [await host.client(f"w{number}") for number in range(3)]
    first = await match(clients[0])
    others = {asyncio.create_task(match(client)): client for client in clients[1:]}
    assert all([await is_waiting(task) for task in others])

    await (give_back(clients[0], first) if how == "gives up" else clients[0].close())

    done, waiting = await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
    (owner,), (other,) = done, waiting
    assert (owner.result().page_ids, len(owner.result().acquired.page_ids)) == ((), _NUM_PAGES)
    assert await is_waiting(other)
    await give_back(others[owner], owner.result(), num_computed=10)
    assert len((await other).page_ids) == 10
    await give_back(others[other], other.result())


async def test_nobody_waits_for_ever(host: Host) -> None:
    first, second = await host.client("w0"), await host.client("w1")
    held = await match(first)
    started_s = asyncio.get_running_loop().time()
    late = await match(second)
    assert asyncio.get_running_loop().time() - started_s >= 1.9  # the service's prefix_wait_ms is 2000
    assert (late.page_ids, late.match_id) == ((), 0)
    await give_back(first, held, num_computed=10)
    await give_back(second, late, num_computed=10)
    assert host.metric("cached_pages") == 10  # the second copy was freed


async def test_prefixes_and_pins_survive_a_restart_of_the_service(host: Host) -> None:
    client, other = await host.client("w0"), await host.client("w1")
    await give_back(client, await match(client), num_computed=10)
    pinned = await match(client)

    await host.stop()
    waiting = asyncio.create_task(match(other))
    await host.start()

    assert (await waiting).page_ids == pinned.page_ids
    assert host.metric("shared_pages") == 10
    await give_back(client, pinned)
    assert host.metric("shared_pages") == 10
    await give_back(other, waiting.result())
    assert (host.metric("shared_pages"), host.metric("cached_pages")) == (0, 10)


async def test_a_wait_goes_on_after_a_restart_of_the_service(host: Host) -> None:
    first, second = await host.client("w0"), await host.client("w1")
    held = await match(first)
    waiting = asyncio.create_task(match(second))
    assert await is_waiting(waiting)
    await host.stop()
    await host.start()
    assert (await waiting).page_ids == ()  # nothing is pending in the new process: both compute
    await give_back(first, held, num_computed=10)
    await give_back(second, waiting.result(), num_computed=10)


async def test_what_is_released_while_the_service_is_away_is_cached_all_the_same(host: Host) -> None:
    client = await host.client("w0")
    held = await match(client)
    await host.stop()
    await asyncio.sleep(0.2)  # until the client has noticed
    releasing = asyncio.create_task(give_back(client, held, num_computed=10))
    await asyncio.sleep(0.1)
    await host.start()
    await releasing
    assert host.metric("cached_pages") == 10


async def test_a_cancelled_match_is_taken_back(host: Host) -> None:
    first, second = await host.client("w0"), await host.client("w1")
    held = await match(first)
    waiting = asyncio.create_task(match(second))
    assert await is_waiting(waiting)
    waiting.cancel()
    await asyncio.wait([waiting])
    await give_back(first, held, num_computed=10)
    await until(lambda: host.metric("shared_pages") == 0 and host.metric("leased_pages") == 0)
    assert len((await match(second)).page_ids) == 10


async def test_a_sequence_is_handed_off_with_its_shared_pages(host: Host) -> None:
    arrived: list[HandedOff] = []
    prefill, decode = await host.client("prefill"), await host.client("decode", arrived.append)
    await give_back(prefill, await match(prefill), num_computed=10)
    held = await match(prefill)
    page_ids = (*held.page_ids, *held.acquired.page_ids)
    write_sequence(prefill, held.acquired.slots[0], page_ids)
    await prefill.hand_off(held.acquired.slots[0], "r1", ATTEMPT, "decode", _HASHES)
    await until(lambda: bool(arrived))

    await host.stop()
    await host.start()
    await until(lambda: host.metric("suspect_leases") == 0)

    assert host.metric("shared_pages") == 10
    await decode.release(page_ids, [arrived[0].slot])
    assert (host.metric("shared_pages"), host.metric("cached_pages")) == (0, 10)


async def test_hashes_of_a_wrong_length_are_refused(host: Host) -> None:
    await host.client("w0")
    async with make_channel(f"unix:{host.socket_path}") as channel:
        stub: arena_pb2_grpc.ArenaAsyncStub = arena_pb2_grpc.ArenaStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Match(arena_pb2.MatchRequest(lease_id=1, attachment=1, page_hashes=b"short"))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "multiple of 16" in (caught.value.details() or "")
