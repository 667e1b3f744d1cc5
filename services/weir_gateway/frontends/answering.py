"""From a request in the gateway's own form to an HTTP answer in that of one API: whole, or as events.

    schema ─> ClientRequest ─> InputProcessor ─> OpenRequest ─> deltas ─> AnswerForm ─> one JSON object, or events

What an API is lies in its schema and its `AnswerForm`; all else is the same for each.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from weir.core.errors import FieldViolation, InternalError, InvalidRequest, WeirError
from weir.core.trace_context import extract
from weir_gateway.access import Caller
from weir_gateway.driving.open_request import OpenRequest
from weir_gateway.frontends.bodies.unknown_fields import IGNORED_HEADER, UnknownFields, ignored_header
from weir_gateway.frontends.event_stream import EventStream, StreamBroken, watched
from weir_gateway.frontends.http_keys import with_key
from weir_gateway.frontends.http_server import HttpSettings
from weir_gateway.frontends.openai.schema import HTTP_NAMES
from weir_gateway.input_processor import InputProcessor
from weir_gateway.requests.client_request import ClientRequest
from weir_gateway.requests.output import OutputDelta, joined

ReportDefect = Callable[[str, Exception, Mapping[str, str]], InternalError]
"""Logs and counts what nobody expected; returns what the client is told."""


class AnswerForm(Protocol):
    """One answer as the clients of one API read it. It has one choice."""

    async def whole(self, output: OutputDelta) -> bytes:
        """The answer that is not streamed, JSON. `output` is complete."""
        ...

    def opening(self) -> bytes:
        """What a stream begins with; sent with the first of its text."""
        ...

    def delta(self, delta: OutputDelta) -> bytes:
        """Empty: its client has no use for it."""
        ...

    async def closing(self) -> bytes:
        """After the last delta."""
        ...

    def failure(self, error: WeirError) -> bytes:
        """In place of all that would follow: no client may take the answer for a complete one."""
        ...


class Answering:
    """One for all APIs of the port that have an `AnswerForm`."""

    def __init__(self, processor: InputProcessor, settings: HttpSettings, report_defect: ReportDefect) -> None:
        self._processor = processor
        self._streams = settings.streams
        self._report_defect = report_defect
        self.unknown_fields: UnknownFields = settings.unknown_fields
        """What happens to those."""

    async def answer(
        self,
        request: Request,
        caller: Caller,
        asked: ClientRequest,
        ignored_fields: tuple[str, ...],
        make_form: Callable[[OpenRequest], AnswerForm],
    ) -> Response:
        """Raises WeirError until the first token: then an error still gets a status of its own. The body must have
        been read."""
        asked = _with_key(asked, request.headers)
        opened = await self._processor.open(asked, caller, extract(dict(request.headers)), None)
        try:
            form = make_form(opened)
            async with watched(request.receive, opened.leave):
                if asked.is_stream:
                    first = await self._try_first_delta(opened)
                else:
                    content = await form.whole(await _whole_output(opened))
                    response = Response(content, media_type="application/json")
        except BaseException:
            opened.leave()
            raise
        if asked.is_stream:
            events = self._events(opened, form, first)
            response = EventStream(events, opened.leave, self._streams, asked.log_ids, done=b"")
        if ignored_fields:
            response.headers[IGNORED_HEADER] = ignored_header(ignored_fields)
        return response

    async def _try_first_delta(self, opened: OpenRequest) -> OutputDelta | None:
        """None: it takes so long that others would take the connection for dead."""
        try:
            async with asyncio.timeout(self._streams.keep_alive_s or None):
                return await opened.next_delta()
        except TimeoutError:
            return None

    async def _events(self, opened: OpenRequest, form: AnswerForm, first: OutputDelta | None) -> AsyncIterator[bytes]:
        """Ends with StreamBroken after the events of a failure."""
        waiting: bytes | None = None
        try:
            delta = await opened.next_delta() if first is None else first
            waiting = form.opening()
            while True:
                if data := form.delta(delta):
                    yield waiting + data
                    waiting = b""
                    opened.mark_sent()
                if delta.is_last:
                    break
                delta = await opened.next_delta()
            end = await form.closing()
        except WeirError as error:
            failure = error
        except Exception as error:  # noqa: BLE001 - the boundary of one stream, whose status has been sent
            log_ids = opened.checked.client_request.log_ids
            failure = self._report_defect("the stream of an answer", error, log_ids)
        else:
            yield waiting + end
            return
        yield (form.opening() if waiting is None else waiting) + form.failure(failure)
        raise StreamBroken


async def _whole_output(opened: OpenRequest) -> OutputDelta:
    deltas = []
    while True:
        deltas.append(await opened.next_delta())
        if deltas[-1].is_last:
            break
    opened.leave()
    return joined(deltas)


def _with_key(asked: ClientRequest, headers: Mapping[str, str]) -> ClientRequest:
    """Events of these APIs have no ids that tell a token: an answer under a key is sent again whole, or not at all."""
    event_header = HTTP_NAMES["resume_from"]
    if event_header in headers:
        problem = "is not for events of this API, which are sent from the first one on; leave it out"
        raise InvalidRequest([FieldViolation(event_header, problem)])
    return with_key(asked, headers)
