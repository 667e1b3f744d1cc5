"""The service and its client when answers get lost, workers fall silent and the service is away."""

import asyncio
import contextlib
from typing import Any

import grpc.aio
import pytest
from tests.unit.transfer.host import ATTEMPT, Host, PretendedProcess, until, write_sequence

from weir.core.errors import DeadlineExceeded, InternalError, Unavailable
from weir.rpc.arena import client as arena_client
from weir.rpc.arena.client import ArenaClient, HandedOff
from weir.wire.v1 import arena_pb2


async def test_an_answer_that_got_lost_leaks_nothing(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await host.client("w")
    acquire = client._stub.Acquire
    num_calls = 0

    async def answer_is_lost(request: arena_pb2.AcquireRequest, timeout: float) -> arena_pb2.AcquireResponse:  # noqa: ASYNC109
        nonlocal num_calls
        num_calls += 1
        answer = await acquire(request, timeout=timeout)
        if num_calls == 1:
            assert host.metric("leased_pages") == 5
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "lost")
        return answer

    monkeypatch.setattr(client._stub, "Acquire", answer_is_lost)
    acquired = await client.acquire(5, 1)
    assert num_calls >= 2
    assert host.metric("leased_pages") == 5
    assert host.metric("reclaimed_pages_total") == 5
    await client.release(acquired.page_ids, acquired.slots)
    assert host.metric("free_pages") == 40


async def test_a_cancelled_acquire_leaks_nothing(host: Host) -> None:
    client = await host.client("w")
    for delay_s in (0.0, 0.0005, 0.001, 0.002):
        acquiring = asyncio.create_task(client.acquire(5, 1))
        await asyncio.sleep(delay_s)
        acquiring.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            acquired = await acquiring
            await client.release(acquired.page_ids, acquired.slots)
    await until(lambda: host.metric("free_pages") == 40)
    await client.acquire(40, 6)


async def test_what_is_not_held_cannot_be_released(host: Host) -> None:
    client = await host.client("w")
    with pytest.raises(ValueError, match=r"not held: pages \[3\], slots \[\]"):
        await client.release([3], [])


async def test_a_hand_off_to_nobody_leaves_the_sequence_where_it_is(host: Host) -> None:
    client = await host.client("w")
    acquired = await client.acquire(2, 1)
    write_sequence(client, acquired.slots[0], acquired.page_ids)
    with pytest.raises(Unavailable, match="worker nobody has no lease"):
        await client.hand_off(acquired.slots[0], "r1", ATTEMPT, "nobody")
    with pytest.raises(InternalError, match="has the record of r1"):
        await client.hand_off(acquired.slots[0], "another", ATTEMPT, "nobody")
    await client.release(acquired.page_ids, acquired.slots)


async def test_a_hand_off_without_an_answer_in_time_is_settled_by_the_service(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await host.client("w")
    acquired = await client.acquire(3, 1)
    write_sequence(client, acquired.slots[0], acquired.page_ids[:2])

    async def no_answer(*_: object, **__: object) -> None:
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "lost")

    monkeypatch.setattr(arena_client, "_HAND_OFF_DEADLINE_S", 0.1)
    monkeypatch.setattr(client._stub, "HandOff", no_answer)
    with pytest.raises(DeadlineExceeded):
        await client.hand_off(acquired.slots[0], "r1", ATTEMPT, "decode")
    await until(lambda: host.metric("free_slots") == 6)
    assert host.metric("leased_pages") == 1
    with pytest.raises(ValueError, match="not held"):
        await client.release(acquired.page_ids, acquired.slots)


async def test_what_comes_back_before_the_answer_to_its_hand_off_is_given_out_after_it(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then its worker's engine has these pages in use."""
    sender, receiver = await host.client("sender"), await host.client("receiver")
    acquired = await sender.acquire(40, 6)
    slot, page_ids = acquired.slots[0], acquired.page_ids[:2]
    write_sequence(sender, slot, page_ids)
    hand_off, may_answer, is_committed = sender._stub.HandOff, asyncio.Event(), asyncio.Event()

    async def answer_later(*given: Any, **named: Any) -> arena_pb2.HandOffResponse:
        answer = await hand_off(*given, **named)
        is_committed.set()
        await may_answer.wait()
        return answer

    monkeypatch.setattr(sender._stub, "HandOff", answer_later)
    handing_off = asyncio.create_task(sender.hand_off(slot, "r1", ATTEMPT, "receiver"))
    await is_committed.wait()
    await until(lambda: receiver._stream._holdings.holds_slot(slot))
    await receiver.release(page_ids, [slot])
    acquiring = asyncio.create_task(sender.acquire(2, 1))
    done, _ = await asyncio.wait([acquiring], timeout=0.2)
    assert not done
    may_answer.set()
    assert (await handing_off).num_pages == 2
    again = await acquiring
    assert (set(again.page_ids), again.slots) == (set(page_ids), (slot,))


async def test_what_is_announced_to_a_lease_that_is_being_given_up_is_left_to_others(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then another worker may go on with it."""
    announced: list[HandedOff] = []
    sender, receiver = await host.client("sender"), await host.client("receiver", announced.append)
    acquired = await sender.acquire(2, 1)
    write_sequence(sender, acquired.slots[0], acquired.page_ids)
    call = receiver._stream._call
    assert call is not None
    write, is_sent = call.write, asyncio.Event()

    async def write_after_a_hand_off(request: arena_pb2.AttachRequest) -> None:
        if request.HasField("detach"):
            await sender.hand_off(acquired.slots[0], "r1", ATTEMPT, "receiver")
            await asyncio.sleep(0.2)  # the announcement comes
            is_sent.set()
        await write(request)

    monkeypatch.setattr(call, "write", write_after_a_hand_off)
    await receiver.close()
    assert is_sent.is_set()
    assert announced == []


async def test_who_is_cancelled_while_it_waits_for_such_an_answer_leaks_nothing(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = await host.client("sender"), await host.client("receiver")
    acquired = await sender.acquire(40, 6)
    slot, page_ids = acquired.slots[0], acquired.page_ids[:2]
    write_sequence(sender, slot, page_ids)
    hand_off, may_answer = sender._stub.HandOff, asyncio.Event()

    async def answer_later(*given: Any, **named: Any) -> arena_pb2.HandOffResponse:
        answer = await hand_off(*given, **named)
        await may_answer.wait()
        return answer

    monkeypatch.setattr(sender._stub, "HandOff", answer_later)
    handing_off = asyncio.create_task(sender.hand_off(slot, "r1", ATTEMPT, "receiver"))
    await until(lambda: receiver._stream._holdings.holds_slot(slot))
    await receiver.release(page_ids, [slot])
    acquiring = asyncio.create_task(sender.acquire(2, 1))
    await until(lambda: host.metric("free_pages") == 0)
    acquiring.cancel()
    await asyncio.gather(acquiring, return_exceptions=True)
    await until(lambda: host.metric("free_pages") == 2)
    may_answer.set()
    assert (await handing_off).num_pages == 2


@pytest.mark.parametrize("is_own_again", [False, True])
async def test_a_hand_off_is_known_for_done_after_its_slot_was_handed_off_by_others(
    host: Host, monkeypatch: pytest.MonkeyPatch, is_own_again: bool
) -> None:
    """The service has forgotten it, and the sender must not touch what was its slot."""
    clients = [await host.client(name) for name in ("sender", "receiver", "other")]
    sender, receiver, other = clients
    slot, page_ids = await _handed_off_without_answer(sender, monkeypatch)
    handing_off = asyncio.create_task(sender.hand_off(slot, "r1", ATTEMPT, "receiver"))
    await until(lambda: receiver._stream._holdings.holds_slot(slot))
    await receiver.release(page_ids, [slot])
    acquired = await other.acquire(2, 1)
    assert acquired.slots == (slot,)
    write_sequence(other, slot, acquired.page_ids, "r2")
    await other.hand_off(slot, "r2", ATTEMPT, "receiver")
    await until(lambda: receiver._stream._holdings.holds_slot(slot))
    acquiring = None
    if is_own_again:
        await receiver.release(acquired.page_ids, [slot])
        acquiring = asyncio.create_task(sender.acquire(2, 1))
        await until(lambda: host.metric("free_slots") == 0)
    monkeypatch.undo()
    assert (await handing_off).num_pages == 2
    if acquiring is not None:
        assert (await acquiring).slots == (slot,)
    else:
        assert receiver.segment.record(slot).summarize() is not None


async def _handed_off_without_answer(
    sender: ArenaClient, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, tuple[int, ...]]:
    """The sequence r1 with two pages, in an arena where the sender has all others too; its next hand-off happens, and
    is repeated in vain until the patch is undone."""
    acquired = await sender.acquire(40, 6)
    slot, page_ids = acquired.slots[0], acquired.page_ids[:2]
    write_sequence(sender, slot, page_ids)
    hand_off, has_happened = sender._stub.HandOff, False

    async def answer_is_lost(*given: Any, **named: Any) -> None:
        nonlocal has_happened
        if not has_happened:
            has_happened = True
            await hand_off(*given, **named)
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "lost")

    monkeypatch.setattr(sender._stub, "HandOff", answer_is_lost)
    return slot, page_ids


async def test_pages_that_come_back_before_an_answer_that_never_comes_are_not_given_out(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = await host.client("sender"), await host.client("receiver")
    acquired = await sender.acquire(40, 6)
    slot, page_ids = acquired.slots[0], acquired.page_ids[:2]
    write_sequence(sender, slot, page_ids)
    hand_off, is_committed = sender._stub.HandOff, asyncio.Event()

    async def never_answer(*given: Any, **named: Any) -> None:
        await hand_off(*given, **named)
        is_committed.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(sender._stub, "HandOff", never_answer)
    monkeypatch.setattr(arena_client, "_CALL_DEADLINE_S", 0.3)
    handing_off = asyncio.create_task(sender.hand_off(slot, "r1", ATTEMPT, "receiver"))
    await is_committed.wait()
    await until(lambda: receiver._stream._holdings.holds_slot(slot))
    await receiver.release(page_ids, [slot])
    with pytest.raises(Unavailable, match="before it was known"):
        await sender.acquire(2, 1)
    await until(lambda: host.metric("free_pages") == 2)
    handing_off.cancel()


async def test_a_silent_worker_is_killed_and_only_its_exit_frees(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await host.client("w")
    acquired = await client.acquire(4, 1)
    write_sequence(client, acquired.slots[0], acquired.page_ids)
    process = host.processes[0]
    monkeypatch.setattr(process, "kill", lambda: None)
    assert client._stream._keeping is not None
    client._stream._keeping.cancel()
    await until(lambda: host.metric("fencing_leases") == 1)
    await asyncio.sleep(0.2)
    assert host.metric("leased_pages") == 4, "it was killed but has not exited"
    PretendedProcess.kill(process)
    await until(lambda: host.metric("free_pages") == 40)
    assert (host.metric("fenced_total"), host.metric("orphaned_total")) == (1, 1)


async def test_a_worker_that_was_fenced_is_told_so_when_it_comes_back(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await host.client("w")
    monkeypatch.setattr(host.processes[0], "kill", lambda: None)
    host.service._core.end_lease(client.lease_id)
    client._stream.renew()
    async with asyncio.timeout(5):
        await client.lost.wait()
    with pytest.raises(Unavailable, match="refuses this worker"):
        await client.acquire(1, 0)


async def test_leases_that_are_left_keep_the_segment_for_the_next_start(host: Host) -> None:
    client = await host.client("w")
    await client.acquire(4, 1)
    await host.stop()
    assert host.segment_path.exists()
    await host.start()
    await until(lambda: host.metric("suspect_leases") == 0)
    assert host.metric("leased_pages") == 4


async def test_draining_waits_for_the_workers_to_leave(host: Host) -> None:
    client = await host.client("w")
    draining = asyncio.create_task(host.service.drain(60))
    await asyncio.sleep(0.2)
    assert not draining.done()
    await client.close()
    await asyncio.wait_for(draining, 20)
