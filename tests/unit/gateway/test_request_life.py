"""Whatever is said to a request, in whatever order: it ends once, and its reader sees a prefix of the answer."""

import asyncio
import random
from collections import Counter

import pytest
from tests.unit.gateway.fake_model import ByteDetokenizer, byte_model, ids_of
from tests.unit.gateway.fake_scheduler import STANDING
from tests.unit.gateway.fake_workers import GOING_ON, LENGTH, update, worker_error

from weir.bus.messages import Placement
from weir.core.clock import ManualClock
from weir.core.errors import Unavailable, WeirError
from weir.core.life import IllegalTransition, LifeEvent, Phase
from weir.core.options import GenerateOptions
from weir.wire.v1 import types_pb2, worker_pb2
from weir_gateway.draft import GRPC_NAMES, Operation, RequestDraft, Text
from weir_gateway.driving.call import RequestState
from weir_gateway.driving.choices import Choices
from weir_gateway.requests.output import Output, OutputOptions
from weir_gateway.requests.request import RequestEnd, RequestIds, RequestRecord
from weir_gateway.requests.stops import StopMatcher
from weir_gateway.requests.tokens import TokenOrder
from weir_gateway.requests.validation import Limits, check_prompt

ANSWER = ids_of("hello world")
REQUEST_ID = "0" * 32
PLACEMENT = Placement(1, "p", "p:1", "d", "d:1", 4)


def make_request(events: list[LifeEvent], clock: ManualClock, *, deadline_at_s: float | None = None) -> RequestRecord:
    draft = RequestDraft(Operation.TEXT_COMPLETION, Text("x"), GRPC_NAMES, GenerateOptions(max_tokens=len(ANSWER)))
    checked = check_prompt(draft, byte_model(), Limits(), [1, 2, 3], STANDING)
    return RequestRecord(RequestIds(REQUEST_ID, "mine", "g"), checked, deadline_at_s, clock, events.append)


def make_call(events: list[LifeEvent], clock: ManualClock) -> RequestState:
    request = make_request(events, clock)
    output = Output(TokenOrder(request.attempt, len(ANSWER)), ByteDetokenizer(), StopMatcher(()), OutputOptions())
    return RequestState(request, output, clock, "", asyncio.Event())


async def read_all(call: RequestState) -> str:
    text, error = await read_until_end(call)
    assert error is None
    return text


async def read_until_end(call: RequestState) -> tuple[str, WeirError | None]:
    choices = Choices([call], call.has_output)
    text = ""
    try:
        while True:
            delivery = await choices.next_piece()
            text += delivery.piece.text
            assert delivery.is_last == (delivery.finish_reason is not None)
            if delivery.is_last:
                return text, None
    except WeirError as error:
        return text, error


def random_update(source: random.Random) -> worker_pb2.SequenceUpdate:
    """Mostly sound news, sometimes nonsense."""
    start = source.randrange(len(ANSWER) + 1)
    end = source.randrange(start, len(ANSWER) + 1)
    tokens = ANSWER[start:end]
    if source.random() < 0.02:
        tokens = [*tokens, 0]
    finish = LENGTH if start + len(tokens) == len(ANSWER) and source.random() < 0.7 else GOING_ON
    if source.random() < 0.02:
        finish = types_pb2.FINISH_REASON_CANCELLED
    return update(
        REQUEST_ID, start, tokens, finish=finish, handed_off=source.random() < 0.2, dispatch=source.choice([0, 1, 1, 1])
    )


def say_something(call: RequestState, source: random.Random) -> None:
    worker_id = source.choice(["p", "d"])
    match source.randrange(40):
        case 0:
            call.cancel("enough")
        case 1:
            call.expire()
        case 2:
            call.on_connection_lost(worker_id, "lost")
        case 3:
            call.on_update(worker_id, worker_error(REQUEST_ID, source.randrange(7)))  # type: ignore[arg-type]
        case 4:
            call.give_up(Unavailable("revoked"))
        case 5:
            call.commands_to_resume(worker_id)
        case 6:
            call.try_probe(0.0, 0.0)
        case _:
            call.on_update(worker_id, random_update(source))


@pytest.mark.parametrize("seed", range(60))
async def test_a_request_ends_exactly_once_and_its_reader_sees_a_prefix(seed: int) -> None:
    source = random.Random(seed)
    events: list[LifeEvent] = []
    call = make_call(events, ManualClock())
    reading = asyncio.create_task(read_until_end(call))
    call.request.granted(PLACEMENT)
    call.start()
    for _ in range(source.randrange(1, 60)):
        say_something(call, source)
        if source.random() < 0.3:
            await asyncio.sleep(0)
    call.cancel("the end of the test")
    text, error = await asyncio.wait_for(reading, 5)
    terminal = [event for event in events if event.phase.is_terminal]
    assert len(terminal) == 1
    assert events[-1] is terminal[0]
    assert "hello world".startswith(text)
    assert (error is None) == (terminal[0].phase is Phase.FINISHED)
    assert terminal[0].phase is not Phase.FINISHED or text == "hello world"


async def test_random_requests_end_in_every_way() -> None:
    """The test above says something only if its requests end differently."""
    endings: Counter[Phase] = Counter()
    for seed in range(200):
        source = random.Random(seed)
        events: list[LifeEvent] = []
        call = make_call(events, ManualClock())
        call.request.granted(PLACEMENT)
        call.start()
        for _ in range(60):
            say_something(call, source)
        call.cancel("the end of the test")
        endings[events[-1].phase] += 1
    assert set(endings) == {Phase.FINISHED, Phase.FAILED, Phase.CANCELLED}
    assert min(endings.values()) > 10


async def test_the_first_ending_counts() -> None:
    events: list[LifeEvent] = []
    call = make_call(events, ManualClock())
    call.cancel("first")
    call.lose("second")
    _, error = await read_until_end(call)
    assert error is not None
    assert error.message == "first"
    with pytest.raises(IllegalTransition):
        call.request.end(RequestEnd(Phase.FAILED, Unavailable("third")))


async def test_tokens_that_came_before_an_error_are_read_before_it() -> None:
    call = make_call([], ManualClock())
    call.request.granted(PLACEMENT)
    call.start()
    call.on_update("p", update(REQUEST_ID, 0, ANSWER[:3]))
    call.lose("gone")
    text, error = await read_until_end(call)
    assert text == "hel"
    assert isinstance(error, Unavailable)
    assert error.message == "gone; 3 tokens were sent before"


async def test_a_whole_answer_is_read_to_its_end() -> None:
    call = make_call([], ManualClock())
    call.request.granted(PLACEMENT)
    call.start()
    call.on_update("p", update(REQUEST_ID, 0, ANSWER[:1]))
    call.on_update("d", update(REQUEST_ID, 1, ANSWER[1:], finish=LENGTH))
    assert await read_all(call) == "hello world"


async def test_a_probe_waits_for_overdue_tokens_and_leaves_time_for_the_answer() -> None:
    clock = ManualClock()
    call = make_call([], clock)
    call.request.granted(PLACEMENT)
    call.start()
    clock.advance(100)
    assert call.try_probe(3, 40) is None  # still prefilling: nobody at the decode worker to ask for
    call.on_update("p", update(REQUEST_ID, 0, ANSWER[:1], handed_off=True))
    assert call.try_probe(3, 40) is None
    clock.advance(3)
    probe = call.try_probe(3, 40)
    assert probe is not None
    assert probe.resume.next_index == 1
    clock.advance(39)
    assert call.try_probe(3, 40) is None
    clock.advance(1)
    assert call.try_probe(3, 40) is not None


def test_the_deadline_that_the_scheduler_hears_counts_from_now() -> None:
    clock = ManualClock()
    request = make_request([], clock, deadline_at_s=10.0)
    assert request.submit_message().deadline_ms == 10_000
    clock.advance(9.5)
    assert request.submit_message().deadline_ms == 500
    clock.advance(5)
    assert request.submit_message().deadline_ms == 1
    assert make_request([], clock).submit_message().deadline_ms == 0
