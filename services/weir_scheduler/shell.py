"""Connects a core to the bus while this process leads: messages in, commands out, time, the registry of workers."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from opentelemetry.trace import Tracer

from weir.bus.codec import MalformedMessage, decode
from weir.bus.endpoint import BusEndpoint
from weir.bus.messages import Ack, Cancel, Finish, Held, HeldReply, Prefilled, Submit, SubmitReply, WorkerRecord
from weir.bus.protocol import Bus, KvEntry
from weir.bus.subjects import WORKER_TTL_S, Subjects
from weir.core.clock import Clock
from weir.core.tasks import end_tasks
from weir.policy.seams import Policy
from weir.scheduling.commands import EnteredQueue, LeftQueue, SendGrant, SendRevoke
from weir.scheduling.core import SchedulerCore
from weir.scheduling.limits.core_limits import CoreLimits
from weir_scheduler.command_sender import CommandSender
from weir_scheduler.counters_store import CountersStore
from weir_scheduler.prefix_watch import PrefixWatch
from weir_scheduler.queue_spans import QueueSpans

logger = logging.getLogger(__name__)

_TICK_S = 0.1


class SchedulerShell:
    """Runs one core. `on_failure` is told when it cannot go on."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        core: SchedulerCore,
        *,
        tracer: Tracer,
        clock: Clock,
        on_failure: Callable[[str], None],
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._core = core
        self._on_failure = on_failure
        self._endpoint = BusEndpoint(bus, tracer)
        self._spans = QueueSpans(tracer)
        self._sender = CommandSender(self._endpoint, subjects, core, clock, self.act)
        self._prefixes = PrefixWatch(self._endpoint, subjects, core)
        self._counters = CountersStore(bus, subjects, core)
        self._tasks: list[asyncio.Task[None]] = []
        self._num_malformed_records = 0

    async def start(self) -> None:
        """Returns when requests are heard. Raises BusError."""
        await self._counters.restore()
        workers = await self._bus.bucket(self._subjects.workers_bucket, ttl_s=WORKER_TTL_S)
        self._run("watching workers", self._watch_workers(workers.watch()))
        await self._endpoint.serve(self._subjects.reconcile, Held, self._on_held)
        await self._endpoint.serve(self._subjects.submit, Submit, self._on_submit)
        await self._endpoint.serve(self._subjects.cancel, Cancel, self._on_cancel)
        await self._endpoint.serve(self._subjects.prefilled, Prefilled, self._on_prefilled)
        await self._endpoint.serve(self._subjects.finish, Finish, self._on_finish)
        await self._prefixes.start()
        self._run("ticking", self._tick())
        self._run("saving counters", self._counters.keep())

    async def stop(self) -> None:
        await self._endpoint.close()
        await end_tasks(self._tasks)
        await self._counters.save()
        await self._prefixes.stop()
        await self._sender.close()
        self._spans.close()

    def metrics(self) -> dict[str, float]:
        """Counters (`_total`) and gauges."""
        core, bus = self._core.metrics(), self._endpoint.metrics()
        malformed = bus["bus_malformed_total"] + self._num_malformed_records + core.get("worker_malformed_total", 0.0)
        return {
            **core,
            **bus,
            **self._counters.metrics(),
            "malformed_messages_total": malformed,
            "messages_under_way": float(self._sender.num_under_way),
            "open_queue_spans": float(len(self._spans)),
        }

    def set_limits(self, limits: CoreLimits) -> None:
        """From now on; requests that fit under them start at once."""
        self._core.set_limits(limits)
        self.act()

    def set_policy(self, policy: Policy) -> None:
        """From now on. It must be used by nobody else."""
        self._core.set_policy(policy)
        self.act()

    def check_integrity(self) -> tuple[str, ...]:
        return self._core.check_integrity()

    async def _on_submit(self, submit: Submit) -> SubmitReply:
        reply = self._core.submit(submit)
        self.act()
        return reply

    async def _on_held(self, held: Held) -> HeldReply:
        reply = self._core.held(held)
        self.act()
        return reply

    async def _on_cancel(self, cancel: Cancel) -> Ack:
        self._core.cancel(cancel)
        return self._done()

    async def _on_prefilled(self, prefilled: Prefilled) -> Ack:
        self._core.prefilled(prefilled)
        return self._done()

    async def _on_finish(self, finish: Finish) -> Ack:
        self._core.finish(finish)
        return self._done()

    def _done(self) -> Ack:
        self.act()
        return Ack(self._core.epoch)

    def act(self) -> None:
        """Does what the core wants done now."""
        for command in self._core.decide():
            match command:
                case EnteredQueue(request_id, lane):
                    self._spans.enter(request_id, lane)
                case LeftQueue(request_id, outcome):
                    self._spans.leave(request_id, outcome)
                case SendGrant():
                    self._sender.send_grant(command, self._spans.leave(command.grant.request_id, "granted"))
                case SendRevoke():
                    reason = command.revoke.reason.value
                    context = self._spans.leave(command.revoke.request_id, reason, is_error=True)
                    self._sender.send_revoke(command, context)

    async def _watch_workers(self, entries: AsyncIterator[KvEntry]) -> None:
        async for entry in entries:
            if entry.value is None:
                self._core.worker_gone(entry.key)
            else:
                self._take_record(entry.key, entry.value, entry.revision)
            self.act()

    def _take_record(self, key: str, value: bytes, revision: int) -> None:
        try:
            record = decode(WorkerRecord, value)
            if record.worker_id != key:
                raise MalformedMessage("worker_id", f"{record.worker_id!r} under the key {key!r}")
        except MalformedMessage as error:
            if self._num_malformed_records == 0:
                logger.warning("malformed worker record: %s (further ones are only counted)", error)
            self._num_malformed_records += 1
            return
        self._core.worker_seen(record, revision)

    async def _tick(self) -> None:
        while True:
            self._core.bus_changed(is_connected=self._bus.is_connected)
            self._core.tick()
            self._prefixes.ask_for_unknown()
            self.act()
            await asyncio.sleep(_TICK_S)

    def _run(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(self._guarded(what, work)))

    async def _guarded(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:  # the boundary of a task that nobody awaits
            logger.exception("%s failed", what)
            self._on_failure(f"{what} failed")
