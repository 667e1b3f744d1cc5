"""The body of an HTTP request, read within bounds of size, time and memory."""

import asyncio

from starlette.requests import Request

from weir.rpc.port_guard import BodyBudget
from weir_gateway.frontends.http_server import HttpSettings


class BadBody(Exception):
    """The body cannot be read; answered with `status`."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class BodyReader:
    """`bodies` bounds those that are being read."""

    def __init__(self, settings: HttpSettings, bodies: BodyBudget) -> None:
        self._settings = settings
        self._bodies = bodies

    async def read(self, request: Request) -> bytes:
        """Raises BadBody, Overloaded while too many are being read, ClientDisconnect."""
        limit = self._settings.max_body_bytes
        too_large = BadBody(413, f"the body is larger than {limit} bytes")
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length) > limit:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                async for chunk in request.stream():
                    await self._bodies.take(len(chunk))
                    body += chunk
                    if len(body) > limit:
                        raise too_large
        except TimeoutError:
            raise BadBody(408, f"the body took longer than {self._settings.body_timeout_s:g} s") from None
        finally:
            self._bodies.give_back(len(body))
        return bytes(body)
