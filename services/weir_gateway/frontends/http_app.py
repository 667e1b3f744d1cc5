"""The HTTP application: Starlette's router, and what is asked of it without Starlette's middleware.

    uvicorn ─> HttpApp ─> Router ─> Route ─> Endpoint ─> response ─> uvicorn's own `send`

A `Starlette` puts three wrappers around `send`, which each message of each stream would pass.
"""

from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route, Router
from starlette.types import Receive, Scope, Send

from weir.core.errors import PermissionDenied
from weir_gateway.access import Caller

CallerHandler = Callable[[Request, Caller], Awaitable[Response]]
"""For callers that are known. Raises WeirError, and BadBody."""

CallerRoute = tuple[str, str, CallerHandler]
"""Method, path, and who answers it."""

Handler = Callable[[Request], Awaitable[Response]]
"""For whoever was let in. Raises WeirError, and BadBody."""


def with_caller(handler: CallerHandler) -> Handler:
    """`handler` for requests of which it is known who sent them; it answers no others."""

    async def answer(request: Request) -> Response:
        caller = request.state.caller
        if caller is None:
            raise PermissionDenied(f"{request.url.path[:200]}: is for tenants, and nobody asked who sends this")
        return await handler(request, caller)

    return answer


class Endpoint:
    """Answers the requests of one route. An object, since Starlette wraps what is a function."""

    def __init__(self, handle: Callable[[Request], Awaitable[Response]]) -> None:
        """`handle` makes answers of its errors; what it raises is a defect, which the server logs and answers."""
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._handle(Request(scope, receive, send))
        await response(scope, receive, send)


class HttpApp:
    """Finds the endpoint of a request. `refuse` makes the answer where there is none, or none for its method."""

    def __init__(self, routes: Sequence[BaseRoute], refuse: Callable[[Request, HTTPException], Response]) -> None:
        self.routes = tuple(routes)
        self._router = Router(routes, redirect_slashes=False)  # redirects would pass by `refuse`
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # else the router answers by itself, in plain text
        try:
            await self._router(scope, receive, send)
        except HTTPException as error:
            if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
                error = HTTPException(error.status_code, headers={"Allow": ", ".join(self._methods_at(scope))})
            await self._refuse(Request(scope), error)(scope, receive, send)

    def _methods_at(self, scope: Scope) -> list[str]:
        """Of all routes with this path; the router names those of the first one."""
        at_path = [
            route for route in self.routes if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE
        ]
        return sorted({method for route in at_path for method in route.methods or ()})
