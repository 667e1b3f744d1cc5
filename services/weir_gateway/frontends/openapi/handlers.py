"""`GET /openapi.json` and `GET /docs`."""

import asyncio

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

import weir
from weir_gateway.frontends.http_app import Handler
from weir_gateway.frontends.json_parts import dump
from weir_gateway.frontends.openapi.document import openapi_document
from weir_gateway.frontends.openapi.page import CONTENT_SECURITY_POLICY, openapi_page


class OpenApiDocuments:
    """The description of the API, for programs and for people; rendered once, when first asked for."""

    def __init__(self) -> None:
        self._rendering: asyncio.Task[tuple[bytes, str]] | None = None

    def routes(self) -> list[tuple[str, str, Handler]]:
        return [("GET", "/openapi.json", self._document), ("GET", "/docs", self._page)]

    async def _document(self, request: Request) -> Response:
        del request
        document, _ = await self._rendered()
        return Response(document, media_type="application/json")

    async def _page(self, request: Request) -> Response:
        del request
        _, page = await self._rendered()
        return HTMLResponse(page, headers={"Content-Security-Policy": CONTENT_SECURITY_POLICY})

    async def _rendered(self) -> tuple[bytes, str]:
        """However many ask at once, and whoever of them leaves."""
        if self._rendering is None:
            self._rendering = asyncio.create_task(asyncio.to_thread(_render))  # takes a fifth of a second
        return await asyncio.shield(self._rendering)


def _render() -> tuple[bytes, str]:
    """For programs, and for people."""
    document = openapi_document(weir.__version__)
    return dump(document).encode(), openapi_page(document)
