"""A scheduler over the in-memory bus, with a gateway and workers that do as they are told."""

import asyncio
from collections.abc import Callable

from opentelemetry import trace
from opentelemetry.trace import Tracer
from tests.unit.scheduler.rig import make_limits, make_worker

from weir.bus.codec import encode
from weir.bus.endpoint import BusEndpoint
from weir.bus.in_memory import Faults, InMemoryHub
from weir.bus.messages import (
    Ack,
    Cancel,
    Finish,
    Grant,
    GrantReply,
    Held,
    HeldReply,
    HeldRequest,
    Outcome,
    Revoke,
    Submit,
    SubmitReply,
)
from weir.bus.protocol import Bus, BusError
from weir.bus.subjects import WORKER_TTL_S, Subjects
from weir.core.clock import SystemClock
from weir.core.tasks import end_tasks
from weir.runtime.change_log import ChangeLog
from weir.scheduling.limits import CoreLimits
from weir_scheduler.component import SchedulerComponent, SchedulerSettings

SUBJECTS = Subjects("test")


async def eventually(is_so: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Raises TimeoutError when it does not become so."""
    async with asyncio.timeout(timeout_s):
        while not is_so():  # noqa: ASYNC110  what is waited for has no event
            await asyncio.sleep(0.01)


class ScriptedGateway:
    """Holds what it submitted until it is told or decides otherwise; says so every 0.2 s."""

    def __init__(self, bus: Bus, gateway_id: str, tracer: Tracer) -> None:
        self.gateway_id = gateway_id
        self.endpoint = BusEndpoint(bus, tracer)
        self.held: dict[str, HeldRequest] = {}
        self.grants: list[Grant] = []
        self.grant_parents: list[int] = []
        """Span id that each Grant came under; 0: none."""
        self.revokes: list[Revoke] = []
        self.accepts = True
        self.ends: dict[str, str] = {}
        self._speaking: asyncio.Task[None] | None = None
        self._sequence = 0

    @property
    def granted_ids(self) -> list[str]:
        """In the order of their first Grant: one whose answer takes long is sent again."""
        return list(dict.fromkeys(grant.request_id for grant in self.grants))

    async def start(self) -> None:
        await self.endpoint.serve(SUBJECTS.grant(self.gateway_id), Grant, self._on_grant)
        await self.endpoint.serve(SUBJECTS.revoke(self.gateway_id), Revoke, self._on_revoke)
        self._speaking = asyncio.create_task(self._speak())

    async def stop(self) -> None:
        if self._speaking is not None:
            await end_tasks([self._speaking])
        await self.endpoint.close()

    async def submit(self, request_id: str, lane: str = "", model: str = "m", max_tokens: int = 16) -> SubmitReply:
        """Sent again until it is answered."""
        submit = Submit(request_id, self.gateway_id, model, lane, "t", 16, max_tokens, 0)
        self.held[request_id] = HeldRequest(submit, None)
        reply = await self._ask_until_answered(SUBJECTS.submit, submit)
        if not reply.queued:
            self._end(request_id, "refused")
        return reply

    async def finish(self, request_id: str) -> None:
        entry = self.held[request_id]
        dispatch = entry.submit.dispatch
        self._end(request_id, "finished")
        try:
            finish = Finish(request_id, self.gateway_id, dispatch, Outcome.FINISHED, 3)
            await self.endpoint.ask(SUBJECTS.finish, finish, Ack, timeout_s=0.2)
        except BusError:
            # The next list will say it by not naming the request.
            return

    async def cancel(self, request_id: str) -> Ack:
        self._end(request_id, "cancelled")
        return await self.endpoint.ask(SUBJECTS.cancel, Cancel(request_id, self.gateway_id), Ack, timeout_s=5)

    async def _ask_until_answered(self, subject: str, submit: Submit) -> SubmitReply:
        while True:
            try:
                return await self.endpoint.ask(subject, submit, SubmitReply, timeout_s=0.2)
            except BusError:
                await asyncio.sleep(0.02)

    def _end(self, request_id: str, how: str) -> None:
        if self.held.pop(request_id, None) is not None:
            assert request_id not in self.ends
            self.ends[request_id] = how

    async def _on_grant(self, grant: Grant) -> GrantReply:
        self.grants.append(grant)
        self.grant_parents.append(trace.get_current_span().get_span_context().span_id)
        entry = self.held.get(grant.request_id)
        if not self.accepts:
            self._end(grant.request_id, "declined")
            return GrantReply(accepted=False)
        if entry is None or grant.placement.dispatch != entry.submit.dispatch:
            return GrantReply(accepted=False)
        if entry.placement is None:
            self.held[grant.request_id] = HeldRequest(entry.submit, grant.placement)
        return GrantReply(accepted=self.held[grant.request_id].placement == grant.placement)

    async def _on_revoke(self, revoke: Revoke) -> Ack:
        self.revokes.append(revoke)
        self._end(revoke.request_id, f"revoked: {revoke.reason.value}")
        return Ack(revoke.epoch)

    async def _speak(self) -> None:
        while True:
            self._sequence += 1
            held = Held(self.gateway_id, self._sequence, tuple(self.held.values()))
            try:
                reply = await self.endpoint.ask(SUBJECTS.reconcile, held, HeldReply, timeout_s=0.2)
            except BusError:
                reply = HeldReply(0, 0)
            for request_id in reply.refused_request_ids:
                self._end(request_id, "refused by reconciliation")
            await asyncio.sleep(0.2)


class Stack:
    """Any number of schedulers and gateways on one hub; two workers that speak every 0.2 s."""

    def __init__(
        self,
        *,
        limits: CoreLimits | None = None,
        faults: Faults | None = None,
        limits_file: str = "",
        admin_key_file: str = "",
    ) -> None:
        self.hub = InMemoryHub(faults=faults)
        self.limits = limits or make_limits(gather_s=0.1)
        self.limits_file = limits_file
        self.admin_key_file = admin_key_file
        self.tracer: Tracer = trace.NoOpTracer()
        self.workers = {
            record.worker_id: record for record in (make_worker("p", "prefill"), make_worker("d", "decode"))
        }
        self.shutdowns: list[str] = []
        self.changes: ChangeLog | None = None
        self._schedulers: list[SchedulerComponent] = []
        self._gateways: list[ScriptedGateway] = []
        self._workers_bus = self.hub.connect()
        self._living = asyncio.create_task(self._live())

    async def add_scheduler(self, scheduler_id: str = "s0", bus: Bus | None = None) -> SchedulerComponent:
        component = self.make_scheduler(scheduler_id, bus)
        await component.start()
        self._schedulers.append(component)
        return component

    def make_scheduler(self, scheduler_id: str, bus: Bus | None = None) -> SchedulerComponent:
        """One that the caller starts and stops."""

        async def connect() -> Bus:
            return bus or self.hub.connect()

        return SchedulerComponent(
            connect,
            scheduler_id,
            SchedulerSettings("test", self.limits, self.limits_file, self.admin_key_file),
            tracer=self.tracer,
            clock=SystemClock(),
            request_shutdown=self.shutdowns.append,
            changes=self.changes,
        )

    async def add_gateway(self, gateway_id: str = "g0") -> ScriptedGateway:
        gateway = ScriptedGateway(self.hub.connect(), gateway_id, self.tracer)
        await gateway.start()
        self._gateways.append(gateway)
        return gateway

    async def delete_worker(self, worker_id: str) -> None:
        del self.workers[worker_id]
        await (await self._workers_bus.bucket(SUBJECTS.workers_bucket)).delete(worker_id)

    async def close(self) -> None:
        await end_tasks([self._living])
        for gateway in self._gateways:
            await gateway.stop()
        for scheduler in self._schedulers:
            await scheduler.stop()
        await self._workers_bus.close()

    async def _live(self) -> None:
        while True:
            try:
                bucket = await self._workers_bus.bucket(SUBJECTS.workers_bucket, ttl_s=WORKER_TTL_S)
                for record in list(self.workers.values()):
                    await bucket.put(record.worker_id, encode(record))
            except BusError:
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.2)
