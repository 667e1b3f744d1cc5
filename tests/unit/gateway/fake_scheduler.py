"""A scheduler that does what a test wants, over a real endpoint on the in-memory bus."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from opentelemetry.trace import NoOpTracerProvider

from weir.bus.codec import encode
from weir.bus.configuration import ACCESS_KEY, AccessRules
from weir.bus.endpoint import BusEndpoint
from weir.bus.messages import (
    Ack,
    Cancel,
    Finish,
    Grant,
    GrantReply,
    Held,
    HeldReply,
    Placement,
    Prefilled,
    RefusalReason,
    Revoke,
    Submit,
    SubmitReply,
)
from weir.bus.migration import Migrate, MigrateReply
from weir.bus.protocol import Bus
from weir.bus.queue_report import QuotaLevel
from weir.bus.subjects import Subjects
from weir_gateway.access import Caller, RequestScope
from weir_scheduler.store_maker import StoreMaker

INSTANCE = "test"
OPEN_RULES = AccessRules(
    epoch=5,
    lanes=("interactive", "standard", "batch"),
    default_lane="standard",
    default_tenant="default",
)
CALLER = Caller("default", OPEN_RULES.lanes, "standard", OPEN_RULES.lanes)
SCOPE = RequestScope("default", "standard", "")


@dataclass
class FakeScheduler:
    """Grants each request at once unless a test changes that, and keeps every message."""

    bus: Bus
    placement: Placement
    grants_at_once: bool = True
    is_silent: bool = False
    epoch: int = 5
    refusal: SubmitReply | None = None
    num_accepted: int = 0
    """Submits that are taken before `refusal` is the reply."""
    refusal_delay_s: float = 0.0
    held_delay_s: float = 0.0
    rules: AccessRules | None = OPEN_RULES
    refused_ids: tuple[str, ...] = ()
    quota_of: Callable[[Submit], QuotaLevel | None] = lambda _: None
    """Of a request that is granted."""
    submits: list[Submit] = field(default_factory=list)
    cancels: list[Cancel] = field(default_factory=list)
    finishes: list[Finish] = field(default_factory=list)
    prefilled: list[Prefilled] = field(default_factory=list)
    helds: list[Held] = field(default_factory=list)
    grant_replies: list[GrantReply] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._endpoint = BusEndpoint(self.bus, NoOpTracerProvider().get_tracer("test"))
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        subjects = Subjects(INSTANCE)
        if self.rules is not None:
            await self.write_rules(self.rules)
        stores = StoreMaker(self.bus, subjects, lambda _: True)
        await stores.make()
        await stores.serve(self._endpoint)
        await self._endpoint.serve(subjects.submit, Submit, self._on_submit)
        await self._endpoint.serve(subjects.cancel, Cancel, self._on_cancel)
        await self._endpoint.serve(subjects.finish, Finish, self._on_finish)
        await self._endpoint.serve(subjects.prefilled, Prefilled, self._on_prefilled)
        await self._endpoint.serve(subjects.reconcile, Held, self._on_held)

    async def write_rules(self, rules: AccessRules) -> None:
        bucket = await self.bus.bucket(Subjects(INSTANCE).configuration_bucket, durable=True)
        await bucket.put(ACCESS_KEY, encode(rules))

    async def stop(self) -> None:
        await self._endpoint.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def grant(
        self, submit: Submit, *, epoch: int | None = None, placement: Placement | None = None
    ) -> GrantReply:
        placement = placement or replace(self.placement, dispatch=submit.dispatch)
        epoch = self.epoch if epoch is None else epoch
        grant = Grant(epoch, submit.request_id, placement, self.quota_of(submit))
        subject = Subjects(INSTANCE).grant(submit.gateway_id)
        reply = await self._endpoint.ask(subject, grant, GrantReply, timeout_s=1)
        self.grant_replies.append(reply)
        return reply

    async def revoke(self, submit: Submit, reason: RefusalReason, *, dispatch: int, retry_after_ms: int = 0) -> Ack:
        revoke = Revoke(self.epoch, submit.request_id, dispatch, reason, "says the scheduler", retry_after_ms)
        return await self._endpoint.ask(Subjects(INSTANCE).revoke(submit.gateway_id), revoke, Ack, timeout_s=1)

    async def migrate(self, submit: Submit, placement: Placement) -> MigrateReply:
        migrate = Migrate(self.epoch, submit.request_id, placement, "there:1")
        return await self._endpoint.ask(
            Subjects(INSTANCE).migrate(submit.gateway_id), migrate, MigrateReply, timeout_s=1
        )

    async def _on_submit(self, submit: Submit) -> SubmitReply | None:
        self.submits.append(submit)
        if self.is_silent:
            return None
        if self.refusal is not None and len(self.submits) > self.num_accepted:
            await asyncio.sleep(self.refusal_delay_s)
            return self.refusal
        if self.grants_at_once:
            task = asyncio.create_task(self._grant_quietly(submit))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return SubmitReply(self.epoch, queued=True)

    async def _grant_quietly(self, submit: Submit) -> None:
        await self.grant(submit)

    async def _on_cancel(self, cancel: Cancel) -> Ack | None:
        self.cancels.append(cancel)
        return None if self.is_silent else Ack(self.epoch)

    async def _on_finish(self, finish: Finish) -> Ack | None:
        self.finishes.append(finish)
        return None if self.is_silent else Ack(self.epoch)

    async def _on_prefilled(self, prefilled: Prefilled) -> None:
        self.prefilled.append(prefilled)

    async def _on_held(self, held: Held) -> HeldReply | None:
        self.helds.append(held)
        refused_ids = self.refused_ids
        await asyncio.sleep(self.held_delay_s)
        return None if self.is_silent else HeldReply(self.epoch, 0, refused_ids)
