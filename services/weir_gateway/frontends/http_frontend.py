"""The HTTP frontend: the part of OpenAI's API that Weir serves, so that its clients can be pointed here."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from weir.core.credentials import try_read_key
from weir.core.errors import InternalError, WeirError
from weir.core.tasks import end_tasks
from weir.core.trace_context import extract
from weir.rpc.port_guard import BodyBudget
from weir_gateway.access import Caller
from weir_gateway.driving.open_request import OpenRequest
from weir_gateway.frontends.correlation import correlation_of, mark
from weir_gateway.frontends.http_app import Endpoint, HttpApp
from weir_gateway.frontends.http_body import BadBody, BodyReader
from weir_gateway.frontends.http_keys import event_id_of, key_of, with_key
from weir_gateway.frontends.http_metrics import is_on_this_machine, metrics_response
from weir_gateway.frontends.http_server import HttpSettings
from weir_gateway.frontends.http_tools import HttpTools
from weir_gateway.frontends.openai_render import (
    AnswerRenderer,
    error_body,
    error_headers,
    error_status,
)
from weir_gateway.frontends.openai_schema import (
    ChatBody,
    CommonBody,
    CompletionBody,
    chat_request,
    completion_request,
    parse_body,
)
from weir_gateway.frontends.send_watch import SendWatch
from weir_gateway.frontends.sse import DONE, ChunkEvents, event
from weir_gateway.input_processor import InputProcessor
from weir_gateway.metrics.metrics_page import MetricsPage
from weir_gateway.requests.client_request import ClientRequest
from weir_gateway.requests.output import OutputDelta, joined

logger = logging.getLogger(__name__)

_MAX_SHOWN_CHARS = 200

_Handler = Callable[[Request, Caller], Awaitable[Response]]
_NOBODY = Caller(tenant="", lanes=(), default_lane="", all_lanes=())


class HttpFrontend:
    """Routes, and translates; `is_ready` decides what /health answers. `bodies` bounds those that are being read."""

    def __init__(
        self, processor: InputProcessor, settings: HttpSettings, is_ready: Callable[[], bool], bodies: BodyBudget
    ) -> None:
        self._processor = processor
        self._settings = settings
        self._is_ready = is_ready
        self._bodies = BodyReader(settings, bodies)
        self._tools = HttpTools(processor, self._bodies)
        self.num_internal_errors = 0

    def make_app(self, metrics: MetricsPage | None = None) -> HttpApp:
        tools = self._tools
        for_callers: tuple[tuple[str, str, _Handler], ...] = (
            ("POST", "/v1/chat/completions", self._chat),
            ("POST", "/v1/completions", self._completions),
            ("GET", "/v1/models", tools.models),
            ("GET", "/v1/models/{model:path}", tools.model),
            ("POST", "/tokenize", tools.tokenize),
            ("POST", "/detokenize", tools.detokenize),
            ("GET", "/version", tools.version),
            ("GET", "/load", tools.load),
        )
        routes = [Route(path, self._guarded(handler), methods=[method]) for method, path, handler in for_callers]
        # For probes, which have no key, and nothing of any caller's is in the answers.
        routes.append(Route("/health", _open(self._health), methods=["GET"]))
        routes.append(Route("/ping", _open(self._ping), methods=["GET", "POST"]))
        if metrics is not None:
            answer = partial(metrics_response, metrics)
            routes.append(Route("/metrics", self._guarded(answer, is_on_this_machine), methods=["GET"]))
        return HttpApp(routes, _on_http_exception)

    def _guarded(self, handler: _Handler, is_open_to: Callable[[Request], bool] | None = None) -> Endpoint:
        """For callers that are known, and for whoever sends what `is_open_to`. Gives the request its id
        (`state.correlation_id`), and makes answers of errors."""

        async def handle(request: Request) -> Response:
            correlation = correlation_of(request.headers)
            correlation_id = request.state.correlation_id = correlation.correlation_id
            try:
                # Before the body is read: nothing is done for an unknown caller.
                is_open = is_open_to is not None and is_open_to(request)
                caller = _NOBODY if is_open else self._identify(request)
                correlation.check()
                response = await handler(request, caller)
            except WeirError as error:
                response = JSONResponse(error_body(error), error_status(error), headers=error_headers(error))
            except BadBody as error:
                response = JSONResponse(_plain_error(str(error), "invalid_request_error"), error.status)
            except ClientDisconnect:
                response = Response(status_code=499)  # nobody reads it
            except Exception as error:  # noqa: BLE001 - the boundary of one HTTP request: logged, counted, answered
                what = f"{request.method} {request.url.path[:_MAX_SHOWN_CHARS]}"
                internal = self._internal_error(what, error, {"correlation_id": correlation_id})
                response = JSONResponse(error_body(internal), 500)
            mark(response, correlation_id)
            return response

        return Endpoint(handle)

    def _identify(self, request: Request) -> Caller:
        """Raises Unauthenticated."""
        headers = request.headers
        return self._processor.identify(try_read_key(headers.get("authorization", ""), headers.get("x-api-key", "")))

    def _health(self) -> Response:
        is_ready = self._is_ready()
        return JSONResponse({"status": "ok" if is_ready else "not ready"}, 200 if is_ready else 503)

    def _ping(self) -> Response:
        return Response(status_code=200 if self._is_ready() else 503)

    async def _chat(self, request: Request, caller: Caller) -> Response:
        self._processor.check_room(caller, key_of(request.headers))
        body = parse_body(ChatBody, await self._bodies.read(request))
        asked = with_key(chat_request(body, request.state.correlation_id), request.headers)
        return await self._answer(request, caller, asked, body)

    async def _completions(self, request: Request, caller: Caller) -> Response:
        self._processor.check_room(caller, key_of(request.headers))
        body = parse_body(CompletionBody, await self._bodies.read(request))
        asked = with_key(completion_request(body, request.state.correlation_id), request.headers)
        return await self._answer(request, caller, asked, body)

    async def _answer(
        self, request: Request, caller: Caller, client_request: ClientRequest, body: CommonBody
    ) -> Response:
        opened = await self._processor.open(client_request, caller, extract(dict(request.headers)), None)
        try:
            renderer = AnswerRenderer(opened, includes_usage=body.includes_usage)
            async with _watched(request.receive, opened.leave):
                if not client_request.is_stream:
                    return JSONResponse(await _whole_answer(opened, renderer))
                # Before the first delta an error still gets a status of its own.
                first = await opened.next_delta()
        except BaseException:
            opened.leave()
            raise
        events = self._events(opened, renderer, client_request, first)
        return EventStream(
            events, opened.leave, send_timeout_s=self._settings.send_timeout_s, log_ids=client_request.log_ids
        )

    async def _events(
        self, opened: OpenRequest, renderer: AnswerRenderer, asked: ClientRequest, first: OutputDelta
    ) -> AsyncIterator[bytes]:
        """After an error comes an error event, and the end of the stream is seen in either case."""
        is_going_on = asked.options.resume_from is not None
        head = b"" if is_going_on else b"".join(event(chunk) for chunk in renderer.opening())
        chunks = ChunkEvents(renderer)
        num_chars = [state.output.num_skipped_chars for state in opened.states]
        delta = first
        try:
            while True:
                if (delta.text or delta.logprobs or delta.finish_reason is not None) and not asked.had_end:
                    event_id = event_id_of(delta) if asked.options.idempotency_key else ""
                    yield head + chunks.event(delta, num_chars[delta.choice], event_id)
                    head = b""
                    num_chars[delta.choice] += len(delta.text)
                    opened.mark_sent()
                if delta.is_last:
                    break
                delta = await opened.next_delta()
        except WeirError as error:
            yield head + event(error_body(error)) + DONE
            return
        except Exception as error:  # noqa: BLE001 - the boundary of one stream, whose status has been sent
            internal = self._internal_error("the stream of an answer", error, asked.log_ids)
            yield head + event(error_body(internal)) + DONE
            return
        yield b"".join(event(chunk) for chunk in renderer.closing()) + DONE

    def _internal_error(self, what: str, error: Exception, log_ids: Mapping[str, str]) -> InternalError:
        self.num_internal_errors += 1
        logger.error("%s failed", what, exc_info=error, extra=log_ids)
        return InternalError(f"internal error: {type(error).__name__}; see the gateway's log")


async def _whole_answer(opened: OpenRequest, renderer: AnswerRenderer) -> dict[str, Any]:
    deltas: list[list[OutputDelta]] = [[] for _ in opened.states]
    while True:
        delta = await opened.next_delta()
        deltas[delta.choice].append(delta)
        if delta.is_last:
            break
    opened.leave()
    return renderer.whole([joined(choice) for choice in deltas])


@contextlib.asynccontextmanager
async def _watched(receive: Receive, on_disconnect: Callable[[], None]) -> AsyncIterator[None]:
    """Calls `on_disconnect` when the client goes away. The request's body must have been read."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        on_disconnect()

    watching = asyncio.create_task(watch())
    try:
        yield
    finally:
        await end_tasks([watching])


class EventStream(Response):
    """Sends what `events` yields, under the connection's flow control. `leave` is called at the end, however it comes.

    A client that does not read for `send_timeout_s` is given up: its connection is closed.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        leave: Callable[[], None],
        *,
        send_timeout_s: float,
        log_ids: Mapping[str, str],
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._leave = leave
        self._send_timeout_s = send_timeout_s
        self._log_ids = log_ids

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as giving_up, _watched(receive, self._leave):
                watch = SendWatch(self._send_timeout_s, lambda: giving_up.reschedule(loop.time()))
                with contextlib.closing(watch):
                    await _in_own_task(self._send_all(send, watch))
        except TimeoutError:
            # Returning before the body's end makes the server close the connection.
            message = "a client has not read its stream for %g s and is given up"
            logger.warning(message, self._send_timeout_s, extra=self._log_ids)
        finally:
            self._leave()

    async def _send_all(self, send: Send, watch: SendWatch) -> None:
        watch.begin()
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        watch.end()
        async for data in self._events:
            watch.begin()
            await send({"type": "http.response.body", "body": data, "more_body": True})
            watch.end()
        watch.begin()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        watch.end()


async def _in_own_task(work: Coroutine[Any, Any, None]) -> None:
    """What wakes up for each token resumes its own few frames, and not those of all who called it."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait([task])
    finally:
        await end_tasks([task])
    task.result()


def _plain_error(message: str, kind: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def _open(answer: Callable[[], Response]) -> Endpoint:
    """For anybody. What is asked with an id that cannot be taken over is answered all the same: probes have no use for
    an error."""

    async def handle(request: Request) -> Response:
        response = answer()
        mark(response, correlation_of(request.headers).correlation_id)
        return response

    return Endpoint(handle)


def _on_http_exception(request: Request, error: HTTPException) -> Response:
    """No such path or method."""
    message = f"{request.method} {request.url.path[:_MAX_SHOWN_CHARS]}: {error.detail}"
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    response = JSONResponse(_plain_error(message, kind), error.status_code, headers=error.headers)
    mark(response, correlation_of(request.headers).correlation_id)
    return response
