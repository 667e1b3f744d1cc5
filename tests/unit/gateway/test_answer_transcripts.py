"""Whole streams of the Responses API and of Anthropic's, byte for byte, and that the clients' own types hold them."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from weir.core.errors import InternalError, Overloaded, Unavailable, WeirError
from weir.core.life import FinishReason
from weir_gateway.frontends.anthropic.render import MessageEnd, MessageRenderer, MessageUsage
from weir_gateway.frontends.openai.render import Json
from weir_gateway.frontends.responses.items import AnswerItems
from weir_gateway.frontends.responses.render import (
    ResponseEvents,
    ResponseHead,
    ResponseState,
    ResponseStatus,
    TokenCounts,
    kept,
)
from weir_gateway.frontends.responses.schema import ResponsesBody, asked_response
from weir_gateway.tools.call_ids import CallIds

TRANSCRIPTS = Path(__file__).parent / "transcripts"
REQUEST_ID = "0123456789abcdef0123456789abcdef"
COUNTS = TokenCounts(num_prompt=9, num_cached=3, num_output=2)
USAGE = MessageUsage(num_prompt=9, num_cached=3, num_output=2)
LOGPROB: Json = {"token": "hi", "logprob": -0.5, "bytes": [104, 105], "top_logprobs": []}
LOST = Unavailable("worker decode-0 is lost; 2 tokens were sent before")

OPENAI_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ANTHROPIC_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def head(**fields: object) -> ResponseHead:
    body = ResponsesBody.model_validate({"input": 'Say "hi"', **fields})
    return ResponseHead(REQUEST_ID, 1_700_000_000, "bytes", 0.5, 1.0, asked_response(body))


def items_of(text: str) -> AnswerItems:
    items = AnswerItems(CallIds(REQUEST_ID), has_message=True)
    items.add_text(text)
    return items


def completed_response() -> bytes:
    asked = head(instructions="Be brief.", max_output_tokens=16, metadata={"team": "a"})
    events = ResponseEvents(asked)
    state = ResponseState.ended(FinishReason.STOP, items_of('h"ï\n'), [], COUNTS)
    return events.opening(is_kept=True) + events.delta('h"', []) + events.delta("ï\n", []) + events.closing(kept(state))


def incomplete_response() -> bytes:
    events = ResponseEvents(head(include=["message.output_text.logprobs"], store=False))
    state = ResponseState.ended(FinishReason.LENGTH, items_of("hi"), [LOGPROB], COUNTS)
    return events.opening(is_kept=False) + events.delta("hi", [LOGPROB]) + events.closing(state)


def failed_response() -> bytes:
    events = ResponseEvents(head())
    return events.opening(is_kept=True) + events.delta("hi", []) + events.failure(LOST)


def message(end: MessageEnd) -> bytes:
    renderer = MessageRenderer(REQUEST_ID, "bytes", "correlation/1")
    texts = renderer.texts()
    opening = renderer.opening(MessageUsage(num_prompt=9, num_cached=3))
    return opening + texts.event('h"') + texts.event("ï\n") + renderer.closing(end, USAGE)


def stopped_message() -> bytes:
    return message(MessageEnd(FinishReason.STOP, "END"))


def cut_message() -> bytes:
    return message(MessageEnd(FinishReason.LENGTH, None))


def failed_message() -> bytes:
    renderer = MessageRenderer(REQUEST_ID, "bytes", "correlation/1")
    return renderer.opening(MessageUsage(9, 3)) + renderer.texts().event("hi") + renderer.failure(LOST)


RESPONSES = (completed_response, incomplete_response, failed_response)
MESSAGES = (stopped_message, cut_message, failed_message)


def events_of(stream: bytes) -> Iterator[Json]:
    """The data of each event, whose name must be its type."""
    for block in stream.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        event: Json = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        yield event


@pytest.mark.parametrize("make", [*RESPONSES, *MESSAGES], ids=lambda make: make.__name__)
def test_a_stream_is_the_one_that_is_written_down(make: Callable[[], bytes]) -> None:
    assert make().decode() == (TRANSCRIPTS / f"{make.__name__}.txt").read_text()


@pytest.mark.parametrize("make", RESPONSES, ids=lambda make: make.__name__)
def test_openais_types_hold_each_event_and_their_numbers_rise_from_0(make: Callable[[], bytes]) -> None:
    events = list(events_of(make()))
    for event in events:
        OPENAI_EVENT.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


@pytest.mark.parametrize("make", MESSAGES[:2], ids=lambda make: make.__name__)
def test_anthropics_types_hold_each_event(make: Callable[[], bytes]) -> None:
    for event in events_of(make()):
        if event["type"] != "ping":
            ANTHROPIC_EVENT.validate_python(event)


def test_openais_type_holds_a_whole_response() -> None:
    state = ResponseState.ended(FinishReason.LENGTH, items_of("hi"), [LOGPROB], COUNTS)
    response = Response.model_validate(head(max_output_tokens=2).response(state))
    assert (response.status, response.output_text) == ("incomplete", "hi")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.total_tokens) == (9, 11)


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (MessageEnd(FinishReason.STOP, None), ("end_turn", None)),
        (MessageEnd(FinishReason.STOP, "END"), ("stop_sequence", "END")),
        (MessageEnd(FinishReason.LENGTH, None), ("max_tokens", None)),
    ],
)
def test_anthropics_type_holds_a_whole_message(end: MessageEnd, expected: tuple[str, str | None]) -> None:
    renderer = MessageRenderer(REQUEST_ID, "bytes", "")
    whole = Message.model_validate(renderer.whole([{"type": "text", "text": "hi"}], end, USAGE))
    assert (whole.stop_reason, whole.stop_sequence) == expected
    assert whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0) == 9


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (LOST, "server_error"),
        (InternalError("a defect"), "server_error"),
        (Overloaded("full", retry_after_s=1), "rate_limit_exceeded"),
    ],
)
def test_a_failed_response_has_the_error_and_no_output(error: WeirError, code: str) -> None:
    failed = head().response(ResponseState(ResponseStatus.FAILED, error=error))
    assert (failed["status"], failed["output"], failed["error"]["code"]) == ("failed", [], code)
