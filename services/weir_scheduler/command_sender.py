"""Does what the core wants done: sends gateways their grants and revokes until they have answered."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer

from weir.bus.endpoint import BusEndpoint
from weir.bus.messages import Ack, GrantReply
from weir.bus.migration import MigrateReply
from weir.bus.protocol import BusError
from weir.bus.subjects import Subjects
from weir.core.clock import Clock
from weir.core.tasks import end_tasks
from weir.scheduling.commands import Command, EnteredQueue, LeftQueue, SendGrant, SendMigrate, SendRevoke
from weir.scheduling.core import SchedulerCore

logger = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S = 1.0
_RETRY_WAIT_S = 0.2
_REVOKE_LIMIT_S = 10.0


class _QueueSpans:
    """The time of requests in their queues: one span each that is part of a trace. Every request that enters leaves, so
    that none stays open."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._spans: dict[str, Span] = {}

    def __len__(self) -> int:
        return len(self._spans)

    def enter(self, request_id: str, lane: str) -> None:
        """The parent is the current span: the one that handles the Submit."""
        if not trace.get_current_span().get_span_context().is_valid:
            return
        attributes = {"weir.request.id": request_id, "weir.lane": lane}
        self._spans[request_id] = self._tracer.start_span("queue", kind=SpanKind.INTERNAL, attributes=attributes)

    def leave(self, request_id: str, outcome: str, *, is_error: bool = False) -> Context:
        """Ends the span; what follows from it goes on in the context that is returned."""
        span = self._spans.pop(request_id, None)
        if span is None:
            return Context()
        span.set_attribute("weir.queue.outcome", outcome)
        if is_error:
            span.set_status(Status(StatusCode.ERROR, outcome))
        span.end()
        return trace.set_span_in_context(span, Context())

    def close(self) -> None:
        for request_id in list(self._spans):
            self.leave(request_id, "scheduler_stopped", is_error=True)


class CommandSender:
    """One task a message under way; what never arrives, the reconciliation of held requests makes good. Each message
    goes on in the trace from the span of its request's time in its queue."""

    def __init__(
        self,
        endpoint: BusEndpoint,
        subjects: Subjects,
        core: SchedulerCore,
        clock: Clock,
        on_answer: Callable[[], None],
        tracer: Tracer,
        may_command: Callable[[], bool] = lambda: True,
    ) -> None:
        """While it may not command, what is under way waits."""
        self._endpoint = endpoint
        self._subjects = subjects
        self._core = core
        self._clock = clock
        self._on_answer = on_answer
        self._may_command = may_command
        self._spans = _QueueSpans(tracer)
        self._tasks: set[asyncio.Task[None]] = set()

    def metrics(self) -> dict[str, float]:
        return {"messages_under_way": float(len(self._tasks)), "open_queue_spans": float(len(self._spans))}

    def run(self, command: Command) -> None:
        match command:
            case EnteredQueue(request_id, lane):
                self._spans.enter(request_id, lane)
            case LeftQueue(request_id, outcome):
                self._spans.leave(request_id, outcome)
            case SendGrant():
                context = self._spans.leave(command.grant.request_id, "granted")
                self._start(self._send_grant(command, context))
            case SendRevoke():
                revoke = command.revoke
                context = self._spans.leave(revoke.request_id, revoke.reason.value, is_error=True)
                self._start(self._send_revoke(command, context))
            case SendMigrate():
                self._start(self._send_migrate(command))

    async def close(self) -> None:
        await end_tasks(self._tasks)
        self._spans.close()

    async def _send_grant(self, command: SendGrant, context: Context) -> None:
        grant = command.grant
        subject = self._subjects.grant(command.gateway_id)
        while self._core.is_granted(grant.request_id, grant.placement):
            if not self._may_command():
                await asyncio.sleep(_RETRY_WAIT_S)
                continue
            try:
                reply = await self._endpoint.ask(
                    subject, grant, GrantReply, timeout_s=_ANSWER_TIMEOUT_S, context=context
                )
            except BusError as error:
                logger.debug("grant of %s: %s; again", grant.request_id, error)
                await asyncio.sleep(_RETRY_WAIT_S)
                continue
            self._core.grant_answered(grant.request_id, grant.placement, accepted=reply.accepted)
            self._on_answer()
            return

    async def _send_revoke(self, command: SendRevoke, context: Context) -> None:
        subject = self._subjects.revoke(command.gateway_id)
        give_up_at_s = self._clock.now_s() + _REVOKE_LIMIT_S
        while self._core.knows_gateway(command.gateway_id) and self._clock.now_s() < give_up_at_s:
            if not self._may_command():
                await asyncio.sleep(_RETRY_WAIT_S)
                continue
            try:
                await self._endpoint.ask(subject, command.revoke, Ack, timeout_s=_ANSWER_TIMEOUT_S, context=context)
            except BusError as error:
                logger.debug("revoke of %s: %s; again", command.revoke.request_id, error)
                await asyncio.sleep(_RETRY_WAIT_S)
                continue
            return

    async def _send_migrate(self, command: SendMigrate) -> None:
        migrate, subject = command.migrate, self._subjects.migrate(command.gateway_id)
        while self._core.migrations.is_planned(migrate.request_id, migrate.placement):
            if not self._may_command():
                await asyncio.sleep(_RETRY_WAIT_S)
                continue
            try:
                reply = await self._endpoint.ask(subject, migrate, MigrateReply, timeout_s=_ANSWER_TIMEOUT_S)
            except BusError as error:
                logger.debug("migration of %s: %s; again", migrate.request_id, error)
                await asyncio.sleep(_RETRY_WAIT_S)
                continue
            if reply.refusal:
                logger.debug("migration of %s: %s", migrate.request_id, reply.refusal)
            else:
                worker_id, reason = migrate.placement.decode_worker_id, migrate.placement.reason
                logger.info("request %s is to go on at %s; %s", migrate.request_id, worker_id, reason)
            self._core.migration_answered(migrate.request_id, migrate.placement, accepted=reply.accepted)
            self._on_answer()
            return

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
