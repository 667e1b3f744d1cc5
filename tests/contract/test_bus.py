"""What both buses promise about messages."""

import asyncio
import contextlib
import gc
import time
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from tests.contract.worlds import BusWorld, NatsServer, eventually

from weir.bus.nats import NatsBus
from weir.bus.protocol import Bus, BusMessage, BusTimeout, BusUnavailable, NoResponder

Connect = Callable[[], Awaitable[Bus]]


async def ignore(message: BusMessage) -> None:
    del message


async def echo(message: BusMessage) -> bytes:
    return message.payload


async def ask_until_heard(bus: Bus, subject: str, payload: bytes) -> bytes:
    """As every caller does after a reconnect, when the other side may not be back yet."""
    async with asyncio.timeout(10):
        while True:
            try:
                return (await bus.request(subject, payload, timeout_s=5)).payload
            except NoResponder:
                await asyncio.sleep(0.02)


class Recorder:
    """A handler that remembers, and can be held up."""

    def __init__(self) -> None:
        self.messages: list[BusMessage] = []
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()

    async def __call__(self, message: BusMessage) -> None:
        self.messages.append(message)
        await self.may_go_on.wait()


async def test_published_messages_arrive_in_order_with_their_headers(connect: Connect, name: str) -> None:
    sender, receiver, recorder = await connect(), await connect(), Recorder()
    await receiver.subscribe(name, recorder)
    for number in range(100):
        await sender.publish(name, b"%d" % number, {"n": str(number)})
    await eventually(lambda: len(recorder.messages) == 100)
    assert recorder.messages == [BusMessage(name, b"%d" % number, {"n": str(number)}) for number in range(100)]


async def test_a_request_is_answered(connect: Connect, name: str) -> None:
    asking, answering = await connect(), await connect()
    await answering.subscribe(name, echo)
    assert (await asking.request(name, b"ping", timeout_s=5)).payload == b"ping"


async def test_many_requests_at_once_each_get_their_own_answer(connect: Connect, name: str) -> None:
    asking, answering = await connect(), await connect()
    await answering.subscribe(name, echo)
    answers = await asyncio.gather(*(asking.request(name, b"%d" % i, timeout_s=5) for i in range(200)))
    assert [answer.payload for answer in answers] == [b"%d" % i for i in range(200)]


async def test_a_request_that_nobody_hears_fails_at_once(connect: Connect, name: str) -> None:
    asking = await connect()
    started_s = time.monotonic()
    with pytest.raises(NoResponder):
        await asking.request(name, b"", timeout_s=30)
    assert time.monotonic() - started_s < 15


async def test_a_request_that_is_heard_but_not_answered_times_out(connect: Connect, name: str) -> None:
    asking, answering = await connect(), await connect()
    await answering.subscribe(name, ignore)
    with pytest.raises(BusTimeout):
        await asking.request(name, b"", timeout_s=0.1)


async def test_a_failing_handler_answers_nothing_and_hears_the_next_message(
    connect: Connect, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def fragile(message: BusMessage) -> bytes:
        if message.payload == b"bad":
            raise RuntimeError("cannot")
        return b"fine"

    asking, answering = await connect(), await connect()
    await answering.subscribe(name, fragile)
    with pytest.raises(BusTimeout):
        await asking.request(name, b"bad", timeout_s=0.2)
    assert (await asking.request(name, b"good", timeout_s=5)).payload == b"fine"
    assert "RuntimeError: cannot" in caplog.text


async def test_one_message_at_a_time_and_what_does_not_fit_is_dropped_and_counted(connect: Connect, name: str) -> None:
    sender, receiver, recorder = await connect(), await connect(), Recorder()
    recorder.may_go_on.clear()
    subscription = await receiver.subscribe(name, recorder, max_pending=4)
    await sender.publish(name, b"first")
    await eventually(lambda: len(recorder.messages) == 1)
    for _ in range(10):
        await sender.publish(name, b"more")
    await eventually(lambda: subscription.num_dropped == 6)
    assert (subscription.num_pending, len(recorder.messages)) == (4, 1)
    recorder.may_go_on.set()
    await eventually(lambda: len(recorder.messages) == 5)


async def test_a_closed_subscription_hears_nothing(connect: Connect, name: str) -> None:
    sender, receiver, recorder = await connect(), await connect(), Recorder()
    subscription = await receiver.subscribe(name, recorder)
    await subscription.close()
    with pytest.raises(NoResponder):
        await sender.request(name, b"", timeout_s=5)
    assert recorder.messages == []


async def test_without_a_server_every_call_fails_at_once_and_afterwards_all_goes_on(
    connect: Connect, world: BusWorld, name: str
) -> None:
    asking, answering = await connect(), await connect()
    bucket = await asking.bucket(name)
    await answering.subscribe(name, echo)
    world.stop_server()
    try:
        await eventually(lambda: not asking.is_connected and not answering.is_connected)
        started_s = time.monotonic()
        for attempt in (
            lambda: asking.publish(name, b"lost"),
            lambda: asking.request(name, b"lost", timeout_s=30),
            lambda: bucket.put("key", b"lost"),
            lambda: bucket.get("key"),
            lambda: asking.bucket(name),
        ):
            with pytest.raises(BusUnavailable):
                await attempt()
        assert time.monotonic() - started_s < 15
        late = await answering.subscribe(f"{name}.late", echo)
    finally:
        world.start_server()
    await eventually(lambda: asking.is_connected and answering.is_connected)
    assert await ask_until_heard(asking, name, b"again") == b"again"
    assert await ask_until_heard(asking, f"{name}.late", b"too") == b"too"
    assert late.num_dropped == 0


async def test_a_closed_bus_is_unavailable(connect: Connect, name: str) -> None:
    bus = await connect()
    await bus.close()
    assert not bus.is_connected
    with pytest.raises(BusUnavailable):
        await bus.publish(name, b"")


async def test_a_subscription_that_a_hanging_server_does_not_confirm_begins_when_it_goes_on(
    nats_server: NatsServer, name: str
) -> None:
    bus, recorder = await NatsBus.connect(nats_server.url, name="contract-test"), Recorder()
    nats_server.freeze()
    try:
        await bus.subscribe(name, recorder)
    finally:
        nats_server.thaw()
    async with asyncio.timeout(20):
        while not recorder.messages:  # what is sent while the client connects again is lost
            with contextlib.suppress(BusUnavailable):
                await bus.publish(name, b"again")
            await asyncio.sleep(0.1)
    await bus.publish(name, b"heard once")
    await eventually(lambda: recorder.messages[-1].payload == b"heard once")
    await asyncio.sleep(0.1)
    assert [message.payload for message in recorder.messages].count(b"heard once") == 1
    await bus.close()


async def test_a_server_that_refuses_the_credentials_is_not_said_to_be_away(tmp_path: Path) -> None:
    server = NatsServer(tmp_path, "--user", "weir", "--pass", "right")
    server.start()
    try:
        with pytest.raises(BusUnavailable, match=r"(Authorization Violation|Connection reset).*credentials"):
            await NatsBus.connect(server.url.replace("//", "//weir:wrong@"), name="contract-test", timeout_s=1.5)
    finally:
        server.kill()
    with warnings.catch_warnings():  # the client leaves the sockets of refused attempts to the garbage collector
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
