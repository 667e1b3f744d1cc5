"""`/v1/messages` and `/v1/messages/count_tokens`."""

from collections.abc import Sequence
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from weir.core.errors import WeirError
from weir.core.life import FinishReason
from weir_gateway.access import Caller
from weir_gateway.driving.open_request import OpenRequest
from weir_gateway.frontends.answering import Answering
from weir_gateway.frontends.anthropic.blocks import BlockEvents, content_blocks
from weir_gateway.frontends.anthropic.render import MessageEnd, MessageRenderer, MessageUsage
from weir_gateway.frontends.anthropic.schema import CountTokensBody, MessagesBody, count_request, messages_request
from weir_gateway.frontends.bodies.unknown_fields import IGNORED_HEADER, ignored_header
from weir_gateway.frontends.error_forms import ANTHROPIC_ID_HEADER, MESSAGES_PATH
from weir_gateway.frontends.http_app import CallerRoute
from weir_gateway.frontends.http_body import BodyReader
from weir_gateway.frontends.http_keys import key_of
from weir_gateway.frontends.json_parts import dump
from weir_gateway.frontends.openai.render import Json
from weir_gateway.frontends.openai.schema import parse_body
from weir_gateway.input_processor import InputProcessor
from weir_gateway.requests.output import OutputDelta


class MessagesApi:
    """Handlers for callers that are known. They raise WeirError, and BadBody."""

    def __init__(self, processor: InputProcessor, bodies: BodyReader, answering: Answering) -> None:
        self._processor = processor
        self._bodies = bodies
        self._answering = answering

    def routes(self) -> Sequence[CallerRoute]:
        return (("POST", MESSAGES_PATH, self.create), ("POST", f"{MESSAGES_PATH}/count_tokens", self.count_tokens))

    async def create(self, request: Request, caller: Caller) -> Response:
        self._processor.check_room(caller, key_of(request.headers))
        correlation_id = request.state.correlation_id
        unknown_fields = self._answering.unknown_fields
        asked = await self._bodies.read(
            request, caller, lambda raw: messages_request(parse_body(MessagesBody, raw), correlation_id, unknown_fields)
        )
        response = await self._answering.answer(request, caller, asked.client_request, asked.ignored_fields, _Answer)
        response.headers[ANTHROPIC_ID_HEADER] = correlation_id
        return response

    async def count_tokens(self, request: Request, caller: Caller) -> Response:
        tokenization = self._processor.tokenization
        tokenization.check_room(caller)
        unknown_fields = self._answering.unknown_fields
        asked = await self._bodies.read(
            request, caller, lambda raw: count_request(parse_body(CountTokensBody, raw), unknown_fields)
        )
        num_tokens = await tokenization.tokenize(asked.request, caller, lambda _, token_ids: len(token_ids))
        headers = {ANTHROPIC_ID_HEADER: request.state.correlation_id}
        if asked.ignored_fields:
            headers[IGNORED_HEADER] = ignored_header(asked.ignored_fields)
        return JSONResponse({"input_tokens": num_tokens}, headers=headers)


class _Answer:
    """An `AnswerForm`."""

    def __init__(self, opened: OpenRequest) -> None:
        self._opened = opened
        checked = opened.checked
        self._renderer = MessageRenderer(opened.request_id, checked.model.name, checked.client_request.correlation_id)
        self._texts = self._renderer.texts()
        self._ids = replace(opened.call_ids()[0], prefix="toolu_")
        self._blocks = BlockEvents(self._ids) if opened.states[0].output.has_parts else None
        """None: the answer is one block of text."""
        self._finish_reason: FinishReason | None = None

    async def whole(self, output: OutputDelta) -> bytes:
        self._finish_reason = output.finish_reason
        content: list[Json] = [{"type": "text", "text": output.text}]
        if output.events is not None:
            content = content_blocks(output.events, self._ids)
        return dump(self._renderer.whole(content, self._end(), self._usage())).encode()

    def opening(self) -> bytes:
        usage = MessageUsage(self._opened.num_prompt_tokens, self._opened.num_cached_tokens)
        return self._renderer.opening(usage, has_text=self._blocks is None)

    def delta(self, delta: OutputDelta) -> bytes:
        self._finish_reason = delta.finish_reason
        if self._blocks is not None:
            return self._blocks.events(delta.events or ())
        return self._texts.event(delta.text) if delta.text else b""

    async def closing(self) -> bytes:
        closing = self._renderer.closing(self._end(), self._usage(), has_text=self._blocks is None)
        return closing if self._blocks is None else self._blocks.closing() + closing

    def failure(self, error: WeirError) -> bytes:
        return self._renderer.failure(error)

    def _end(self) -> MessageEnd:
        output = self._opened.states[0].output
        return MessageEnd(self._finish_reason, output.matched_stop, output.ends_with_calls)

    def _usage(self) -> MessageUsage:
        opened = self._opened
        return MessageUsage(opened.num_prompt_tokens, opened.num_cached_tokens, opened.num_output_tokens)
