"""What the console and `weir top` ask, for operators:

GET /debug/stack          a snapshot of the stack
GET /debug/stack/events   the same as server-sent events, one a second
GET /debug/steps          each worker's last steps, and who was in each
GET /debug/pages          the page map of each arena
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from pydantic import TypeAdapter
from starlette.requests import Request
from starlette.responses import Response

from weir.rpc.figures import page_map_from_pb, step_from_pb
from weir.telemetry.internals import PageMap, StepRecord
from weir.telemetry.page_cache import PageCache
from weir.telemetry.stack_snapshot import StackSnapshot
from weir.wire.v1 import admin_pb2, admin_pb2_grpc
from weir_gateway.frontends.console.feed import StackFeed, Watcher
from weir_gateway.frontends.event_stream import EventStream, StreamSettings
from weir_gateway.metrics.neighbours import Neighbours, NeighbourWatch

MAX_SHOWN_STEPS = 64
MAX_SHOWN_RANGES = 512
"""Of one arena, or of one worker: what a screen has room for."""
_NO_STORE = {"Cache-Control": "no-store"}
_JSON = "application/json"


@dataclass(frozen=True, slots=True)
class WorkerSteps:
    """The newest steps of one worker, in their order. They are remembered for ten seconds after each question, so that
    the first answer has none."""

    worker_id: str
    role: str
    model: str
    steps: tuple[StepRecord, ...]


@dataclass(frozen=True, slots=True)
class StackSteps:
    """The newest steps of each worker that answers."""

    workers: tuple[WorkerSteps, ...]


@dataclass(frozen=True, slots=True)
class ArenaPages:
    """The pages of one arena. `worker_ids`: who uses it."""

    address: str
    worker_ids: tuple[str, ...]
    pages: PageMap


@dataclass(frozen=True, slots=True)
class StackPages:
    """The pages of each arena that can be reached from the gateway."""

    arenas: tuple[ArenaPages, ...]


_SNAPSHOT: TypeAdapter[StackSnapshot] = TypeAdapter(StackSnapshot)
_STEPS: TypeAdapter[StackSteps] = TypeAdapter(StackSteps)
_PAGES: TypeAdapter[StackPages] = TypeAdapter(StackPages)

Handler = Callable[[Request], Awaitable[Response]]


class ConsoleApi:
    """Handlers for operators. They raise WeirError."""

    def __init__(self, feed: StackFeed, watch: NeighbourWatch, streams: StreamSettings) -> None:
        self._feed = feed
        self._watch = watch
        self._streams = streams
        self._pages = PageCache[str, bytes]()

    def routes(self) -> Sequence[tuple[str, Handler]]:
        """Each path of a GET, and who answers it."""
        return (
            ("/debug/stack", self.stack),
            ("/debug/stack/events", self.stack_events),
            ("/debug/steps", partial(self._kept, "steps", self._steps)),
            ("/debug/pages", partial(self._kept, "pages", self._page_maps)),
        )

    async def stack(self, request: Request) -> Response:
        del request
        content = _SNAPSHOT.dump_json(await self._feed.snapshot())
        return Response(content, media_type=_JSON, headers=_NO_STORE)

    async def stack_events(self, request: Request) -> Response:
        del request
        watcher = self._feed.join()
        return EventStream(self._events(watcher), partial(self._feed.leave, watcher), self._streams, {})

    async def _events(self, watcher: Watcher) -> AsyncIterator[bytes]:
        async for snapshot in self._feed.snapshots(watcher):
            yield b"data: " + _SNAPSHOT.dump_json(snapshot) + b"\n\n"

    async def _kept(self, key: str, make: Callable[[], Awaitable[bytes]], request: Request) -> Response:
        """However many ask, the others are asked some times a second at most."""
        del request
        return Response(await self._pages.page(key, make), media_type=_JSON, headers=_NO_STORE)

    async def _steps(self) -> bytes:
        async def ask(stub: "admin_pb2_grpc.AdminAsyncStub", timeout_s: float) -> tuple[StepRecord, ...]:
            answer = await stub.ListSteps(admin_pb2.ListStepsRequest(max_steps=MAX_SHOWN_STEPS), timeout=timeout_s)
            return tuple(map(step_from_pb, answer.steps))

        records = (await self._watch.neighbours()).registered
        found = await self._watch.ask_operators(ask, [record.address for record in records])
        workers = [
            WorkerSteps(record.worker_id, record.role, record.model, found[record.address])
            for record in records
            if record.address in found
        ]
        workers.sort(key=lambda worker: (worker.model, worker.role, worker.worker_id))
        return _STEPS.dump_json(StackSteps(tuple(workers)))

    async def _page_maps(self) -> bytes:
        async def ask(stub: "admin_pb2_grpc.AdminAsyncStub", timeout_s: float) -> PageMap:
            request = admin_pb2.MapPagesRequest(max_ranges=MAX_SHOWN_RANGES)
            return page_map_from_pb(await stub.MapPages(request, timeout=timeout_s))

        users = _users_of_arenas(await self._watch.neighbours())
        found = await self._watch.ask_operators(ask, users.keys())
        arenas = [ArenaPages(address, users[address], found[address]) for address in sorted(found)]
        return _PAGES.dump_json(StackPages(tuple(arenas)))


def _users_of_arenas(neighbours: Neighbours) -> dict[str, tuple[str, ...]]:
    """Workers by the address of their transfer service."""
    users: dict[str, tuple[str, ...]] = {}
    for record in neighbours.registered:
        if record.arena_address:
            users[record.arena_address] = (*users.get(record.arena_address, ()), record.worker_id)
    return users
