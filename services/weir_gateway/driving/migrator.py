"""Has requests go on at other hosts while their clients read: the pages first, then the request.

The scheduler says which and where, and has reserved there; the driver, told by `Moved`, begins the next dispatch. Until
then the present one runs on, and whatever fails before costs it nothing.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from weir.bus.migration import Migrate
from weir.core.clock import Clock
from weir.core.errors import Unavailable, WeirError
from weir.core.life import Attempt, Phase
from weir.core.tasks import end_tasks
from weir.rpc.conversions import attempt_to_pb
from weir.telemetry.catalog.histograms import ITL_EDGES, MIGRATION_PAUSE
from weir.telemetry.described import HistogramFigure
from weir.telemetry.histogram import Histogram
from weir.wire.v1 import worker_pb2
from weir_gateway.requests.migration import Migration, MigrationSettings, MigrationVerdict, Moved
from weir_gateway.requests.request_end import RETRY_AFTER_S
from weir_gateway.requests.request_state import RequestState
from weir_gateway.workers.connection import WorkerEndpoint
from weir_gateway.workers.connections import WorkerConnections

logger = logging.getLogger(__name__)
_LOOK_AGAIN_S = 0.2
_OUTCOMES = ("begun", "moved", "abandoned", "unanswered")


class _Staging:
    """Implements `weir_gateway.workers.connection.StageListener`."""

    def __init__(self, request_id: str, migration: Migration) -> None:
        attempt = attempt_to_pb(Attempt(migration.placement.dispatch))
        stage = worker_pb2.Stage(request_id=request_id, attempt=attempt, pages_address=migration.pages_address)
        self.command = worker_pb2.ServeRequest(stage=stage)
        self._migration = migration
        self.changed = asyncio.Event()

    def on_staged(self, told: worker_pb2.StagedPages) -> None:
        self._migration.staged(told)
        self.changed.set()

    def on_connection_lost(self, message: str) -> None:
        self._migration.fail(message)
        self.changed.set()


class Migrator:
    """One task a migration. The scheduler bounds how many there are at a time."""

    def __init__(
        self,
        connections: WorkerConnections,
        settings: MigrationSettings,
        clock: Clock,
        on_settled: Callable[[], None],
    ) -> None:
        """`on_settled` is called when the scheduler is to hear at once what runs where."""
        self._settings = settings
        self._connections = connections
        self._clock = clock
        self._on_settled = on_settled
        self._migrations: dict[str, Migration] = {}
        """By request, until it runs elsewhere or the migration is given up."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._counts: Counter[str] = Counter()
        self._pauses = Histogram(ITL_EDGES)

    def refusal_of(self, state: RequestState | None, migrate: Migrate) -> str:
        """Why it does not begin. Empty: it has, now or before."""
        if state is None or state.phase.is_terminal:
            return "it has ended"
        before = self._migrations.get(state.request_id)
        if before is not None:
            is_same = before.placement.decode_worker_id == migrate.placement.decode_worker_id
            return "" if is_same else "it is on its way to another worker"
        if state.phase is not Phase.DECODING or state.interrupted.done() or state.whereabouts.is_awaiting_adopter:
            return f"it is {state.phase.value}, and may go on elsewhere by itself"
        if state.placement is not None and state.placement.names(migrate.placement.decode_worker_id):
            return "it is there"
        self._begin(state, migrate)
        return ""

    def is_migrating(self, request_id: str) -> bool:
        return request_id in self._migrations

    async def wait_first(self, state: RequestState, left_at_s: float) -> None:
        """For the first token of its new worker, or until it is interrupted: here, if none comes in time. `left_at_s`:
        when the last token of the old one came."""
        either: list[asyncio.Future[Any]] = [state.prefilled, state.interrupted]
        done, _ = await asyncio.wait(either, timeout=self._settings.answer_s, return_when=asyncio.FIRST_COMPLETED)
        if state.prefilled.done():
            self._counts["moved"] += 1
            self._pauses.observe(self._clock.now_s() - left_at_s)
        elif not done:
            self._counts["unanswered"] += 1
            message = f"no token came within {self._settings.answer_s:g} s of the move"
            state.interrupt(Unavailable(message, retry_after_s=RETRY_AFTER_S))
        self._on_settled()

    async def stop(self) -> None:
        await end_tasks(self._tasks)

    def metrics(self) -> dict[str, float]:
        counted = {f"migrations_{outcome}_total": float(self._counts[outcome]) for outcome in _OUTCOMES}
        return counted | {"migrations_under_way": float(len(self._tasks))}

    def histograms(self) -> list[HistogramFigure]:
        return [HistogramFigure(MIGRATION_PAUSE.name, self._pauses.value())]

    def _begin(self, state: RequestState, migrate: Migrate) -> None:
        placement = replace(migrate.placement, dispatch=state.dispatches.take())
        migration = Migration(placement, migrate.pages_address, self._clock.now_s(), self._settings)
        self._migrations[state.request_id] = migration
        self._counts["begun"] += 1
        # Of the dispatch that it leaves, as long as that runs.
        interrupted = state.interrupted
        task = asyncio.create_task(self._run(state, migration, interrupted), name=f"migration of {state.request_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, state: RequestState, migration: Migration, interrupted: "asyncio.Future[WeirError]") -> None:
        placement, is_moved = migration.placement, False
        connection = self._connections.connect(WorkerEndpoint(placement.decode_worker_id, placement.decode_address))
        staging = _Staging(state.request_id, migration)
        connection.begin_staging(state.request_id, staging)
        try:
            is_moved = await self._stage(state, migration, staging, interrupted)
        finally:
            connection.end_staging(state.request_id, staging)
            del self._migrations[state.request_id]
            if not is_moved:
                self._abandon(state, migration)

    async def _stage(
        self, state: RequestState, migration: Migration, staging: _Staging, interrupted: "asyncio.Future[WeirError]"
    ) -> bool:
        """Whether the driver has it go on there now. `state.interrupted` may be of a newer dispatch meanwhile."""
        while not interrupted.done() and not state.ended.done():
            num_tokens = len(state.checked.prompt_token_ids) + state.output.next_index
            verdict = migration.verdict(num_tokens, self._clock.now_s())
            if verdict is MigrationVerdict.SWITCH:
                interrupted.set_result(Moved(migration.placement))
                return True
            if verdict is MigrationVerdict.ABANDON:
                return False
            staging.changed.clear()
            changed = asyncio.create_task(staging.changed.wait())
            either: list[asyncio.Future[Any]] = [changed, interrupted, state.ended]
            try:
                await asyncio.wait(either, timeout=_LOOK_AGAIN_S, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await end_tasks([changed])
        return False

    def _abandon(self, state: RequestState, migration: Migration) -> None:
        self._counts["abandoned"] += 1
        placement = migration.placement
        self._connections.cancel(placement.decode_worker_id, state.request_id, Attempt(placement.dispatch))
        logger.info(
            "request %s does not go on at %s: %s",
            state.request_id,
            placement.decode_worker_id,
            migration.problem or "it was interrupted, or it took too long",
            extra=state.checked.log_ids,
        )
        self._on_settled()
