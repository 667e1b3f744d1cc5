"""The gateway's messages to the scheduler over the bus, repeated until they are answered."""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from opentelemetry.context import Context

from weir.bus.codec import MessageTooLarge
from weir.bus.endpoint import BusEndpoint
from weir.bus.messages import (
    Ack,
    Cancel,
    Finish,
    HeldReply,
    HeldRequest,
    Outcome,
    Prefilled,
    RefusalReason,
    SubmitReply,
    split_held,
)
from weir.bus.protocol import BusError
from weir.bus.subjects import Subjects
from weir.core.clock import Clock
from weir.core.errors import Unavailable
from weir.core.life import Phase
from weir_gateway.driving.scheduler_messages import held_message, prompt_page_hashes, submit_message
from weir_gateway.requests.request_state import RequestState

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

logger = logging.getLogger(__name__)

_OUTCOMES = {Phase.FINISHED: Outcome.FINISHED, Phase.CANCELLED: Outcome.CANCELLED}
_ReplyT = TypeVar("_ReplyT", SubmitReply, HeldReply, Ack)


@dataclass(frozen=True, slots=True)
class SchedulerPortSettings:
    """`outage_s` is how long a request waits for a scheduler that does not answer, `end_wait_s` how long its end is
    repeated."""

    outage_s: float = 8.0
    outage_retry_after_s: float = 2.0
    reply_timeout_s: float = 1.0
    retry_interval_s: float = 0.2
    end_wait_s: float = 5.0


class SchedulerPort:
    """Asks until there is an answer, or the time is up; every message may arrive twice.

    The highest epoch seen is the leader's: whoever sends a lower one was replaced, and is ignored.
    """

    def __init__(
        self,
        endpoint: BusEndpoint,
        subjects: Subjects,
        gateway_id: str,
        settings: SchedulerPortSettings,
        clock: Clock,
    ) -> None:
        self._endpoint = endpoint
        self._subjects = subjects
        self._gateway_id = gateway_id
        self._settings = settings
        self._clock = clock
        self._counts: Counter[str] = Counter()
        self.epoch = 0
        self._report_sequence = 0
        self._last_reply_s = clock.now_s()

    @property
    def is_silent(self) -> bool:
        """Whether nothing came from the scheduler for longer than a request waits."""
        return self._clock.now_s() - self._last_reply_s > self._settings.outage_s

    def accept_epoch(self, epoch: int) -> bool:
        """False: the sender is not the leader any more."""
        if epoch < self.epoch:
            self._counts["stale_epochs_total"] += 1
            return False
        self.epoch = epoch
        self._last_reply_s = self._clock.now_s()
        return True

    def unavailable(self) -> Unavailable:
        """For a request that waited for the scheduler in vain."""
        return Unavailable(
            f"the scheduler has not answered for {self._settings.outage_s:g} s",
            retry_after_s=self._settings.outage_retry_after_s,
        )

    async def submit(self, state: RequestState, context: Context) -> SubmitReply:
        """Raises Unavailable after `outage_s` without an answer."""
        page_hashes = await prompt_page_hashes(state.checked)
        now_s = self._clock.now_s()
        message = submit_message(state, self._gateway_id, now_s, page_hashes)
        deadline_s = now_s + self._settings.outage_s
        reply = await self._try_ask(self._subjects.submit, message, SubmitReply, context, deadline_s)
        if reply is None:
            raise self.unavailable()
        return reply

    async def end(self, state: RequestState, context: Context) -> None:
        """The request ended, or is not wanted. Without an answer the next list of held requests, which lacks it,
        has the same effect."""
        if state.placement is None:
            subject: str = self._subjects.cancel
            message: Cancel | Finish = Cancel(state.request_id, self._gateway_id)
        else:
            subject = self._subjects.finish
            message = Finish(
                request_id=state.request_id,
                gateway_id=self._gateway_id,
                dispatch=state.placement.dispatch,
                outcome=_OUTCOMES.get(state.phase, Outcome.FAILED),
                num_output_tokens=state.output.num_tokens,
            )
        deadline_s = self._clock.now_s() + self._settings.end_wait_s
        if await self._try_ask(subject, message, Ack, context, deadline_s) is None:
            self._counts["ends_unconfirmed_total"] += 1

    async def prefilled(self, state: RequestState, context: Context) -> None:
        """A hint, sent once."""
        message = Prefilled(state.request_id, self._gateway_id, state.dispatch)
        await self._try_ask(self._subjects.prefilled, message, Ack, context, self._clock.now_s())

    async def report(self, states: Iterable[RequestState]) -> list[HeldRequest]:
        """Sends once what the gateway holds; returns those of it that the scheduler refuses to take back."""
        self._report_sequence += 1
        now_s = self._clock.now_s()
        held = {state.request_id: held_message(state, self._gateway_id, now_s) for state in states}
        refused: list[HeldRequest] = []
        for part in split_held(self._gateway_id, self._report_sequence, list(held.values())):
            reply = await self._try_ask(self._subjects.reconcile, part, HeldReply, Context(), self._clock.now_s())
            if reply is None:
                self._counts["reports_unanswered_total"] += 1
                break
            refused.extend(held[request_id] for request_id in reply.refused_request_ids if request_id in held)
        return refused

    def count_refusal(self, reason: RefusalReason | None) -> None:
        """The scheduler did not take a request, or revoked it."""
        self._counts[f"refused_{reason.value if reason is not None else 'unknown'}_total"] += 1

    def metrics(self) -> dict[str, float]:
        refused = {name: float(count) for name, count in self._counts.items() if name.startswith("refused_")}
        names = ("stale_epochs_total", "reports_unanswered_total", "ends_unconfirmed_total")
        return {name: float(self._counts[name]) for name in names} | refused | {"scheduler_epoch": float(self.epoch)}

    async def _try_ask(
        self, subject: str, message: "DataclassInstance", reply_type: type[_ReplyT], context: Context, deadline_s: float
    ) -> _ReplyT | None:
        """Asks once at least, then again until `deadline_s`. None: no answer from the leader."""
        while True:
            timeout_s = self._settings.reply_timeout_s
            try:
                reply = await self._endpoint.ask(subject, message, reply_type, timeout_s=timeout_s, context=context)
            except BusError as error:
                logger.debug("%s: %s", subject, error)
            except MessageTooLarge:
                logger.exception("a message on %s cannot be sent", subject)
                return None
            else:
                if self.accept_epoch(reply.epoch):
                    return reply
            if self._clock.now_s() + self._settings.retry_interval_s >= deadline_s:
                return None
            await asyncio.sleep(self._settings.retry_interval_s)
