"""The HTTP application: what finds an endpoint, and what it hands to it."""

from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from weir_gateway.frontends.http_app import Endpoint, HttpApp


class _Recorded(Response):
    """Remembers what it was to send with."""

    sends: list[Send]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.sends = [send]
        await super().__call__(scope, receive, send)


def _refuse(request: Request, error: HTTPException) -> Response:
    return JSONResponse({"path": request.url.path}, error.status_code, headers=error.headers)


async def _ask(app: HttpApp, method: str, path: str) -> tuple[list[Message], Send]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request"}

    scope: dict[str, Any] = {"type": "http", "method": method, "path": path, "headers": [], "server": ("here", 80)}
    await app(scope | {"query_string": b"", "scheme": "http"}, receive, send)
    return sent, send


async def test_a_response_sends_with_what_the_server_gave_and_nothing_around_it() -> None:
    response = _Recorded("here")

    async def handle(request: Request) -> Response:
        return response

    sent, send = await _ask(HttpApp([Route("/a", Endpoint(handle), methods=["GET"])], _refuse), "GET", "/a")
    assert response.sends == [send]
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]


async def test_what_there_is_no_endpoint_for_is_refused_in_the_form_that_was_given() -> None:
    async def handle(request: Request) -> Response:
        return PlainTextResponse("here")

    app = HttpApp([Route("/a", Endpoint(handle), methods=["POST"])], _refuse)
    unknown, _ = await _ask(app, "POST", "/b")
    wrong_method, _ = await _ask(app, "GET", "/a")
    assert (unknown[0]["status"], unknown[1]["body"]) == (404, b'{"path":"/b"}')
    assert (wrong_method[0]["status"], wrong_method[1]["body"]) == (405, b'{"path":"/a"}')
    assert (b"allow", b"POST") in wrong_method[0]["headers"]
