"""Telling gateways what was decided, again and again until they have understood."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from opentelemetry.context import Context

from weir.bus.endpoint import BusEndpoint
from weir.bus.messages import Ack, GrantReply
from weir.bus.protocol import BusError
from weir.bus.subjects import Subjects
from weir.core.clock import Clock
from weir.core.tasks import end_tasks
from weir.scheduling.commands import SendGrant, SendRevoke
from weir.scheduling.core import SchedulerCore

logger = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S = 1.0
_RETRY_WAIT_S = 0.2
_REVOKE_LIMIT_S = 10.0


class CommandSender:
    """One task a message under way. What a gateway never hears of, the reconciliation of held requests tells it."""

    def __init__(
        self,
        endpoint: BusEndpoint,
        subjects: Subjects,
        core: SchedulerCore,
        clock: Clock,
        on_answer: Callable[[], None],
    ) -> None:
        self._endpoint = endpoint
        self._subjects = subjects
        self._core = core
        self._clock = clock
        self._on_answer = on_answer
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_under_way(self) -> int:
        return len(self._tasks)

    def send_grant(self, command: SendGrant, context: Context) -> None:
        self._start(self._send_grant(command, context))

    def send_revoke(self, command: SendRevoke, context: Context) -> None:
        self._start(self._send_revoke(command, context))

    async def close(self) -> None:
        await end_tasks(self._tasks)

    async def _send_grant(self, command: SendGrant, context: Context) -> None:
        grant = command.grant
        subject = self._subjects.grant(command.gateway_id)
        while self._core.is_granted(grant.request_id, grant.placement):
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
            try:
                await self._endpoint.ask(subject, command.revoke, Ack, timeout_s=_ANSWER_TIMEOUT_S, context=context)
            except BusError as error:
                logger.debug("revoke of %s: %s; again", command.revoke.request_id, error)
                await asyncio.sleep(_RETRY_WAIT_S)
                continue
            return

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
