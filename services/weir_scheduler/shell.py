"""Connects a core to the bus while this process leads: messages in, commands out, time, the registry of workers."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

from opentelemetry.trace import Tracer

from weir.bus.codec import MalformedMessage, decode
from weir.bus.endpoint import BusEndpoint
from weir.bus.messages import (
    Ack,
    Cancel,
    Finish,
    Held,
    HeldReply,
    LeaderChanged,
    Prefilled,
    Submit,
    SubmitReply,
    WorkerRecord,
)
from weir.bus.prefix_news import AskPrefixes, PrefixChanged, PrefixSnapshot
from weir.bus.protocol import Bus, BusError, KvEntry
from weir.bus.subjects import WORKER_TTL_S, Subjects
from weir.core.clock import Clock
from weir.core.tasks import end_tasks
from weir.policy.seams import Policy
from weir.scheduling.core import SchedulerCore
from weir.scheduling.limits import CoreLimits
from weir_scheduler.command_sender import CommandSender
from weir_scheduler.counters_store import CountersStore

logger = logging.getLogger(__name__)

_ReplyT = TypeVar("_ReplyT")
_TICK_S = 0.1
_QUEUE_REPORT_S = 0.2
_SNAPSHOT_TIMEOUT_S = 2.0
_MAX_PENDING_PREFIXES = 1024


class Authority(Protocol):
    """What this process may do as a leader now."""

    @property
    def is_certain(self) -> bool:
        """While not, events are heard and nobody is told anything: another scheduler may lead."""
        ...

    @property
    def stuck_reason(self) -> str:
        """While there is one, nothing is taken or answered either, so that gateways see that nobody schedules."""
        ...


class SchedulerShell:
    """Runs one core. `on_failure` is called when it cannot go on."""

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        core: SchedulerCore,
        *,
        tracer: Tracer,
        clock: Clock,
        on_failure: Callable[[str], None],
        authority: Authority,
    ) -> None:
        self._bus = bus
        self._subjects = subjects
        self._core = core
        self._on_failure = on_failure
        self._authority = authority
        self.endpoint = BusEndpoint(bus, tracer)
        self._sender = CommandSender(self.endpoint, subjects, core, clock, self.act, tracer, self._may_command)
        self._counters = CountersStore(bus, subjects, core)
        self._tasks: list[asyncio.Task[None]] = []
        self._asking: set[asyncio.Task[None]] = set()
        """For snapshots of what arenas have cached."""
        self._num_malformed_records = 0

    async def start(self) -> None:
        """Returns when requests are heard. Raises BusError."""
        await self._counters.restore()
        workers = await self._bus.bucket(self._subjects.workers_bucket, ttl_s=WORKER_TTL_S)
        self._run("watching workers", self._watch_workers(workers.watch()))
        await self.endpoint.serve(self._subjects.reconcile, Held, self._on_held)
        await self.endpoint.serve(self._subjects.submit, Submit, self._on_submit)
        await self.endpoint.serve(self._subjects.cancel, Cancel, self._on_cancel)
        await self.endpoint.serve(self._subjects.prefilled, Prefilled, self._on_prefilled)
        await self.endpoint.serve(self._subjects.finish, Finish, self._on_finish)
        await self.endpoint.serve(
            self._subjects.prefixes, PrefixChanged, self._on_prefixes_changed, max_pending=_MAX_PENDING_PREFIXES
        )
        await self.endpoint.publish(self._subjects.leader_changed, LeaderChanged(self._core.epoch))
        self._run("ticking", self._tick())
        self._run("reporting queues", self._report_queues())
        self._run("saving counters", self._counters.keep())

    async def stop(self) -> None:
        await self.endpoint.close()
        await end_tasks([*self._tasks, *self._asking])
        await self._counters.save()
        await self._sender.close()

    def metrics(self) -> dict[str, float]:
        """Counters (`_total`) and gauges."""
        core, bus = self._core.metrics(), self.endpoint.metrics()
        malformed = bus["bus_malformed_total"] + self._num_malformed_records + core.get("worker_malformed_total", 0.0)
        return {
            **core,
            **_of_lanes(self._core.lane_metrics()),
            **bus,
            **self._counters.metrics(),
            **self._sender.metrics(),
            "malformed_messages_total": malformed,
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

    async def _on_submit(self, submit: Submit) -> SubmitReply | None:
        if self._authority.stuck_reason:
            return None
        reply = self._core.submit(submit)
        self.act()
        return reply

    async def _on_held(self, held: Held) -> HeldReply | None:
        reply = self._core.held(held)
        self.act()
        return self._unless_stuck(reply)

    async def _on_cancel(self, cancel: Cancel) -> Ack | None:
        self._core.cancel(cancel)
        return self._done()

    async def _on_prefilled(self, prefilled: Prefilled) -> None:
        self._core.prefilled(prefilled)
        self.act()

    async def _on_finish(self, finish: Finish) -> Ack | None:
        self._core.finish(finish)
        return self._done()

    def _done(self) -> Ack | None:
        self.act()
        return self._unless_stuck(Ack(self._core.epoch))

    def _unless_stuck(self, reply: _ReplyT) -> _ReplyT | None:
        return None if self._authority.stuck_reason else reply

    def _may_command(self) -> bool:
        return self._authority.is_certain

    def act(self) -> None:
        """Does what the core wants done now."""
        if not self._may_command():
            return
        for command in self._core.decide():
            self._sender.run(command)

    async def _on_prefixes_changed(self, message: PrefixChanged) -> None:
        """A hint, as its snapshot is: what is lost is asked for again, or missed without harm."""
        self._core.prefixes_changed(message)

    def _ask_for_unknown_prefixes(self) -> None:
        """One question a second and arena at most."""
        for arena_id in self._core.unknown_prefixes():
            task = asyncio.create_task(self._ask_prefixes(arena_id), name=f"prefixes of {arena_id}")
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def _ask_prefixes(self, arena_id: str) -> None:
        subject, question = self._subjects.prefixes_of(arena_id), AskPrefixes(arena_id)
        try:
            snapshot = await self.endpoint.ask(subject, question, PrefixSnapshot, timeout_s=_SNAPSHOT_TIMEOUT_S)
        except BusError as error:
            logger.debug("%s did not send its snapshot: %s", arena_id, error)
            return
        if snapshot.arena_id == arena_id:
            self._core.prefixes_replaced(snapshot)

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
            self._ask_for_unknown_prefixes()
            self.act()
            await asyncio.sleep(_TICK_S)

    async def _report_queues(self) -> None:
        """Five times a second. One that is lost is followed by another."""
        while True:
            try:
                if not self._authority.stuck_reason:
                    await self.endpoint.publish(self._subjects.queues, self._core.queue_report())
            except BusError as error:
                logger.debug("the report of queues was not sent: %s", error)
            await asyncio.sleep(_QUEUE_REPORT_S)

    def _run(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(self._guarded(what, work)))

    async def _guarded(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:  # the boundary of a task that nobody awaits
            logger.exception("%s failed", what)
            self._on_failure(f"{what} failed")


def _of_lanes(lanes: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Names such as `lane_in_flight{lane="batch"}`."""
    names = ("in_flight", "oldest_wait_s")
    return {f'lane_{name}{{lane="{lane}"}}': found[name] for lane, found in lanes.items() for name in names}
