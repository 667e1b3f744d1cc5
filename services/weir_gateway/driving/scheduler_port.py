"""The gateway's side of its exchange with the scheduler, over the bus.

`SchedulerPort` asks, and repeats until there is an answer; `SchedulerInbox` takes grants and revocations. Below them:
a request as the scheduler's messages have it, and the scheduler's refusals as errors for the client.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from opentelemetry.context import Context

from weir.bus.codec import MessageTooLarge
from weir.bus.endpoint import BusEndpoint
from weir.bus.messages import (
    SCHEDULER_HASH_BYTES,
    Ack,
    Cancel,
    Finish,
    Grant,
    GrantReply,
    HeldReply,
    HeldRequest,
    LeaderChanged,
    Outcome,
    Prefilled,
    RefusalReason,
    Revoke,
    Submit,
    SubmitReply,
    split_held,
)
from weir.bus.migration import Migrate, MigrateReply
from weir.bus.protocol import BusError
from weir.bus.subjects import Subjects
from weir.core.clock import Clock
from weir.core.errors import (
    FieldViolation,
    InvalidRequest,
    Overloaded,
    PermissionDenied,
    QuotaExceeded,
    Unavailable,
    WeirError,
)
from weir.core.life import FinishReason, Phase
from weir.kv.geometry import PAGE_TOKENS
from weir.kv.prefixes import page_hashes, prefix_seed
from weir_gateway.driving.migrator import Migrator
from weir_gateway.requests.quota_book import QuotaBook
from weir_gateway.requests.request_end import RETRY_AFTER_S
from weir_gateway.requests.request_state import RequestState
from weir_gateway.requests.validation import CheckedRequest, prompt_field

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

logger = logging.getLogger(__name__)

_MAX_PAGES = 4096
"""32 kB in a prompt's message. What is cached of a longer one is more than the scheduler knows."""
_MAX_TOKENS_AT_ONCE = 8192  # about half a millisecond
_MIN_RETRY_AFTER_S = 1.0
_OUTCOMES = {Phase.FINISHED: Outcome.FINISHED, Phase.CANCELLED: Outcome.CANCELLED}
_ReplyT = TypeVar("_ReplyT", SubmitReply, HeldReply, Ack)
_HELD = (Phase.QUEUED, Phase.GRANTED, Phase.PREFILLING, Phase.HANDING_OFF, Phase.DECODING)


@dataclass(frozen=True, slots=True)
class SchedulerPortSettings:
    """`outage_s` is how long a new request waits for a scheduler that does not answer, `accepted_outage_s` one that it
    had accepted, `end_wait_s` how long its end is repeated."""

    outage_s: float = 8.0
    accepted_outage_s: float = 60.0
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
        self.quotas = QuotaBook(clock)
        """As the scheduler said last."""
        self._report_sequence = 0
        self._last_reply_s = clock.now_s()

    @property
    def is_silent(self) -> bool:
        """Whether nothing came from the scheduler for longer than an accepted request waits."""
        return self._clock.now_s() - self._last_reply_s > self._settings.accepted_outage_s

    def accept_epoch(self, epoch: int) -> bool:
        """False: the sender is not the leader any more."""
        if epoch < self.epoch:
            self._counts["stale_epochs_total"] += 1
            return False
        self.epoch = epoch
        self._last_reply_s = self._clock.now_s()
        return True

    def unavailable(self, state: RequestState) -> Unavailable:
        """For a request that waited for the scheduler in vain."""
        return Unavailable(
            f"the scheduler has not answered for {self._outage_s(state):g} s",
            retry_after_s=self._settings.outage_retry_after_s,
        )

    async def submit(self, state: RequestState, context: Context) -> SubmitReply:
        """Raises Unavailable after `outage_s` without an answer, or `accepted_outage_s` if it was accepted before."""
        page_hashes = await prompt_page_hashes(state.checked)
        now_s = self._clock.now_s()
        message = submit_message(state, self._gateway_id, now_s, page_hashes)
        deadline_s = now_s + self._outage_s(state)
        reply = await self._try_ask(self._subjects.submit, message, SubmitReply, context, deadline_s)
        if reply is None:
            raise self.unavailable(state)
        if not reply.queued:
            self.quotas.note(state.checked.scope.tenant, reply.quota)
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
                outcome=_outcome_of(state),
                num_output_tokens=state.output.num_tokens,
            )
        deadline_s = self._clock.now_s() + self._settings.end_wait_s
        if await self._try_ask(subject, message, Ack, context, deadline_s) is None:
            self._counts["ends_unconfirmed_total"] += 1

    async def prefilled(self, state: RequestState, context: Context) -> None:
        """A hint, sent once, to which an answer would say nothing."""
        message = Prefilled(state.request_id, self._gateway_id, state.dispatch)
        try:
            await self._endpoint.publish(self._subjects.prefilled, message, context=context)
        except BusError as error:
            logger.debug("%s: %s", self._subjects.prefilled, error)

    async def report(
        self, states: Iterable[RequestState], is_migrating: Callable[[str], bool] = lambda _: False
    ) -> list[HeldRequest]:
        """Sends once what the gateway holds; returns those of it that the scheduler refuses to take back."""
        self._report_sequence += 1
        now_s = self._clock.now_s()
        held = {}
        for state in states:
            message = held_message(state, self._gateway_id, now_s)
            held[state.request_id] = replace(message, is_migrating=is_migrating(state.request_id))
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

    def _outage_s(self, state: RequestState) -> float:
        return self._settings.accepted_outage_s if state.is_admitted else self._settings.outage_s

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


class SchedulerInbox:
    """Passes grants and revocations on to the requests they are for, and reports every second which are held."""

    def __init__(
        self,
        port: SchedulerPort,
        requests: Mapping[str, RequestState],
        migrator: Migrator,
        *,
        report_interval_s: float = 1.0,
    ) -> None:
        """`requests`: those that run, by id; always as they are now."""
        self._port = port
        self._migrator = migrator
        self._requests = requests
        self._report_interval_s = report_interval_s
        self._is_due = asyncio.Event()

    async def subscribe(self, endpoint: BusEndpoint, subjects: Subjects, gateway_id: str) -> None:
        await endpoint.serve(subjects.grant(gateway_id), Grant, self.on_grant)
        await endpoint.serve(subjects.revoke(gateway_id), Revoke, self.on_revoke)
        await endpoint.serve(subjects.migrate(gateway_id), Migrate, self.on_migrate)
        await endpoint.serve(subjects.leader_changed, LeaderChanged, self.on_leader_changed)

    async def on_grant(self, grant: Grant) -> GrantReply:
        """A repeated grant is accepted again; another one of the same dispatch is not, nor one of an older one."""
        state = self._requests.get(grant.request_id)
        if not self._port.accept_epoch(grant.epoch) or state is None or state.phase.is_terminal:
            return GrantReply(accepted=False)
        is_asked_for = state.is_known_to_scheduler and grant.placement.dispatch == state.dispatch
        if state.placement is None and is_asked_for:
            self._port.quotas.note(state.checked.scope.tenant, grant.quota)
            state.grant(grant.placement)
        return GrantReply(accepted=state.placement == grant.placement)

    async def on_revoke(self, revoke: Revoke) -> Ack:
        """One of an earlier dispatch comes too late to matter, and so does any once there is a grant."""
        state = self._requests.get(revoke.request_id)
        if not self._port.accept_epoch(revoke.epoch) or state is None:
            return Ack(self._port.epoch)
        if state.placement is None and revoke.dispatch == state.dispatch:
            self._port.count_refusal(revoke.reason)
            state.revoke(refusal_error(state.checked, revoke.reason, revoke.message, revoke.retry_after_ms))
        return Ack(self._port.epoch)

    async def on_migrate(self, migrate: Migrate) -> MigrateReply:
        if not self._port.accept_epoch(migrate.epoch):
            return MigrateReply(accepted=False, refusal="another scheduler leads")
        refusal = self._migrator.refusal_of(self._requests.get(migrate.request_id), migrate)
        return MigrateReply(accepted=not refusal, refusal=refusal)

    def report_soon(self) -> None:
        """What runs where has changed by this gateway's doing."""
        self._is_due.set()

    async def on_leader_changed(self, changed: LeaderChanged) -> None:
        """The new leader knows nothing of what is held here."""
        if self._port.accept_epoch(changed.epoch):
            self._is_due.set()

    async def report_for_ever(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_due.wait(), self._report_interval_s)
            self._is_due.clear()
            try:
                await self._report()
            except Exception:  # the boundary of one report: without reports the scheduler would drop every request
                logger.exception("the report of held requests failed")

    async def _report(self) -> None:
        held = [state for state in self._requests.values() if state.phase in _HELD]
        for refused in await self._port.report(held, self._migrator.is_migrating):
            state = self._requests.get(refused.submit.request_id)
            # What was granted or submitted again meanwhile is not what was refused.
            if state is None or (state.dispatch, state.placement) != (refused.submit.dispatch, refused.placement):
                continue
            state.revoke(Unavailable("the scheduler does not know the request", retry_after_s=RETRY_AFTER_S))


def _outcome_of(state: RequestState) -> Outcome:
    """FINISHED teaches the scheduler how long answers are: one that its deadline cut off does not."""
    if state.output.finish_reason is FinishReason.DEADLINE:
        return Outcome.CANCELLED
    return _OUTCOMES.get(state.phase, Outcome.FAILED)


def submit_message(state: RequestState, gateway_id: str, now_s: float, page_hashes: bytes = b"") -> Submit:
    """The deadline counts from `now_s`."""
    checked, left_ms = state.checked, 0
    if state.deadline_at_s is not None:
        left_ms = max(1, round((state.deadline_at_s - now_s) * 1000))
    options = checked.client_request.options
    return Submit(
        request_id=state.request_id,
        gateway_id=gateway_id,
        model=checked.model.name,
        lane=checked.scope.lane,
        tenant=checked.scope.tenant,
        num_prompt_tokens=len(checked.prompt_token_ids),
        max_tokens=checked.stop_rules.max_tokens,
        deadline_ms=left_ms,
        takes_partial=options.partial_at_deadline,
        ttft_target_ms=options.ttft_target_ms or 0,
        itl_target_ms=options.itl_target_ms or 0,
        expected_output_tokens=options.expected_output_tokens or 0,
        predicted_output_tokens=checked.prediction.num_tokens,
        output_score=checked.prediction.score,
        page_hashes=page_hashes,
        dispatch=state.dispatch,
        lost_worker_id=state.whereabouts.lost_worker_id,
        keep_ms=state.succession.keep_ms,
    )


def held_message(state: RequestState, gateway_id: str, now_s: float) -> HeldRequest:
    submit = submit_message(state, gateway_id, now_s)
    return HeldRequest(submit, state.placement, state.prefilled.done(), state.output.num_tokens)


async def prompt_page_hashes(checked: CheckedRequest) -> bytes:
    """SCHEDULER_HASH_BYTES of each full page, so that the scheduler can place the prompt where its beginning is cached;
    none of a prompt that takes nothing from the cache. There is no text in them."""
    options, model = checked.client_request.options, checked.model
    if not model.digest or options.skips_prefix_cache or checked.sampling.prompt_logprobs is not None:
        return b""
    seed = prefix_seed(model.digest, salt=checked.scope.cache_salt)
    token_ids = checked.prompt_token_ids[: _MAX_PAGES * PAGE_TOKENS]
    if len(token_ids) <= _MAX_TOKENS_AT_ONCE:
        hashes = page_hashes(token_ids, seed)
    else:
        hashes = await asyncio.to_thread(page_hashes, token_ids, seed)
    return b"".join(page_hash[:SCHEDULER_HASH_BYTES] for page_hash in hashes)


def refusal_error(
    checked: CheckedRequest, reason: RefusalReason | None, message: str, retry_after_ms: int, bound: str = ""
) -> WeirError:
    """For the client; fields by the names that it used."""
    names, retry_after_s = checked.client_request.names, retry_after_ms / 1000 or _MIN_RETRY_AFTER_S
    match reason:
        case RefusalReason.QUOTA:
            return QuotaExceeded(message, retry_after_s=retry_after_s, tenant=checked.scope.tenant, bound=bound)
        case RefusalReason.QUEUE_FULL | RefusalReason.WAITED_TOO_LONG | RefusalReason.SHED | RefusalReason.DEADLINE:
            return Overloaded(message, retry_after_s=retry_after_s)
        case RefusalReason.LANE_FORBIDDEN:
            return PermissionDenied(f"{names['lane']}: {message}")
        case RefusalReason.UNKNOWN_LANE | RefusalReason.TOO_LARGE:
            is_lane = reason is RefusalReason.UNKNOWN_LANE
            field = names["lane"] if is_lane else prompt_field(checked.client_request.prompt, names)
            return InvalidRequest([FieldViolation(field, message)])
        case _:
            return Unavailable(message or "the scheduler refused the request", retry_after_s=retry_after_s)
