"""The HTTP frontend: the part of OpenAI's API that Weir serves, so that its clients can be pointed here."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from weir.core.addresses import is_loopback
from weir.core.credentials import try_read_key
from weir.core.errors import InternalError, PermissionDenied, WeirError
from weir.core.trace_context import extract
from weir.rpc.access import Callers
from weir.rpc.body_budget import BodyBudget
from weir.telemetry.exposition import is_openmetrics
from weir_gateway.access import Caller
from weir_gateway.batches.jobs import BatchJobs
from weir_gateway.driving.open_request import OpenRequest
from weir_gateway.frontends.answering import Answering
from weir_gateway.frontends.anthropic.handlers import MessagesApi
from weir_gateway.frontends.batches.handlers import BatchesApi
from weir_gateway.frontends.bodies.unknown_fields import IGNORED_HEADER, ignored_header
from weir_gateway.frontends.console.api import ConsoleApi
from weir_gateway.frontends.console.files import console_files
from weir_gateway.frontends.correlation import correlation_of, mark
from weir_gateway.frontends.error_forms import error_form_of
from weir_gateway.frontends.event_stream import EventStream, StreamBroken, watched
from weir_gateway.frontends.http_access import http_callers_of
from weir_gateway.frontends.http_app import CallerRoute, Endpoint, Handler, HttpApp, with_caller
from weir_gateway.frontends.http_body import BadBody, BodyReader
from weir_gateway.frontends.http_keys import event_id_of, key_of, with_key
from weir_gateway.frontends.http_server import MAX_SHOWN_CHARS, HttpSettings
from weir_gateway.frontends.http_tools import HttpTools
from weir_gateway.frontends.openai.render import AnswerRenderer, error_body
from weir_gateway.frontends.openai.schema import (
    AskedAnswer,
    ChatBody,
    CompletionBody,
    chat_request,
    completion_request,
    parse_body,
)
from weir_gateway.frontends.openai.whole_answer import rendered, whole_answer
from weir_gateway.frontends.openapi.handlers import OpenApiDocuments
from weir_gateway.frontends.rate_limits import rate_limit_headers
from weir_gateway.frontends.recent_requests import RecentRequestsApi
from weir_gateway.frontends.responses.handlers import ResponsesApi
from weir_gateway.frontends.responses.store import ResponseStore
from weir_gateway.frontends.sse import DONE, ChunkEvents, event, events_in_parts
from weir_gateway.input_processor import InputProcessor
from weir_gateway.metrics.metrics_page import MetricsPage
from weir_gateway.requests.client_request import ClientRequest
from weir_gateway.requests.output import OutputDelta
from weir_gateway.requests.quota_book import QuotaBook
from weir_gateway.requests.request_end import shutting_down

logger = logging.getLogger(__name__)


class HttpFrontend:
    """Routes, and translates; `is_ready` decides what /health answers. `bodies` bounds those that are being read."""

    def __init__(
        self,
        processor: InputProcessor,
        settings: HttpSettings,
        is_ready: Callable[[], bool],
        bodies: BodyBudget,
        store: ResponseStore | None = None,
        jobs: BatchJobs | None = None,
        quotas: QuotaBook | None = None,
    ) -> None:
        self._processor = processor
        self._settings = settings
        self._is_ready = is_ready
        self._quotas = quotas
        self._bodies = BodyReader(settings, bodies, processor.threads)
        self._tools = HttpTools(processor, self._bodies)
        answering = Answering(processor, settings, self._internal_error)
        self._responses = ResponsesApi(processor, self._bodies, answering, store)
        self._batches = BatchesApi(self._bodies, jobs)
        self._messages = MessagesApi(processor, self._bodies, answering)
        self.num_internal_errors = 0

    def make_app(self, metrics: MetricsPage | None = None, console: ConsoleApi | None = None) -> HttpApp:
        """Who may ask for what is in `http_access`, and in no handler."""
        apis = (self._responses, self._messages, self._batches, self._tools)
        for_callers: list[CallerRoute] = [
            ("POST", "/v1/chat/completions", self._chat),
            ("POST", "/v1/completions", self._completions),
            *(route for api in apis for route in api.routes()),
        ]
        if metrics is not None:
            for_callers.append(("GET", "/metrics", partial(_metrics, metrics)))
        answers = [(method, path, with_caller(handler)) for method, path, handler in for_callers]
        recent = RecentRequestsApi(self._processor.spans.recent)
        answers += [
            ("GET", "/debug/requests", recent.list_requests),
            ("GET", "/debug/requests/{request_id:path}", recent.request),
            ("GET", "/health", _plain(self._health)),
            ("GET", "/ping", _plain(self._ping)),
            ("POST", "/ping", _plain(self._ping)),
        ]
        if console is not None:
            answers += [("GET", path, answer) for path, answer in console.routes()]
            answers += [("GET", path, _plain(make)) for path, make in console_files().items()]
        answers += OpenApiDocuments().routes()
        return HttpApp(
            [Route(path, self._endpoint(method, path, answer), methods=[method]) for method, path, answer in answers],
            _on_http_exception,
        )

    def _endpoint(self, method: str, path: str, answer: Handler) -> Endpoint:
        """For those callers that the table names."""
        match http_callers_of(method, path):
            case Callers.OPEN:
                return _open(answer)
            case Callers.TENANT:
                return self._answering(self._admit_tenant, answer)
            case Callers.OPERATOR:
                return self._answering(self._admit_operator, answer)
            case _:
                logger.error("%s %s: not in the table of who may call what (http_access.py); nobody may", method, path)
                return self._answering(_admit_nobody, answer)

    def _admit_tenant(self, request: Request) -> None:
        """Nothing is done, and no body read, for one that is not known. Raises Unauthenticated, Unavailable."""
        request.state.caller = self._processor.identify(_shown_key(request))

    def _admit_operator(self, request: Request) -> None:
        """Who may see every tenant's. Raises Unauthenticated, PermissionDenied, Unavailable."""
        is_from_here = request.client is not None and is_loopback(request.client.host) and not _is_forwarded(request)
        self._processor.access.check_operator(_shown_key(request), is_from_here=is_from_here)
        request.state.is_operator = True

    def _answering(self, admit: Callable[[Request], None], answer: Handler) -> Endpoint:
        """`admit` raises for who may not. Gives the request its id (`state.correlation_id`), and makes answers of
        errors."""

        async def handle(request: Request) -> Response:
            correlation = correlation_of(request.headers)
            correlation_id = request.state.correlation_id = correlation.correlation_id
            request.state.caller, request.state.is_operator = None, False
            try:
                admit(request)
                correlation.check()
                response = await answer(request)
            except WeirError as error:
                response = error_form_of(request.url.path).of_error(error, correlation_id)
                await self._pace_refusal(request)
            except BadBody as error:
                response = error_form_of(request.url.path).of_status(error.status, str(error), correlation_id)
                await self._pace_refusal(request)
            except ClientDisconnect:
                response = Response(status_code=499)  # nobody reads it
            except asyncio.CancelledError:  # by the server alone, at its end, after it has waited for a while
                response = error_form_of(request.url.path).of_error(shutting_down(), correlation_id)
            except Exception as error:  # noqa: BLE001 - the boundary of one HTTP request: logged, counted, answered
                what = f"{request.method} {request.url.path[:MAX_SHOWN_CHARS]}"
                internal = self._internal_error(what, error, {"correlation_id": correlation_id})
                response = error_form_of(request.url.path).of_error(internal, correlation_id)
            mark(response, correlation_id)
            if request.state.caller is not None:
                response.headers.update(self._quota_headers(request.url.path, request.state.caller))
            return response

        return Endpoint(handle)

    async def _pace_refusal(self, request: Request) -> None:
        """Where it could be in others' way. All who are not known are one, and no operator waits."""
        caller: Caller | None = request.state.caller
        if request.state.is_operator:
            return
        if caller is None or caller.has_peers:
            await self._processor.refusals.wait("" if caller is None else caller.tenant)

    def _quota_headers(self, path: str, caller: Caller) -> dict[str, str]:
        quota = None if self._quotas is None else self._quotas.try_quota(caller.tenant)
        return {} if quota is None else rate_limit_headers(path, quota, time.time)

    def _health(self) -> Response:
        is_ready = self._is_ready()
        return JSONResponse({"status": "ok" if is_ready else "not ready"}, 200 if is_ready else 503)

    def _ping(self) -> Response:
        return Response(status_code=200 if self._is_ready() else 503)

    async def _chat(self, request: Request, caller: Caller) -> Response:
        self._processor.check_room(caller, key_of(request.headers))
        correlation_id, unknown_fields = request.state.correlation_id, self._settings.unknown_fields

        def parse(raw: bytes) -> AskedAnswer:
            return chat_request(parse_body(ChatBody, raw), correlation_id, unknown_fields)

        return await self._answer(request, caller, await self._bodies.read(request, caller, parse))

    async def _completions(self, request: Request, caller: Caller) -> Response:
        self._processor.check_room(caller, key_of(request.headers))
        correlation_id, unknown_fields = request.state.correlation_id, self._settings.unknown_fields

        def parse(raw: bytes) -> AskedAnswer:
            return completion_request(parse_body(CompletionBody, raw), correlation_id, unknown_fields)

        return await self._answer(request, caller, await self._bodies.read(request, caller, parse))

    async def _answer(self, request: Request, caller: Caller, asked: AskedAnswer) -> Response:
        client_request = with_key(asked.client_request, request.headers)
        opened = await self._processor.open(client_request, caller, extract(dict(request.headers)), None)
        try:
            renderer = AnswerRenderer(opened, asked.rendering)
            async with watched(request.receive, opened.leave):
                if client_request.is_stream:
                    first = await self._try_first_delta(opened)
                else:
                    response: Response = _json_response(await whole_answer(opened, renderer))
        except BaseException:
            opened.leave()
            raise
        if client_request.is_stream:
            events = self._events(opened, renderer, client_request, first)
            response = EventStream(events, opened.leave, self._settings.streams, client_request.log_ids)
        if asked.ignored_fields:
            response.headers[IGNORED_HEADER] = ignored_header(asked.ignored_fields)
        return response

    async def _try_first_delta(self, opened: OpenRequest) -> OutputDelta | None:
        """Before it an error still gets a status of its own, unless that takes so long that others would take the
        connection for dead: then None."""
        try:
            async with asyncio.timeout(self._settings.streams.keep_alive_s or None):
                return await opened.next_delta()
        except TimeoutError:
            return None

    async def _events(
        self, opened: OpenRequest, renderer: AnswerRenderer, asked: ClientRequest, first: OutputDelta | None
    ) -> AsyncIterator[bytes]:
        """Ends with StreamBroken after the event of an error."""
        is_going_on = asked.options.resume_from is not None
        head = b"" if is_going_on else await _opening(renderer)
        chunks = ChunkEvents(renderer)
        num_chars = [state.output.num_skipped_chars for state in opened.states]
        try:
            delta = await opened.next_delta() if first is None else first
            while True:
                if (delta.shows_something or delta.logprobs or delta.finish_reason is not None) and not asked.had_end:
                    event_id = event_id_of(delta) if asked.options.idempotency_key else ""
                    yield head + chunks.event(delta, num_chars[delta.choice], event_id)
                    head = b""
                    num_chars[delta.choice] += len(delta.text)
                    opened.mark_sent()
                if delta.is_last:
                    break
                delta = await opened.next_delta()
        except WeirError as error:
            failure = error
        except Exception as error:  # noqa: BLE001 - the boundary of one stream, whose status has been sent
            failure = self._internal_error("the stream of an answer", error, asked.log_ids)
        else:
            yield b"".join(event(chunk) for chunk in renderer.closing()) + DONE
            return
        yield head + event(error_body(failure))
        raise StreamBroken

    def _internal_error(self, what: str, error: Exception, log_ids: Mapping[str, str]) -> InternalError:
        self.num_internal_errors += 1
        logger.error("%s failed", what, exc_info=error, extra=log_ids)
        return InternalError(f"internal error: {type(error).__name__}; see the gateway's log")


def _shown_key(request: Request) -> str | None:
    return try_read_key(request.headers.get("authorization", ""), request.headers.get("x-api-key", ""))


async def _opening(renderer: AnswerRenderer) -> bytes:
    return await rendered(lambda: events_in_parts(renderer.opening()), renderer.num_prompt_ids)


def _json_response(content: bytes) -> Response:
    return Response(content, media_type="application/json")


async def _metrics(page: MetricsPage, request: Request, caller: Caller) -> Response:
    """The same for every caller."""
    del caller
    made = await page.page(as_openmetrics=is_openmetrics(request.headers.get("accept", "")))
    return Response(made.content, headers={"Content-Type": made.content_type, "Cache-Control": "no-store"})


def _open(answer: Handler) -> Endpoint:
    """For anybody. What is asked with an id that cannot be taken over is answered all the same: probes have no use for
    an error."""

    async def handle(request: Request) -> Response:
        request.state.caller = None
        response = await answer(request)
        mark(response, correlation_of(request.headers).correlation_id)
        return response

    return Endpoint(handle)


def _is_forwarded(request: Request) -> bool:
    """By a proxy, which is here, for somebody who may not be."""
    return any(name in request.headers for name in ("forwarded", "x-forwarded-for", "x-real-ip", "via"))


def _admit_nobody(request: Request) -> None:
    path = request.url.path[:MAX_SHOWN_CHARS]
    raise PermissionDenied(f"{request.method} {path}: has no entry in the table of who may call what, so nobody may")


def _plain(make: Callable[[], Response]) -> Handler:
    """The same, whatever is asked."""

    async def answer(request: Request) -> Response:
        del request
        return make()

    return answer


def _on_http_exception(request: Request, error: HTTPException) -> Response:
    """No such path or method."""
    message = f"{request.method} {request.url.path[:MAX_SHOWN_CHARS]}: {error.detail}"
    correlation_id = correlation_of(request.headers).correlation_id
    response = error_form_of(request.url.path).of_status(error.status_code, message, correlation_id)
    response.headers.update(error.headers or {})
    mark(response, correlation_id)
    return response
