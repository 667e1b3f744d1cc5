"""What the gateway says to the scheduler over the bus, and what it believes of the answers."""

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
    Prefilled,
    RefusalReason,
    Submit,
    SubmitReply,
    split_held,
)
from weir.bus.protocol import BusError
from weir.bus.subjects import Subjects
from weir.core.clock import Clock
from weir.core.errors import (
    FieldViolation,
    InvalidRequest,
    NotFound,
    Overloaded,
    PermissionDenied,
    QuotaExceeded,
    Unavailable,
    WeirError,
)
from weir_gateway.draft import RequestDraft
from weir_gateway.requests.validation import CheckedRequest, prompt_field

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

logger = logging.getLogger(__name__)

_MIN_RETRY_AFTER_S = 1.0
_OVERLOADS = frozenset(
    {RefusalReason.QUEUE_FULL, RefusalReason.WAITED_TOO_LONG, RefusalReason.SHED, RefusalReason.DEADLINE}
)
_ReplyT = TypeVar("_ReplyT", SubmitReply, HeldReply, Ack)


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """`outage_s` is how long a request waits for a scheduler that does not answer."""

    outage_s: float = 8.0
    outage_retry_after_s: float = 2.0
    ask_timeout_s: float = 1.0
    pause_s: float = 0.2
    close_wait_s: float = 5.0


class SchedulerPort:
    """Asks until there is an answer, or the time is up; every message may be said twice.

    The highest epoch heard is the leader's: whoever speaks with a lower one was replaced, and is not believed.
    """

    def __init__(
        self, endpoint: BusEndpoint, subjects: Subjects, gateway_id: str, settings: ControlSettings, clock: Clock
    ) -> None:
        self._endpoint = endpoint
        self._subjects = subjects
        self._gateway_id = gateway_id
        self._settings = settings
        self._clock = clock
        self._counts: Counter[str] = Counter()
        self._epoch = 0
        self._sequence = 0
        self._heard_at_s = clock.now_s()

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def is_away(self) -> bool:
        """Whether the scheduler has been silent for longer than a request waits."""
        return self._clock.now_s() - self._heard_at_s > self._settings.outage_s

    def hear(self, epoch: int) -> bool:
        """False: the sender is not the leader any more."""
        if epoch < self._epoch:
            self._counts["stale_epochs_total"] += 1
            return False
        self._epoch = epoch
        self._heard_at_s = self._clock.now_s()
        return True

    def unavailable(self) -> Unavailable:
        """What a request is told that waited for the scheduler in vain."""
        return Unavailable(
            f"the scheduler has not answered for {self._settings.outage_s:g} s",
            retry_after_s=self._settings.outage_retry_after_s,
        )

    async def submit(self, submit: Submit, context: Context) -> SubmitReply:
        """Raises Unavailable after `outage_s` without an answer."""
        deadline_s = self._clock.now_s() + self._settings.outage_s
        reply = await self._try_ask(self._subjects.submit, submit, SubmitReply, context, deadline_s)
        if reply is None:
            raise self.unavailable()
        return reply

    async def cancel(self, request_id: str, context: Context) -> None:
        """The request is not wanted. Without an answer the next list of held requests says the same."""
        await self._tell_end(self._subjects.cancel, Cancel(request_id, self._gateway_id), context)

    async def finish(self, finish: Finish, context: Context) -> None:
        """A granted request ended. Without an answer the next list of held requests says the same."""
        await self._tell_end(self._subjects.finish, finish, context)

    async def prefilled(self, request_id: str, dispatch: int, context: Context) -> None:
        """A hint, said once."""
        message = Prefilled(request_id, self._gateway_id, dispatch)
        await self._try_ask(self._subjects.prefilled, message, Ack, context, self._clock.now_s())

    async def report(self, requests: Iterable[HeldRequest]) -> tuple[str, ...]:
        """Says once what the gateway holds; returns the requests that the scheduler refuses to take back."""
        self._sequence += 1
        refused: list[str] = []
        for held in split_held(self._gateway_id, self._sequence, list(requests)):
            reply = await self._try_ask(self._subjects.reconcile, held, HeldReply, Context(), self._clock.now_s())
            if reply is None:
                self._counts["reports_unanswered_total"] += 1
                break
            refused.extend(reply.refused_request_ids)
        return tuple(refused)

    def refused(self, reason: RefusalReason | None) -> None:
        """The scheduler did not take a request, or gave it up."""
        self._counts[f"refused_{reason.value if reason is not None else 'unknown'}_total"] += 1

    def metrics(self) -> dict[str, float]:
        refused = {name: float(count) for name, count in self._counts.items() if name.startswith("refused_")}
        names = ("stale_epochs_total", "reports_unanswered_total", "ends_unconfirmed_total")
        return {name: float(self._counts[name]) for name in names} | refused | {"scheduler_epoch": float(self._epoch)}

    async def _tell_end(self, subject: str, message: "DataclassInstance", context: Context) -> None:
        deadline_s = self._clock.now_s() + self._settings.close_wait_s
        if await self._try_ask(subject, message, Ack, context, deadline_s) is None:
            self._counts["ends_unconfirmed_total"] += 1

    async def _try_ask(
        self, subject: str, message: "DataclassInstance", reply_type: type[_ReplyT], context: Context, deadline_s: float
    ) -> _ReplyT | None:
        """Asks once at least, then again until `deadline_s`. None: no answer from the leader."""
        while True:
            timeout_s = self._settings.ask_timeout_s
            try:
                reply = await self._endpoint.ask(subject, message, reply_type, timeout_s=timeout_s, context=context)
            except BusError as error:
                logger.debug("%s: %s", subject, error)
            except MessageTooLarge:
                logger.exception("%s cannot be said", subject)
                return None
            else:
                if self.hear(reply.epoch):
                    return reply
            if self._clock.now_s() + self._settings.pause_s >= deadline_s:
                return None
            await asyncio.sleep(self._settings.pause_s)


def refusal_error(
    checked: CheckedRequest, reason: RefusalReason | None, message: str, retry_after_ms: int
) -> WeirError:
    """What the client is told; fields by the names that it used."""
    retry_after_s = retry_after_ms / 1000 or _MIN_RETRY_AFTER_S
    if reason is RefusalReason.QUOTA:
        return QuotaExceeded(message, retry_after_s=retry_after_s, tenant=checked.scope.tenant)
    if reason in _OVERLOADS:
        return Overloaded(message, retry_after_s=retry_after_s)
    field = _field_of(checked.draft, reason)
    if field is None:
        return Unavailable(message or "the scheduler refused the request", retry_after_s=retry_after_s)
    if reason is RefusalReason.UNKNOWN_MODEL:
        return NotFound(field, f"{field}: {message}")
    if reason is RefusalReason.LANE_FORBIDDEN:
        return PermissionDenied(f"{field}: {message}")
    return InvalidRequest([FieldViolation(field, message)])


def _field_of(draft: RequestDraft, reason: RefusalReason | None) -> str | None:
    """What the client calls the field that is wrong; None: no field is."""
    match reason:
        case RefusalReason.UNKNOWN_MODEL:
            return draft.names["model"]
        case RefusalReason.UNKNOWN_LANE | RefusalReason.LANE_FORBIDDEN:
            return draft.names["lane"]
        case RefusalReason.TOO_LARGE:
            return prompt_field(draft)
        case _:
            return None
