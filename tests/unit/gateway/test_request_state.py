"""Whatever happens to a request, in whatever order: it ends once, and its client gets a prefix of the answer."""

import asyncio
import random
from collections import Counter

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.trace import NoOpTracerProvider
from tests.unit.gateway.fake_model import byte_model, ids_of
from tests.unit.gateway.fake_scheduler import SCOPE
from tests.unit.gateway.fake_workers import GOING_ON, LENGTH, update, worker_error

from weir.bus.messages import Placement
from weir.core.clock import ManualClock
from weir.core.errors import DeadlineExceeded, Overloaded, Unavailable, WeirError
from weir.core.life import IllegalTransition, Phase
from weir.core.options import GenerateOptions
from weir.wire.v1 import types_pb2, worker_pb2
from weir_gateway.driving.open_request import OpenRequest
from weir_gateway.driving.output_pace import OutputPace
from weir_gateway.driving.request_span import RequestSpan
from weir_gateway.recent.store import RecentRequests, RecentSettings
from weir_gateway.requests.client_request import GRPC_NAMES, ClientRequest, Operation, Text
from weir_gateway.requests.request_state import RequestState
from weir_gateway.requests.validation import Limits, check_prompt

ANSWER = ids_of("hello world")
REQUEST_ID = "0" * 32
RECENT = RecentRequests("gateway-0-00000000", RecentSettings(), ManualClock())
PLACEMENT = Placement(1, "p", "p:1", "d", "d:1", 4)
CLIENT_REQUEST = ClientRequest(
    Operation.TEXT_COMPLETION, Text("x"), GRPC_NAMES, GenerateOptions(max_tokens=len(ANSWER))
)


class Phases:
    def __init__(self, phases: list[Phase]) -> None:
        self._phases = phases

    def on_phase(self, phase: Phase, placement: Placement | None) -> None:
        self._phases.append(phase)

    def on_tokens(self, now_s: float, num_tokens: int) -> None:
        pass

    def on_waits(self, waits: worker_pb2.SequenceWaits) -> None:
        pass


def make_state(phases: list[Phase], clock: ManualClock, *, deadline_at_s: float | None = None) -> RequestState:
    return RequestState(
        REQUEST_ID,
        check_prompt(CLIENT_REQUEST, byte_model(), Limits(), [1, 2, 3], SCOPE),
        deadline_at_s=deadline_at_s,
        traceparent="",
        has_output=asyncio.Event(),
        clock=clock,
        observer=Phases(phases),
    )


async def read_all(state: RequestState) -> str:
    text, error = await read_until_end(state)
    assert error is None
    return text


def open_alone(state: RequestState, hold_s: float = 0.0) -> OpenRequest:
    clock = ManualClock()
    pace = OutputPace(clock)
    pace.hold_s = hold_s
    span = RequestSpan(NoOpTracerProvider().get_tracer("test"), CLIENT_REQUEST, Context(), 0.0, RECENT)
    return OpenRequest([state], span, clock, pace)


async def read_until_end(state: RequestState, hold_s: float = 0.0) -> tuple[str, WeirError | None]:
    opened, text = open_alone(state, hold_s), ""
    try:
        while True:
            delta = await opened.next_delta()
            text += delta.text
            assert delta.is_last == (delta.finish_reason is not None)
            if delta.is_last:
                return text, None
    except WeirError as error:
        return text, error


def random_update(source: random.Random) -> worker_pb2.SequenceUpdate:
    """Mostly sound, sometimes nonsense."""
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


def do_something(state: RequestState, source: random.Random) -> None:
    worker_id = source.choice(["p", "d"])
    match source.randrange(40):
        case 0:
            state.cancel("enough")
        case 1:
            state.expire()
        case 2:
            state.on_connection_lost(worker_id, "lost")
        case 3:
            state.on_update(worker_id, worker_error(REQUEST_ID, source.randrange(7)))  # type: ignore[arg-type]
        case 4:
            state.revoke(Unavailable("revoked"))
        case 5:
            state.commands_to_resume(worker_id)
        case 6:
            state.try_probe(0.0, 0.0)
        case _:
            state.on_update(worker_id, random_update(source))


@pytest.mark.parametrize("seed", range(60))
async def test_a_request_ends_exactly_once_and_its_client_gets_a_prefix(seed: int) -> None:
    source = random.Random(seed)
    phases: list[Phase] = []
    state = make_state(phases, ManualClock())
    reading = asyncio.create_task(read_until_end(state, hold_s=0.001 * (seed % 2)))
    state.grant(PLACEMENT)
    state.start()
    for _ in range(source.randrange(1, 60)):
        do_something(state, source)
        if source.random() < 0.3:
            await asyncio.sleep(0)
    state.cancel("the end of the test")
    text, error = await asyncio.wait_for(reading, 5)
    terminal = [phase for phase in phases if phase.is_terminal]
    assert len(terminal) == 1
    assert phases[-1] is terminal[0]
    assert "hello world".startswith(text)
    assert (error is None) == (terminal[0] is Phase.FINISHED)
    assert terminal[0] is not Phase.FINISHED or text == "hello world"


async def test_random_requests_end_in_every_way() -> None:
    """The test above says something only if its requests end differently."""
    endings: Counter[Phase] = Counter()
    for seed in range(200):
        source = random.Random(seed)
        phases: list[Phase] = []
        state = make_state(phases, ManualClock())
        state.grant(PLACEMENT)
        state.start()
        for _ in range(60):
            do_something(state, source)
        state.cancel("the end of the test")
        endings[phases[-1]] += 1
    assert set(endings) == {Phase.FINISHED, Phase.FAILED, Phase.CANCELLED}
    assert min(endings.values()) > 10


async def test_the_first_ending_counts() -> None:
    phases: list[Phase] = []
    state = make_state(phases, ManualClock())
    state.cancel("first")
    state.fail(Unavailable("second"))
    _, error = await read_until_end(state)
    assert error is not None
    assert error.message == "first"
    assert phases == [Phase.RECEIVED, Phase.CANCELLED]
    with pytest.raises(IllegalTransition):
        state.grant(PLACEMENT)


async def test_tokens_that_came_before_an_error_are_handed_out_before_it() -> None:
    state = make_state([], ManualClock())
    state.grant(PLACEMENT)
    state.start()
    state.on_update("p", update(REQUEST_ID, 0, ANSWER[:3]))
    state.fail(Unavailable("gone"))
    text, error = await read_until_end(state)
    assert text == "hel"
    assert isinstance(error, Unavailable)
    assert error.message == "gone; 3 tokens were sent before"


async def test_an_end_that_overtakes_the_first_token_is_one_at_the_workers_too() -> None:
    """Nothing is to be cancelled there."""
    state = make_state([], ManualClock())
    state.grant(PLACEMENT)
    state.start()
    state.on_update("d", update(REQUEST_ID, 1, ANSWER[1:], finish=LENGTH))
    state.on_update("p", update(REQUEST_ID, 0, ANSWER[:1], handed_off=True))
    assert (await read_all(state), state.is_over_at_workers) == ("hello world", True)


async def test_a_whole_answer_is_handed_out_to_its_end() -> None:
    state = make_state([], ManualClock())
    state.grant(PLACEMENT)
    state.start()
    state.on_update("p", update(REQUEST_ID, 0, ANSWER[:1]))
    state.on_update("d", update(REQUEST_ID, 1, ANSWER[1:], finish=LENGTH))
    assert await read_all(state) == "hello world"


async def test_a_probe_waits_for_overdue_tokens_and_leaves_time_for_the_answer() -> None:
    clock = ManualClock()
    state = make_state([], clock)
    state.grant(PLACEMENT)
    state.start()
    clock.advance(100)
    assert state.try_probe(3, 40) is None  # still prefilling: nobody at the decode worker to ask for
    state.on_update("p", update(REQUEST_ID, 0, ANSWER[:1], handed_off=True))
    assert state.try_probe(3, 40) is None
    clock.advance(3)
    probe = state.try_probe(3, 40)
    assert probe is not None
    assert probe.resume.next_index == 1
    clock.advance(39)
    assert state.try_probe(3, 40) is None
    clock.advance(1)
    assert state.try_probe(3, 40) is not None


async def test_a_revocation_after_the_deadline_is_the_deadline() -> None:
    """The scheduler's clock may be the first to ring."""
    clock = ManualClock()
    early, late = (make_state([], clock, deadline_at_s=clock.now_s() + left_s) for left_s in (2.0, 1.0))
    clock.advance(1.0)
    for state in (early, late):
        state.submit()
        state.queue()
        state.revoke(Overloaded("waited too long"))
    errors = [state.ended.result().error for state in (early, late)]
    assert [type(error) for error in errors] == [Overloaded, DeadlineExceeded]


async def test_while_the_loop_is_behind_the_tokens_of_a_stream_gather_but_its_first_one_waits_for_nothing() -> None:
    state = make_state([], ManualClock())
    opened = open_alone(state, hold_s=0.01)
    state.grant(PLACEMENT)
    state.start()
    state.on_update("p", update(REQUEST_ID, 0, ANSWER[:1]))
    pieces = [await opened.next_delta()]
    waiting = asyncio.create_task(opened.next_delta())
    for index in range(1, 4):
        await asyncio.sleep(0)
        state.on_update("d", update(REQUEST_ID, index, ANSWER[index : index + 1]))
    pieces.append(await waiting)
    state.on_update("d", update(REQUEST_ID, 4, ANSWER[4:], finish=LENGTH))
    pieces.append(await opened.next_delta())
    assert [(piece.first_index, piece.token_ids, piece.is_last) for piece in pieces] == [
        (0, ANSWER[:1], False),
        (1, ANSWER[1:4], False),
        (4, ANSWER[4:], True),
    ]
    assert "".join(piece.text for piece in pieces) == "hello world"


async def test_an_end_that_comes_while_tokens_gather_is_told_at_once() -> None:
    state = make_state([], ManualClock())
    opened = open_alone(state, hold_s=3600.0)
    state.grant(PLACEMENT)
    state.start()
    state.on_update("p", update(REQUEST_ID, 0, ANSWER[:1]))
    await opened.next_delta()
    waiting = asyncio.create_task(opened.next_delta())
    await asyncio.sleep(0)
    state.on_update("d", update(REQUEST_ID, 1, ANSWER[1:], finish=LENGTH))
    assert (await asyncio.wait_for(waiting, 30)).is_last


async def test_the_time_to_the_first_chunk_is_that_of_what_is_sent_first() -> None:
    clock = ManualClock(10.0)
    span = RequestSpan(
        TracerProvider(shutdown_on_exit=False).get_tracer("test"), CLIENT_REQUEST, Context(), 9.0, RECENT
    )
    opened = OpenRequest([make_state([], clock)], span, clock, OutputPace(clock))
    for _ in range(2):
        opened.mark_sent()
        clock.advance(5.0)
    shown = trace.get_current_span(span.context)
    assert isinstance(shown, ReadableSpan)
    assert dict(shown.attributes or {})["gen_ai.response.time_to_first_chunk"] == 1.0


async def test_of_several_choices_each_has_its_turn_before_tokens_gather_again() -> None:
    states = [make_state([], ManualClock()) for _ in range(3)]
    for state in states[1:]:
        state.has_output = states[0].has_output
    clock = ManualClock()
    pace = OutputPace(clock)
    pace.hold_s = 3600.0
    span = RequestSpan(NoOpTracerProvider().get_tracer("test"), CLIENT_REQUEST, Context(), 0.0, RECENT)
    opened = OpenRequest(states, span, clock, pace)
    for state in states:
        state.grant(PLACEMENT)
        state.start()
        state.on_update("p", update(REQUEST_ID, 0, ANSWER[:1]))
    first = [await asyncio.wait_for(opened.next_delta(), 30) for _ in range(3)]
    assert [delta.choice for delta in first] == [0, 1, 2]
    waiting = asyncio.create_task(opened.next_delta())
    for state in states:
        state.on_update("d", update(REQUEST_ID, 1, ANSWER[1:2]))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done(), "their next ones gather"
    waiting.cancel()


async def test_an_answer_that_has_ended_is_not_held_up() -> None:
    state = make_state([], ManualClock())
    opened = open_alone(state, hold_s=3600.0)
    state.grant(PLACEMENT)
    state.start()
    state.on_update("p", update(REQUEST_ID, 0, ANSWER[:1]))
    await opened.next_delta()
    state.on_update("d", update(REQUEST_ID, 1, ANSWER[1:], finish=LENGTH))
    await asyncio.sleep(0)
    assert (await asyncio.wait_for(opened.next_delta(), 30)).is_last
