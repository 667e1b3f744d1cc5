"""What a worker has its engine do with a sequence that it wanted to give away, by the answer and by its record."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from tests.unit.engine.world import params
from tests.unit.worker.in_memory_arena import InMemoryArena, InMemoryArenaClient
from tests.unit.worker.rig import eventually

from weir.core.errors import DeadlineExceeded, InternalError, Unavailable
from weir.core.life import Attempt
from weir.engine.messages import (
    Command,
    FailSequence,
    FailureReason,
    ForgetSequence,
    HandOffReady,
    HandOverSequences,
    SequenceKey,
    TakeBackSequence,
)
from weir.kv.geometry import ArenaGeometry
from weir.worker.requests.drain import Untaken
from weir.worker.role import RoleParts
from weir.worker.roles.hand_overs import HandOvers

WORKER = "decode-0-00000000"
PARAMS = params((1, 2, 3))
KEY = SequenceKey.of(PARAMS)
OTHER_REQUEST = KEY._replace(request_id=f"{1:032x}")
OTHER_ATTEMPT = KEY._replace(attempt=Attempt(KEY.attempt.dispatch, adoption=1))
NOBODY = Unavailable("no other decode worker of this arena takes sequences now")


class Prefixes:
    """No page of a prompt is shared."""

    def hashes_of(self, key: SequenceKey) -> tuple[bytes, ...]:
        return ()


class Manager:
    """What it cancelled is in `cancelled`."""

    def __init__(self) -> None:
        self.cancelled: set[SequenceKey] = set()

    def is_wanted(self, key: SequenceKey) -> bool:
        return key not in self.cancelled


class Giving:
    """Gives a sequence away that has a slot of its arena; every hand-off is answered with `answer`."""

    def __init__(self) -> None:
        self.arena = InMemoryArena(ArenaGeometry(64, num_pages=8, num_slots=8, max_context_tokens=64))
        self.client = InMemoryArenaClient(self.arena, WORKER, lambda handed_off: None)
        self.answer: Exception = NOBODY
        self.slot = -1
        self.num_calls = 0
        self.manager = Manager()
        self.posted: list[Command] = []
        self.shutdowns: list[str] = []
        self.arena.before_hand_off = self._answer
        parts = RoleParts(
            WORKER,
            self.client,
            None,  # type: ignore[arg-type]  # its pages are nobody's concern here
            Prefixes(),  # type: ignore[arg-type]
            self.manager,  # type: ignore[arg-type]
            self.posted.append,
            self.shutdowns.append,
        )
        self.hand_overs = HandOvers(parts)

    async def start(self) -> None:
        await self.client.start()
        (self.slot,) = (await self.client.acquire(0, 1)).slots

    async def command(self, record_of: SequenceKey | None, untaken: Untaken = Untaken.GOES_ON) -> Command:
        """What the engine is told, with this sequence's record in the slot."""
        self.hand_overs.ask(untaken)
        assert self.posted.pop() == HandOverSequences(with_preempted=untaken is not Untaken.GOES_ON)
        if record_of is not None:
            record = self.client.segment.record(self.slot)
            record.begin(replace(PARAMS, request_id=record_of.request_id, attempt=record_of.attempt))
            record.publish(0)
        self.hand_overs.begin(HandOffReady(KEY, self.slot, ()))
        await eventually(lambda: bool(self.posted))
        (command,) = self.posted
        return command

    async def _answer(self, request_id: str) -> None:
        self.num_calls += 1
        raise self.answer


@pytest.fixture
async def giving() -> AsyncIterator[Giving]:
    made = Giving()
    await made.start()
    yield made
    await made.hand_overs.stop()
    assert made.shutdowns == []


async def test_it_goes_on_where_it_is_if_its_record_is_as_it_was(giving: Giving) -> None:
    assert await giving.command(KEY) == TakeBackSequence(KEY)


@pytest.mark.parametrize("record_of", [OTHER_REQUEST, OTHER_ATTEMPT])
async def test_a_record_that_is_anothers_by_now_is_left_alone(giving: Giving, record_of: SequenceKey) -> None:
    assert await giving.command(record_of) == ForgetSequence(KEY, is_adoption=True)


async def test_it_does_not_go_on_without_a_record(giving: Giving) -> None:
    command = await giving.command(None)
    assert isinstance(command, FailSequence)
    assert (command.key, command.failure.reason) == (KEY, FailureReason.DRAINING)


@pytest.mark.parametrize(
    ("untaken", "answer", "expected"),
    [
        (Untaken.GOES_ON, InternalError("adoption_wait_ms is 0"), TakeBackSequence),
        (Untaken.INTERRUPTED, NOBODY, FailSequence),
        (Untaken.LEFT, NOBODY, ForgetSequence),
        (Untaken.LEFT, InternalError("adoption_wait_ms is 0"), FailSequence),
        (Untaken.GOES_ON, DeadlineExceeded("it may be another's now"), ForgetSequence),
    ],
)
async def test_what_nobody_takes_goes_on_is_interrupted_or_is_left(
    giving: Giving, untaken: Untaken, answer: Exception, expected: type[Command]
) -> None:
    giving.answer = answer
    assert type(await giving.command(KEY, untaken)) is expected


async def test_what_was_cancelled_meanwhile_is_offered_to_nobody(giving: Giving) -> None:
    giving.manager.cancelled.add(KEY)
    assert await giving.command(KEY) == TakeBackSequence(KEY)
    assert giving.num_calls == 0
