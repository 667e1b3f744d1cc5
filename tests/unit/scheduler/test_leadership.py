"""One leader at a time, epochs that only rise, and a standby that takes over."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.unit.scheduler.scripted import Stack, eventually

from weir.bus.codec import decode
from weir.bus.in_memory import InMemoryHub
from weir.bus.messages import LEADER_KEY, LeaderRecord
from weir.bus.protocol import BusError, KvBucket
from weir.core.clock import ManualClock
from weir.core.errors import Unavailable
from weir_scheduler.leadership import LEADER_TTL_S, Leadership


class Contest:
    """Schedulers that look at one key, in a world where the year is 1970."""

    def __init__(self) -> None:
        self.hub = InMemoryHub()
        self.clock = ManualClock()
        self.bus = self.hub.connect()
        self.unix_time_s = 5.0

    async def bucket(self) -> KvBucket:
        return await self.bus.bucket("leader", durable=True)

    async def contender(self, name: str) -> Leadership:
        return Leadership(await self.bucket(), name, self.clock, unix_time_s=lambda: self.unix_time_s)

    async def record(self) -> LeaderRecord:
        entry = await (await self.bucket()).get(LEADER_KEY)
        assert entry is not None
        return decode(LeaderRecord, entry.value or b"")


async def taken_within(contest: Contest, contender: Leadership, seconds: float) -> bool:
    """Looks every half second, as a standby does, now included."""
    for _ in range(round(seconds / 0.5)):
        if await contender.try_take() is not None:
            return True
        contest.clock.advance(0.5)
    return await contender.try_take() is not None


@pytest.fixture
async def contest() -> AsyncIterator[Contest]:
    world = Contest()
    yield world
    await world.bus.close()


async def test_the_first_one_leads_and_the_second_does_not(contest: Contest) -> None:
    first, second = await contest.contender("a"), await contest.contender("b")
    assert await first.try_take() == 5
    assert await second.try_take() is None
    assert await contest.record() == LeaderRecord("a", 5)


async def test_of_two_at_once_one_leads(contest: Contest) -> None:
    contenders = [await contest.contender(name) for name in "abcd"]
    epochs = await asyncio.gather(*(contender.try_take() for contender in contenders))
    assert sorted(epoch for epoch in epochs if epoch is not None) == [5]


async def test_a_leader_that_renews_is_left_alone_and_a_silent_one_is_deposed_in_a_higher_epoch(
    contest: Contest,
) -> None:
    first, second = await contest.contender("a"), await contest.contender("b")
    await first.try_take()
    for _ in range(10):
        contest.clock.advance(1.0)
        assert await first.keep()
        assert await second.try_take() is None
    assert not await taken_within(contest, second, LEADER_TTL_S), "exactly the time to live is not over it"
    contest.clock.advance(0.1)
    assert await second.try_take() == 6
    assert not await first.keep()


async def test_an_outage_of_the_bus_is_not_the_leaders_silence(contest: Contest) -> None:
    first, second = await contest.contender("a"), await contest.contender("b")
    await first.try_take()
    assert await second.try_take() is None
    contest.hub.stop()
    for _ in range(10):
        contest.clock.advance(0.5)
        with pytest.raises(BusError):
            await second.try_take()
    contest.hub.start()
    assert not await taken_within(contest, second, LEADER_TTL_S - 0.5), "it has its time to live after that"
    assert await first.keep()
    assert not await taken_within(contest, second, LEADER_TTL_S)
    contest.clock.advance(0.1)
    assert await second.try_take() == 6, "a leader that was dead all the time is followed"


async def test_one_failed_look_is_enough_to_begin_anew(contest: Contest) -> None:
    first, second = await contest.contender("a"), await contest.contender("b")
    await first.try_take()
    assert not await taken_within(contest, second, LEADER_TTL_S - 0.5)
    contest.hub.stop()
    contest.clock.advance(0.2)
    with pytest.raises(BusError):
        await second.try_take()
    contest.hub.start()
    assert not await taken_within(contest, second, LEADER_TTL_S - 0.5)


async def test_a_standby_that_did_not_look_for_a_while_deposes_nobody_for_that_time(contest: Contest) -> None:
    first, second = await contest.contender("a"), await contest.contender("b")
    await first.try_take()
    assert await second.try_take() is None
    contest.clock.advance(60.0)
    assert await second.try_take() is None
    assert not await taken_within(contest, second, LEADER_TTL_S)


async def test_a_leader_that_leaves_in_order_is_followed_at_once(contest: Contest) -> None:
    first, second = await contest.contender("a"), await contest.contender("b")
    await first.try_take()
    await first.release()
    assert await second.try_take() == 6


async def test_a_renewal_whose_answer_was_lost_deposes_nobody(contest: Contest) -> None:
    leader = await contest.contender("a")
    await leader.try_take()
    entry = await (await contest.bucket()).get(LEADER_KEY)
    assert entry is not None
    assert entry.value is not None
    await (await contest.bucket()).put(LEADER_KEY, entry.value)
    assert await leader.keep()
    assert await leader.keep()


async def test_a_server_that_lost_the_key_deposes_nobody_and_no_epoch_comes_twice(contest: Contest) -> None:
    leader = await contest.contender("a")
    await leader.try_take()
    await (await contest.bucket()).delete(LEADER_KEY)
    assert await leader.keep()
    assert await contest.record() == LeaderRecord("a", 5)
    await (await contest.bucket()).delete(LEADER_KEY)
    contest.unix_time_s = 9.0
    assert await (await contest.contender("b")).try_take() == 9


async def test_while_the_bus_is_away_a_leader_stays_one(contest: Contest) -> None:
    leader = await contest.contender("a")
    await leader.try_take()
    contest.hub.stop()
    assert await leader.keep()
    contest.hub.start()
    assert await leader.keep()


async def test_a_key_that_holds_something_else_is_taken_after_a_while(
    contest: Contest, caplog: pytest.LogCaptureFixture
) -> None:
    await (await contest.bucket()).put(LEADER_KEY, b"\xc1 junk")
    leader = await contest.contender("a")
    assert await leader.try_take() is None
    assert not await taken_within(contest, leader, LEADER_TTL_S)
    contest.clock.advance(0.1)
    assert await leader.try_take() == 5
    assert "holds something else" in caplog.text


async def test_a_standby_takes_over_what_runs_and_what_waits() -> None:
    stack = Stack()
    first = await stack.add_scheduler("s0")
    gateway = await stack.add_gateway()
    await gateway.submit("running")
    await eventually(lambda: gateway.held["running"].placement is not None)
    standby = await stack.add_scheduler("s1")
    assert standby.describe().metrics == {"is_leader": 0.0, "depositions_total": 0.0}
    await first.stop()
    await eventually(lambda: standby.describe().metrics.get("granted") == 1)
    await gateway.submit("next")
    await eventually(lambda: gateway.granted_ids[-1:] == ["next"])
    assert gateway.grants[0].epoch < gateway.grants[-1].epoch
    assert gateway.ends == {}
    await stack.close()


async def test_a_leader_that_was_cut_off_steps_down_and_stands_by_until_it_leads_again() -> None:
    stack = Stack()
    cut_off = stack.hub.connect()
    first = await stack.add_scheduler("s0", cut_off)
    gateway = await stack.add_gateway()
    await gateway.submit("running")
    await eventually(lambda: gateway.held["running"].placement is not None)
    cut_off.cut_off()
    second = await stack.add_scheduler("s1")
    await eventually(lambda: second.describe().metrics.get("granted") == 1)

    cut_off.reconnect()
    await eventually(lambda: first.describe().metrics == {"is_leader": 0.0, "depositions_total": 1.0})
    assert second.describe().metrics["is_leader"] == 1
    with pytest.raises(Unavailable, match="stands by"):
        first.leader_admins()
    assert gateway.ends == {}

    await second.stop()
    await eventually(lambda: first.describe().metrics.get("granted") == 1)
    await gateway.submit("next")
    await eventually(lambda: gateway.granted_ids[-1:] == ["next"])
    assert gateway.grants[0].epoch < gateway.grants[-1].epoch
    assert (gateway.ends, stack.shutdowns) == ({}, [])
    await stack.close()


async def test_a_leader_that_could_not_renew_commands_nothing_until_it_has(contest: Contest) -> None:
    leader = await contest.contender("a")
    certain = [leader.is_certain]
    await leader.try_take()
    contest.clock.advance(LEADER_TTL_S)
    certain.append(leader.is_certain)
    contest.hub.stop()
    await leader.keep()
    contest.clock.advance(0.1)
    certain.append(leader.is_certain)
    contest.hub.start()
    certain.append(leader.is_certain)  # it is not known yet whether another one leads
    assert await leader.keep()
    certain.append(leader.is_certain)
    assert certain == [False, True, False, False, True]


async def test_one_renewal_that_gets_no_answer_does_not_hold_up_the_next(
    contest: Contest, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, standby = await contest.contender("a"), await contest.contender("b")
    await leader.try_take()

    async def no_answer(key: str, value: bytes, *, revision: int) -> int:
        del key, value, revision
        await asyncio.sleep(60)
        return 0

    with monkeypatch.context() as patched:
        patched.setattr(leader._bucket, "update", no_answer)
        began_s = asyncio.get_running_loop().time()
        assert await leader.keep()
        assert asyncio.get_running_loop().time() - began_s < LEADER_TTL_S / 2
    contest.clock.advance(0.6)
    assert await leader.keep()
    assert await standby.try_take() is None


async def test_a_standby_that_looks_first_after_an_outage_lets_the_leader_live() -> None:
    stack = Stack()
    leaders_bus = stack.hub.connect()
    leader = await stack.add_scheduler("s0", leaders_bus)
    standby = await stack.add_scheduler("s1")
    stack.hub.stop()
    await asyncio.sleep(LEADER_TTL_S + 0.5)
    leaders_bus.cut_off()
    stack.hub.start()
    await asyncio.sleep(0.8)
    leaders_bus.reconnect()
    await asyncio.sleep(1.5)
    roles = [one.describe().metrics["is_leader"] for one in (leader, standby)]
    assert (roles, stack.shutdowns) == ([1, 0], [])
    await stack.close()


async def test_without_a_bus_it_does_not_start(contest: Contest) -> None:
    contest.hub.stop()
    stack = Stack()
    with pytest.raises(Unavailable, match="not connected"):
        await stack.add_scheduler("s0", contest.bus)
    await stack.close()
