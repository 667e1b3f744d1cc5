"""`/v1/responses`: create, retrieve and delete."""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from weir.core.errors import FieldViolation, InvalidRequest, NotFound, WeirError
from weir.core.life import FinishReason
from weir_gateway.access import Caller
from weir_gateway.answers.events import (
    AnswerEvent,
    ContentText,
    ReasoningText,
    ToolArguments,
    ToolCallBegan,
    ToolCallEnded,
)
from weir_gateway.driving.open_request import OpenRequest
from weir_gateway.frontends.answering import Answering
from weir_gateway.frontends.bodies.checks import shown
from weir_gateway.frontends.http_app import CallerRoute
from weir_gateway.frontends.http_body import BodyReader
from weir_gateway.frontends.http_keys import key_of
from weir_gateway.frontends.json_parts import MAX_INLINE_ENTRIES, dump_in_parts
from weir_gateway.frontends.openai.messages import Turn
from weir_gateway.frontends.openai.render import Json, LogprobsRenderer
from weir_gateway.frontends.openai.schema import parse_body
from weir_gateway.frontends.responses.items import AnswerItems, turn_of
from weir_gateway.frontends.responses.render import ResponseEvents, ResponseHead, ResponseState, TokenCounts, kept
from weir_gateway.frontends.responses.schema import AskedResponse, ResponsesBody, asked_response
from weir_gateway.frontends.responses.store import KeptResponse, ResponseStore
from weir_gateway.input_processor import InputProcessor
from weir_gateway.requests.output import OutputDelta

_JSON = "application/json"
_PREVIOUS = "previous_response_id"
_RenderedT = TypeVar("_RenderedT")


class ResponsesApi:
    """Handlers for callers that are known. They raise WeirError, and BadBody. `store` None: no answer is kept."""

    def __init__(
        self, processor: InputProcessor, bodies: BodyReader, answering: Answering, store: ResponseStore | None
    ) -> None:
        self._processor = processor
        self._bodies = bodies
        self._answering = answering
        self._store = store

    def routes(self) -> Sequence[CallerRoute]:
        return (
            ("POST", "/v1/responses", self.create),
            ("GET", "/v1/responses/{response_id}", self.retrieve),
            ("DELETE", "/v1/responses/{response_id}", self.delete),
        )

    async def create(self, request: Request, caller: Caller) -> Response:
        self._processor.check_room(caller, key_of(request.headers))
        unknown_fields = self._answering.unknown_fields
        asked = await self._bodies.read(
            request, caller, lambda raw: asked_response(parse_body(ResponsesBody, raw), unknown_fields)
        )
        previous = await self._previous_turns(asked, caller)
        store = self._store if asked.is_to_be_kept else None
        return await self._answering.answer(
            request,
            caller,
            asked.client_request(previous, request.state.correlation_id),
            asked.ignored_fields,
            partial(_Answer, asked, (*previous, *asked.turns), caller.tenant, store),
        )

    async def retrieve(self, request: Request, caller: Caller) -> Response:
        if request.query_params.get("stream", "false") == "true":
            problem = "is not served: what is kept of an answer is the whole of it; leave it out"
            raise InvalidRequest([FieldViolation("stream", problem)])
        return Response((await self._kept(request, caller)).response, media_type=_JSON)

    async def delete(self, request: Request, caller: Caller) -> Response:
        response_id = request.path_params["response_id"]
        if self._store is None or not await self._store.delete(caller.tenant, response_id):
            raise _not_found("response_id", response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def _kept(self, request: Request, caller: Caller) -> KeptResponse:
        """Raises NotFound, Unavailable."""
        response_id = request.path_params["response_id"]
        found = None if self._store is None else await self._store.try_get(caller.tenant, response_id)
        if found is None:
            raise _not_found("response_id", response_id)
        return found

    async def _previous_turns(self, asked: AskedResponse, caller: Caller) -> tuple[Turn, ...]:
        """Raises InvalidRequest without a store, NotFound, Unavailable."""
        previous_id = asked.body.previous_response_id
        if previous_id is None:
            return ()
        if self._store is None:
            problem = "is not served: this gateway keeps no answers; give the turns themselves in input"
            raise InvalidRequest([FieldViolation(_PREVIOUS, problem)])
        found = await self._store.try_get(caller.tenant, previous_id)
        if found is None:
            raise _not_found(_PREVIOUS, previous_id)
        return found.turns


class _Answer:
    """An `AnswerForm`. `turns`: the conversation before the answer; `store` None: it is not to be kept."""

    def __init__(
        self,
        asked: AskedResponse,
        turns: tuple[Turn, ...],
        tenant: str,
        store: ResponseStore | None,
        opened: OpenRequest,
    ) -> None:
        self._opened = opened
        self._turns = turns
        self._tenant = tenant
        self._store = store
        checked = opened.checked
        self._head = ResponseHead(
            request_id=opened.request_id,
            created_unix_s=int(time.time()),
            model=checked.model.name,
            temperature=checked.sampling.temperature,
            top_p=checked.sampling.top_p,
            asked=asked,
        )
        self._events = ResponseEvents(self._head)
        self._logprobs = LogprobsRenderer(checked.model.tokenizer.token_bytes)
        self._has_parts = opened.states[0].output.has_parts
        self._items = AnswerItems(opened.call_ids()[0], has_message=not self._has_parts)
        self._entries: list[Json] = []
        """Of log-probabilities, one a token."""
        self._num_entries = 0
        """All that there will be; once the answer is complete."""
        self._finish_reason: FinishReason | None = None

    async def whole(self, output: OutputDelta) -> bytes:
        self._num_entries = len(output.logprobs)
        await self._rendered(partial(self._take, output))
        end, content = await self._end()
        return await self._rendered(partial(self._json, end)) if content is None else content

    def opening(self) -> bytes:
        return self._events.opening(is_kept=self._store is not None, has_message=not self._has_parts)

    def delta(self, delta: OutputDelta) -> bytes:
        entries = self._note(delta)
        if delta.events is not None:
            return b"".join(self._reasoning(event) + self._event(event, entries) for event in delta.events)
        self._items.add_text(delta.text)
        return self._events.delta(delta.text, entries) if delta.text or entries else b""

    def _reasoning(self, event: AnswerEvent | None) -> bytes:
        """What an event means for the item of reasoning. None: the answer's end."""
        was_open = self._items.open_reasoning
        if not isinstance(event, ReasoningText):
            return b"" if was_open is None else self._events.reasoning_ended(was_open)
        item = self._items.add_reasoning(event.text)
        began = self._events.reasoning_began(item) if was_open is None else b""
        return began + self._events.reasoning_delta(item, event.text)

    def _event(self, event: AnswerEvent, entries: Sequence[Json]) -> bytes:
        if isinstance(event, ReasoningText):
            return b""
        had_message = self._items.message_index is not None
        call = self._items.take(event)
        match event:
            case ContentText(text):
                began = b"" if had_message else self._events.message_began(self._items.message_index or 0)
                return began + self._events.delta(text, entries)
            case ToolCallBegan() if call is not None:
                return self._events.call_began(call)
            case ToolArguments(_, text) if call is not None:
                return self._events.call_arguments(call, text)
            case ToolCallEnded() if call is not None:
                return self._events.call_ended(call)
            case _:
                return b""

    async def closing(self) -> bytes:
        self._num_entries = len(self._entries)
        ended = self._reasoning(None)
        began = b"" if self._items.num_items else self._events.message_began(0)
        end, _ = await self._end()
        return ended + began + await self._rendered(partial(self._events.closing, end))

    def failure(self, error: WeirError) -> bytes:
        return self._events.failure(error)

    def _take(self, output: OutputDelta) -> None:
        """All of it."""
        self._note(output)
        if output.events is None:
            self._items.add_text(output.text)
        for event in output.events or ():
            self._items.take(event)

    def _note(self, delta: OutputDelta) -> list[Json]:
        """The entries of its log-probabilities."""
        entries: list[Json] = self._logprobs.chat_json(delta.logprobs)["content"] if delta.logprobs else []
        self._entries += entries
        self._finish_reason = delta.finish_reason
        return entries

    async def _end(self) -> tuple[ResponseState, bytes | None]:
        """With the JSON of it, where it is kept."""
        opened = self._opened
        counts = TokenCounts(
            opened.num_prompt_tokens, opened.num_cached_tokens, opened.num_output_tokens, opened.num_reasoning_tokens
        )
        self._items.need_item()
        return await self._kept(ResponseState.ended(self._finish_reason, self._items, self._entries, counts))

    async def _kept(self, state: ResponseState) -> tuple[ResponseState, bytes | None]:
        """Before its client knows of the end, so that it can go on from it at any gateway."""
        if self._store is None:
            return state, None
        as_kept = kept(state)
        turns = (*self._turns, turn_of(state.text, state.calls, state.reasonings))
        content = await self._rendered(partial(self._json, as_kept))
        is_kept = await self._store.try_keep(self._tenant, self._head.response_id, content, turns)
        return (as_kept, content) if is_kept else (state, None)

    def _json(self, state: ResponseState) -> bytes:
        return dump_in_parts(self._head.response(state)).encode()

    async def _rendered(self, render: Callable[[], _RenderedT]) -> _RenderedT:
        """In a thread where it is long."""
        num_top = self._head.asked.body.top_logprobs or 0
        is_short = self._num_entries * (1 + num_top) <= MAX_INLINE_ENTRIES
        return render() if is_short else await asyncio.to_thread(render)


def _not_found(field: str, response_id: str) -> NotFound:
    return NotFound(
        field, f"{field}: no answer {shown(response_id)!r} is kept; it may have expired, or been sent with store: false"
    )
