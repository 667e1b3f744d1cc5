"""One line of a batch, answered as its tenant's request over HTTP would be, in the lane for batches."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace

from opentelemetry.context import Context

from weir.core.errors import Overloaded, WeirError
from weir_gateway.access import Caller
from weir_gateway.batches.records import ClaimedLine, LineResult
from weir_gateway.batches.results import answered
from weir_gateway.frontends.bodies.unknown_fields import UnknownFields
from weir_gateway.frontends.http_body import MAX_INLINE_BYTES
from weir_gateway.frontends.openai.render import AnswerRenderer, error_body, error_status
from weir_gateway.frontends.openai.schema import (
    AskedAnswer,
    ChatBody,
    CompletionBody,
    chat_request,
    completion_request,
    parse_body,
)
from weir_gateway.frontends.openai.whole_answer import whole_answer
from weir_gateway.input_processor import InputProcessor
from weir_gateway.keys.keyed_requests import KeyedRequests

_BATCH_LANE = "batch"
_CANCELLED = 499


@dataclass(frozen=True, slots=True)
class LineAnswerer:
    """Through the pipeline of the gateway's other requests, with all its limits."""

    processor: InputProcessor
    keys: KeyedRequests
    caller_of: Callable[[str], Caller]
    unknown_fields: UnknownFields

    async def answer(self, line: ClaimedLine) -> LineResult:
        """Raises WeirError for what another try may mend; what is wrong with the line is its result."""
        try:
            caller = self.caller_of(line.tenant)
            asked = await self.processor.threads.run(
                caller, lambda: _asked(line, self.unknown_fields), is_short=len(line.body) <= MAX_INLINE_BYTES
            )
            request_id, body = await self._answer(line, asked, caller)
        except WeirError as error:
            if isinstance(error, Overloaded) or error_status(error) >= _CANCELLED:
                raise
            return self.failed(line, error)
        return answered(line, 200, request_id, body)

    def failed(self, line: ClaimedLine, error: WeirError) -> LineResult:
        """What a client of HTTP would read."""
        return answered(line, error_status(error), "", json.dumps(error_body(error)).encode())

    def drop(self, line: ClaimedLine) -> None:
        """What is kept of it, or still runs, for somebody who comes back."""
        self.keys.drop(line.tenant, _key_of(line))

    async def _answer(self, line: ClaimedLine, asked: AskedAnswer, caller: Caller) -> tuple[str, bytes]:
        """A lane or a priority of the line's own are no matter: a batch waits behind what somebody waits for."""
        options = replace(asked.client_request.options, lane=lane_of(caller))
        self.processor.models.find(options.model, asked.client_request.names["model"])
        if asked.client_request.num_prompts == 1 and options.n in (None, 1):
            # Where the gateway dies amid the answer, the next one goes on with it.
            options = replace(options, idempotency_key=_key_of(line))
        request = replace(asked.client_request, options=options, priority=None, is_stream=False)
        opened = await self.processor.open(request, caller, Context(), None)
        try:
            body = await whole_answer(opened, AnswerRenderer(opened, asked.rendering))
        except BaseException:
            opened.leave()
            raise
        return opened.request_id, body


def lane_of(caller: Caller) -> str:
    """The least urgent one of a tenant that may not use the lane for batches, or where there is none."""
    return _BATCH_LANE if _BATCH_LANE in caller.lanes else caller.lanes[-1]


def _asked(line: ClaimedLine, unknown_fields: UnknownFields) -> AskedAnswer:
    """Raises InvalidRequest."""
    raw, correlation_id = line.body.encode(), line.batch_id
    if line.endpoint == "/v1/chat/completions":
        return chat_request(parse_body(ChatBody, raw), correlation_id, unknown_fields)
    return completion_request(parse_body(CompletionBody, raw), correlation_id, unknown_fields)


def _key_of(line: ClaimedLine) -> str:
    return f"weir/{line.batch_id}/{line.number}"
