"""Pages of sequences that are about to come here: the gateway hears how far they are; nothing goes on for nobody."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress

import pytest
from tests.unit.worker.rig import eventually

from weir.core.errors import Unavailable
from weir.core.life import Attempt
from weir.engine.messages import SequenceKey
from weir.wire.v1 import worker_pb2
from weir.worker.requests.stagings import MAX_STAGINGS, Stagings
from weir.worker.requests.streams import GatewayStream

KEY = SequenceKey("0" * 32, Attempt(3))


class Elsewhere:
    """Sends what a test says, until it is closed."""

    def __init__(self) -> None:
        self.num_pages: asyncio.Queue[int | None] = asyncio.Queue()
        self.asked: list[tuple[str, str]] = []
        self.num_open = 0

    async def stage(self, request_id: str, pages_address: str) -> AsyncGenerator[int]:
        self.asked.append((request_id, pages_address))
        self.num_open += 1
        try:
            while (num_pages := await self.num_pages.get()) is not None:
                if num_pages < 0:
                    raise Unavailable("says the other host")
                yield num_pages
        finally:
            self.num_open -= 1


@pytest.fixture
def elsewhere() -> Elsewhere:
    return Elsewhere()


@pytest.fixture
async def stagings(elsewhere: Elsewhere) -> AsyncIterator[Stagings]:
    made = Stagings(elsewhere.stage, request_shutdown=pytest.fail)
    yield made
    await made.stop()
    assert elsewhere.num_open == 0
    assert made.metrics()["stagings_under_way"] == 0


async def told(stream: GatewayStream) -> list[worker_pb2.StagedPages]:
    async with asyncio.timeout(5):
        frame = await stream.next_frame()
    assert frame is not None
    return list(frame.staged)


@pytest.mark.parametrize(("end", "problem"), [(None, "no more of its pages come"), (-1, "says the other host")])
async def test_a_gateway_hears_how_far_it_is_and_why_it_ends(
    stagings: Stagings, elsewhere: Elsewhere, end: int | None, problem: str
) -> None:
    stream = GatewayStream("g")
    stagings.begin(stream, KEY, "there:1")
    elsewhere.num_pages.put_nowait(2)
    [first] = await told(stream)
    assert (first.request_id, first.attempt.dispatch, first.num_tokens, first.problem) == (KEY.request_id, 3, 32, "")
    elsewhere.num_pages.put_nowait(end)
    [last] = await told(stream)
    assert (last.num_tokens, last.problem) == (32, problem)
    assert elsewhere.asked == [(KEY.request_id, "there:1")]


@pytest.mark.parametrize("how", ["cancel", "stream", "again"])
async def test_what_nobody_wants_any_more_is_closed(stagings: Stagings, elsewhere: Elsewhere, how: str) -> None:
    stream, other = GatewayStream("g"), GatewayStream("g")
    stagings.begin(stream, KEY, "there:1")
    await eventually(lambda: elsewhere.num_open == 1)
    stagings.cancel(other, KEY.request_id)
    stagings.cancel_all(other)
    await asyncio.sleep(0)
    assert elsewhere.num_open == 1, "another stream has no say in it"
    if how == "cancel":
        stagings.cancel(stream, KEY.request_id)
    elif how == "stream":
        stagings.cancel_all(stream)
    else:
        stagings.begin(stream, KEY, "there:2")
        await eventually(lambda: len(elsewhere.asked) == 2)
    await eventually(lambda: elsewhere.num_open == (how == "again"))


async def test_only_so_many_come_at_a_time(stagings: Stagings, elsewhere: Elsewhere) -> None:
    stream = GatewayStream("g")
    for number in range(MAX_STAGINGS + 1):
        stagings.begin(stream, SequenceKey(f"{number:032x}", Attempt()), "there:1")
    [refused] = await told(stream)
    assert refused.request_id == f"{MAX_STAGINGS:032x}"
    assert f"{MAX_STAGINGS} sequences" in refused.problem
    with suppress(TimeoutError):
        await eventually(lambda: elsewhere.num_open == MAX_STAGINGS)
