"""The body of an HTTP request, read and understood within bounds of size, time and memory."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar
from weakref import WeakValueDictionary

from starlette.requests import ClientDisconnect, Request

from weir.core.errors import InvalidRequest
from weir.core.shares import Holder, SharedRoom
from weir.rpc.body_budget import BodyBudget
from weir_gateway.access import Caller
from weir_gateway.frontends.event_stream import watched
from weir_gateway.frontends.http_server import HttpSettings
from weir_gateway.tenant_threads import TenantThreads

MAX_INLINE_BYTES = 64 << 10
"""Of a body that the event loop makes an object of."""
_RECEIVING_S_PER_BYTE = 4e-9
"""Of the event loop's time, roughly: 17 ms for 4 MiB."""
_SURE_BODIES = 2
"""So many of a tenant may be read whatever its share."""

_AskedT = TypeVar("_AskedT")


class BadBody(Exception):
    """The body cannot be read; answered with `status`."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class BodyReader:
    """`bodies` bounds the bytes of those that are being read, and their number is half of the connections that ask: the
    other half is there for requests that were read. Of both a tenant has no more than its share."""

    def __init__(self, settings: HttpSettings, bodies: BodyBudget, threads: TenantThreads) -> None:
        self._settings = settings
        self._bodies = bodies
        self._threads = threads
        self._turns = PieceTurns(threads)
        self._reading = SharedRoom(
            max(1, settings.max_connections // 2), _SURE_BODIES, "places for bodies that this port reads at once"
        )

    async def read(self, request: Request, caller: Caller, parse: Callable[[bytes], _AskedT]) -> _AskedT:
        """What `parse` makes of it; of a large one in a thread, in the tenant's turn. Raises what it raises, BadBody,
        Overloaded while too many are being read, QuotaExceeded where the tenant's own are too many, ClientDisconnect.
        """
        with self._reading.held(caller, 1):
            async with self._received(request, caller) as raw:
                return parse(raw) if len(raw) <= MAX_INLINE_BYTES else await self._in_turn(request, caller, raw, parse)

    async def _in_turn(
        self, request: Request, caller: Caller, raw: bytes, parse: Callable[[bytes], _AskedT]
    ) -> _AskedT:
        """It waits no longer than its client is there."""
        parsing = asyncio.create_task(self._threads.run(caller, lambda: parse(raw), is_short=False))
        try:
            async with watched(request.receive, parsing.cancel):
                await asyncio.wait([parsing])
        finally:
            parsing.cancel()
        if parsing.cancelled():
            raise ClientDisconnect
        if isinstance(parsing.exception(), InvalidRequest):
            self._threads.charge_refused(caller)
        return parsing.result()

    @asynccontextmanager
    async def _received(self, request: Request, caller: Caller) -> AsyncIterator[bytes]:
        """Its bytes count until it is understood."""
        limit = self._settings.max_body_bytes
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length) > limit:
            raise _too_large(limit)
        body = _Body(caller)
        try:
            try:
                async with asyncio.timeout(self._settings.body_timeout_s):
                    await self._receive(request, body)
            except TimeoutError:
                if body.waits_for_turn:  # it was not let come
                    raise self._threads.refusal(caller, self._settings.body_timeout_s) from None
                raise BadBody(408, f"the body took longer than {self._settings.body_timeout_s:g} s") from None
            raw = b"".join(body.pieces)
            body.pieces.clear()  # of both one is kept while it waits
            yield raw
        finally:
            self._bodies.give_back(body.num_bytes, caller)

    async def _receive(self, request: Request, body: "_Body") -> None:
        """A long one comes a piece at a time, each in its tenant's turn."""
        limit = self._settings.max_body_bytes
        async for chunk in request.stream():
            if not chunk:  # the last one, for which there would be no room where the share is full
                continue
            await self._bodies.take(len(chunk), body.caller)
            body.pieces.append(chunk)
            body.num_bytes += len(chunk)
            if body.num_bytes > limit:
                raise _too_large(limit)
            if body.num_bytes > MAX_INLINE_BYTES:
                self._threads.charge(body.caller, len(chunk) * _RECEIVING_S_PER_BYTE)
                body.waits_for_turn = True
                await self._turns.wait(body.caller)
                body.waits_for_turn = False


@dataclass(slots=True)
class _Body:
    """What has come of one. `waits_for_turn`: it is this gateway that keeps it from coming."""

    caller: Caller
    pieces: list[bytes] = field(default_factory=list)
    num_bytes: int = 0
    waits_for_turn: bool = False


class PieceTurns:
    """Pieces of long bodies, of which one tenant's come one after the other, first come, first served, and as fast as
    its share of a core lets them. Without turns all of them would be read in the same pass of the event loop, in which
    nobody else is served. Whose client sends nothing keeps nobody waiting: its turn is over when more of it may come.
    """

    def __init__(self, threads: TenantThreads) -> None:
        self._threads = threads
        self._of_tenants: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Kept by those who wait."""

    async def wait(self, caller: Holder) -> None:
        """Until more of one may come. Its caller bounds that."""
        if not caller.has_peers:
            return
        turn = self._of_tenants.get(caller.tenant)
        if turn is None:
            turn = self._of_tenants[caller.tenant] = asyncio.Lock()
        await turn.acquire()
        try:
            await self._threads.wait_for_share(caller)
        finally:  # in the next pass of the event loop, in which this piece is read
            asyncio.get_running_loop().call_soon(turn.release)


def _too_large(limit: int) -> BadBody:
    return BadBody(413, f"the body is larger than {limit} bytes; send less at once")
