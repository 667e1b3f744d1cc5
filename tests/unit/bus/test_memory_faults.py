"""The faults of the in-memory bus do what they say: lost, repeated and late messages, lost connections."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from weir.bus.in_memory import LOST, REPEATED, InMemoryBus, InMemoryHub, Leg, RandomFaults, ScriptedFaults
from weir.bus.protocol import BusMessage, BusTimeout, BusUnavailable
from weir.core.clock import ManualClock


class Wire:
    def __init__(self) -> None:
        self.faults = ScriptedFaults()
        self.clock = ManualClock()
        self.hub = InMemoryHub(clock=self.clock, faults=self.faults)
        self.asking: InMemoryBus = self.hub.connect()
        self.answering: InMemoryBus = self.hub.connect()
        self.heard: list[bytes] = []

    async def listen(self, subject: str) -> None:
        async def hear(message: BusMessage) -> bytes:
            self.heard.append(message.payload)
            return b"answer to " + message.payload

        await self.answering.subscribe(subject, hear)

    async def ask(self, payload: bytes, timeout_s: float = 0.05) -> bytes:
        return (await self.asking.request("s", payload, timeout_s=timeout_s)).payload


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    both = Wire()
    await both.listen("s")
    yield both
    await both.asking.close()
    await both.answering.close()


async def test_a_lost_request_is_never_heard_and_the_next_one_is(wire: Wire) -> None:
    wire.faults.script("s", LOST)
    with pytest.raises(BusTimeout):
        await wire.ask(b"one")
    assert await wire.ask(b"two") == b"answer to two"
    assert wire.heard == [b"two"]


async def test_a_lost_answer_leaves_the_request_heard(wire: Wire) -> None:
    wire.faults.script("s", LOST, leg=Leg.BACK)
    with pytest.raises(BusTimeout):
        await wire.ask(b"one")
    assert wire.heard == [b"one"]


async def test_a_repeated_request_is_heard_twice_and_answered_once(wire: Wire) -> None:
    wire.faults.script("s", REPEATED)
    assert await wire.ask(b"one") == b"answer to one"
    await asyncio.sleep(0.01)
    assert wire.heard == [b"one", b"one"]


async def test_a_late_message_arrives_after_its_successor(wire: Wire) -> None:
    wire.faults.script("s", (0.05,))
    await asyncio.gather(wire.asking.publish("s", b"one"), wire.asking.publish("s", b"two"))
    await asyncio.sleep(0.1)
    assert wire.heard == [b"two", b"one"]


async def test_a_late_answer_helps_nobody(wire: Wire) -> None:
    wire.faults.script("s", (0.08,), leg=Leg.BACK)
    with pytest.raises(BusTimeout):
        await wire.ask(b"one")
    assert await wire.ask(b"two") == b"answer to two"


async def test_one_client_can_be_cut_off_alone(wire: Wire) -> None:
    wire.asking.cut_off()
    with pytest.raises(BusUnavailable):
        await wire.ask(b"one")
    assert wire.answering.is_connected
    wire.asking.reconnect()
    assert await wire.ask(b"two") == b"answer to two"


async def test_entries_expire_by_the_clock_that_is_given(wire: Wire) -> None:
    bucket = await wire.asking.bucket("b", ttl_s=3)
    await bucket.put("k", b"")
    wire.clock.advance(2.9)
    assert await bucket.get("k") is not None
    wire.clock.advance(0.2)
    assert await bucket.get("k") is None


def test_random_faults_are_the_same_for_the_same_seed_and_none_is_forgotten() -> None:
    def fates(seed: int) -> list[tuple[float, ...]]:
        faults = RandomFaults(seed, lost=0.2, repeated=0.2, delayed=0.2, max_delay_s=0.5)
        return [tuple(faults.fate_of("s", Leg.THERE)) for _ in range(200)]

    assert fates(1) == fates(1) != fates(2)
    assert {len(fate) for fate in fates(1)} == {0, 1, 2}
    assert any(len(fate) == 1 and fate[0] > 0 for fate in fates(1))
    with pytest.raises(ValueError, match="at most 1"):
        RandomFaults(1, lost=0.9, repeated=0.2, delayed=0, max_delay_s=0)
