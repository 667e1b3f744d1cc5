"""The process of a worker: its parts connected, started and ended in order.

gateways <──> servicer <──> request manager ──> prefixes ──> engine host <──> engine thread
                             role                  │            │
                             page keeper <─────────┼── reports ─┘
                                  └────────────────┴──> arena (transfer service)

One connection to the bus serves the registry entry and the policy watch; it is opened and closed here.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

from weir.bus.messages import WorkerRecord
from weir.bus.protocol import Bus, BusError
from weir.bus.subjects import Subjects
from weir.core.clock import SystemClock
from weir.core.errors import InvalidRequest, Unavailable
from weir.engine.loop import InboxFull, LoopSettings
from weir.engine.messages import (
    EngineReport,
    FailAllSequences,
    Failure,
    FailureReason,
    SequenceEnded,
    SequenceKey,
    SetCost,
    SetPolicy,
)
from weir.engine.plan import ModelRunner
from weir.kv.arena.watermark import num_reservable_pages
from weir.kv.geometry import PAGE_TOKENS
from weir.kv.memory.device import ArenaMemory
from weir.kv.messages import HandedOff
from weir.policy.registry import PolicySpec
from weir.runtime.admin import Description
from weir.runtime.service import ServiceContext
from weir.wire.v1 import worker_pb2, worker_pb2_grpc
from weir.worker.arena.page_keeper import Arena, PageKeeper
from weir.worker.arena.prefixes import Prefixes
from weir.worker.config import WorkerConfig
from weir.worker.engine.cost_meter import CostMeter
from weir.worker.engine.engine_host import EngineHost
from weir.worker.engine.model_loading import LoadedModel, ModelSpec
from weir.worker.engine.policy_watch import PolicyWatch
from weir.worker.registry import RegistryEntry
from weir.worker.requests.commands import start_from_pb
from weir.worker.requests.finish_notifier import FinishNotifier
from weir.worker.requests.request_manager import RequestLimits, RequestManager
from weir.worker.requests.servicer import WorkerServicer
from weir.worker.requests.streams import GatewayStream, StreamHub
from weir.worker.role import Role, RoleParts

_log = logging.getLogger(__name__)
_INBOX_SIZE = 16_384
"""A sequence makes at most four commands, and both kinds of worker bound their sequences well below a quarter of it."""
_REGISTER_TIMEOUT_S = 60.0
_SWEEP_S = 0.5
_EXPECTED_S = 2.0
_FAILING_S = 1.0
_ENGINE_STOP_S = 3.0
_BUS_CLOSE_TIMEOUT_S = 2.0
_ConfigT = TypeVar("_ConfigT", bound=WorkerConfig)


class WorkerShell:
    """Implements `weir.runtime.service.Component`."""

    def __init__(
        self,
        context: ServiceContext[_ConfigT],
        model: ModelSpec,
        limits: RequestLimits,
        make_role: Callable[[RoleParts], Role],
        *,
        make_arena: Callable[[Callable[[HandedOff], None]], Arena],
        load_model: Callable[[ArenaMemory], LoadedModel],
        connect_bus: Callable[[], Awaitable[Bus]],
    ) -> None:
        """Made in the event loop; adds its servicer to the context's server. `load_model` runs in a thread of its own
        and may take seconds. `connect_bus` raises BusError; the bus is the shell's to close."""
        clock = SystemClock()
        self._context: ServiceContext[Any] = context
        self._config: WorkerConfig = context.config
        self._model = model
        self._load_model = load_model
        self._connect_bus = connect_bus

        self._host = EngineHost(LoopSettings(_INBOX_SIZE), clock, self._on_report)
        post = self._host.post
        self._arena = make_arena(self._on_handed_off)
        self._keeper = PageKeeper(self._arena, post, context.request_shutdown)
        self._prefixes = Prefixes(self._arena, self._keeper, post, context.request_shutdown)
        self._hub = StreamHub(clock)
        self._manager = RequestManager(limits, self._prefixes.post, self._hub, clock)
        self._finish_notifier = FinishNotifier(self._manager)
        parts = RoleParts(context.process_id, self._arena, self._keeper, self._prefixes, self._manager, post)
        self._role = make_role(parts)
        self._cost_meter = CostMeter(clock, must_decode=context.role != "prefill")
        subjects = Subjects(context.config.instance)
        self._registry_entry = RegistryEntry(subjects, self._record)
        self._policy_watch = PolicyWatch(subjects, lambda policy: post(SetPolicy(policy)))
        servicer = WorkerServicer(context.process_id, self._hub, self._manager, self._on_start)
        worker_pb2_grpc.add_WorkerServicer_to_server(servicer, context.grpc_server)

        self._bus: Bus | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._is_draining = False
        self._is_broken = False
        self._has_changed = asyncio.Event()

    async def start(self) -> None:
        """Returns when warmed up and registered. Raises Unavailable without a transfer service or a bus."""
        await self._arena.start()
        self._tasks.append(asyncio.create_task(self._watch_lease(), name="lease watch"))
        memory = self._arena.memory
        geometry = memory.segment.geometry
        longest = min(self._model.max_context_tokens, geometry.max_context_tokens)
        self._model = replace(self._model, max_context_tokens=longest)
        runner, warm_up = await asyncio.to_thread(self._make_runner, memory)
        batcher = self._role.make_batcher(memory.segment, self._model.batch_limits(self._config))
        await self._host.start(batcher, runner, warm_up)
        if self._config.policy:
            self._host.post(SetPolicy(PolicySpec.parse(self._config.policy).make()))
        self._keeper.start()
        self._tasks.append(asyncio.create_task(self._sweep(), name="sweep"))
        for task in self._tasks:
            task.add_done_callback(self._check_end)
        try:
            self._bus = await self._connect_bus()
        except BusError as error:
            raise Unavailable(str(error)) from error
        self._policy_watch.start(self._bus)
        await self._registry_entry.start(self._bus, _REGISTER_TIMEOUT_S)

    async def drain(self, deadline_s: float) -> None:
        """Running sequences end; those that have not by the deadline fail with DRAINING."""
        loop = asyncio.get_running_loop()
        ends_at_s = loop.time() + deadline_s
        self._is_draining = True
        self._manager.begin_drain()
        self._registry_entry.put_now()
        if self._is_broken:
            return
        await self._wait_for_expected(min(_EXPECTED_S, deadline_s / 4))
        try:
            async with asyncio.timeout(max(0.0, ends_at_s - _FAILING_S - loop.time())):
                await self._wait_quiet()
        except TimeoutError:
            _log.warning("%d sequences did not end in time", self._manager.num_live)
            self._prefixes.post(FailAllSequences(Failure(FailureReason.DRAINING, "this worker is shutting down")))
            try:
                async with asyncio.timeout(_FAILING_S):
                    await self._wait_quiet()
            except TimeoutError:
                _log.warning("%d sequences are left behind", self._manager.num_live)
        self._hub.finish()

    async def stop(self) -> None:
        """Everything goes back to the arena, unless a step still runs and may write there."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._policy_watch.stop()
        await self._registry_entry.stop()
        await self._close_bus()
        await self._role.stop()
        await self._prefixes.stop()
        has_stopped = await self._host.stop(_ENGINE_STOP_S)
        await self._keeper.stop()
        self._hub.close()
        if has_stopped:
            await self._arena.close()
        else:
            _log.error("a step still runs: the lease is left to the transfer service, which ends this process")

    @property
    def policy(self) -> str:
        """The name of the one that the engine's batches are made by; empty: none was set."""
        return self._host.report.policy

    def describe(self) -> Description:
        report = self._host.report
        counters = {
            name if name == "page_fingerprint" else f"{name}_total": float(count)
            for name, count in report.counters.items()
        }
        gauges = {
            "num_running": report.load.num_running,
            "num_waiting": report.load.num_waiting,
            "num_held_pages": report.load.num_held_pages,
            "num_free_pages": report.load.num_free_pages,
            "num_used_pages": report.load.num_used_pages,
            "num_filled_pages": report.load.num_filled_pages,
            "max_step_tokens": report.load.max_step_tokens,
            "num_live": self._manager.num_live,
            "num_gateways": self._hub.num_connected,
            "registry_failures_total": self._registry_entry.num_failures,
        }
        makers = (self._keeper, self._prefixes, self._role, self._policy_watch, self._cost_meter)
        metrics = counters | {name: value for maker in makers for name, value in maker.metrics().items()}
        return Description(
            {**metrics, **{name: float(value) for name, value in gauges.items()}}, report.integrity_errors
        )

    def _make_runner(self, memory: ArenaMemory) -> tuple[ModelRunner, Callable[[], None]]:
        """In a thread of its own."""
        loaded = self._load_model(memory)
        return self._role.make_runner(loaded, memory.segment), loaded.warm_up

    def _on_start(self, stream: GatewayStream, key: SequenceKey, start: worker_pb2.Start) -> None:
        """A prompt with a wrong field is refused alone: the other requests of its gateway go on."""
        try:
            params = start_from_pb(start, stream.gateway_id, self._model)
            self._role.on_start(stream, params, start.decode_worker_id)
        except InvalidRequest as error:
            _log.warning("gateway %s: request %s refused: %s", stream.gateway_id, key.request_id, error)
            stream.answer(SequenceEnded(key, failure=Failure(FailureReason.INTERNAL, str(error))))

    def _on_handed_off(self, handed_off: HandedOff) -> None:
        self._role.on_handed_off(handed_off)  # which is made after the arena

    def _on_report(self, report: EngineReport) -> None:
        try:
            step = report.timing.step if report.timing is not None else 0
            self._cost_meter.on_report(report)
            self._prefixes.on_report(report)
            self._finish_notifier.on_report(report, step, self._keeper.on_report(report))
            self._role.on_report(report)
        except Exception as error:  # noqa: BLE001 - the boundary of a callback: the report's events are lost
            _log.exception("a report of the engine could not be processed")
            self._break(f"a report of the engine could not be processed: {type(error).__name__}: {error}")
        self._has_changed.set()
        if report.fatal:
            self._break(report.fatal)

    def _record(self) -> WorkerRecord:
        """What the registry says of this worker now."""
        load, segment = self._host.report.load, self._arena.segment
        return WorkerRecord(
            worker_id=self._context.process_id,
            role=self._context.role,
            model=self._model.name,
            address=self._context.address,
            host_id=segment.arena_id,
            max_context_tokens=self._model.max_context_tokens,
            page_tokens=PAGE_TOKENS,
            num_arena_pages=num_reservable_pages(segment.geometry.num_pages),
            max_num_seqs=self._config.max_num_seqs,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            is_draining=self._is_draining,
            group=self._config.group,
            serves_locally=self._role.serves_locally,
            max_num_batched_tokens=load.max_step_tokens or self._config.max_num_batched_tokens,
            cost=self._cost_meter.cost(),
        )

    async def _close_bus(self) -> None:
        if self._bus is None:
            return
        try:
            async with asyncio.timeout(_BUS_CLOSE_TIMEOUT_S):
                await self._bus.close()
        except TimeoutError:
            _log.info("the connection to the bus did not close in time")

    async def _wait_for_expected(self, timeout_s: float) -> None:
        """A prefill worker may be computing for this one now: gives those hand-offs a moment to arrive."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._wait_while(lambda: self._manager.num_expected > 0)
        except TimeoutError:
            _log.info("%d sequences that were announced did not come", self._manager.num_expected)

    async def _wait_quiet(self) -> None:
        await self._wait_while(lambda: self._manager.num_live > 0)

    async def _wait_while(self, condition: Callable[[], bool]) -> None:
        """Looks again after every report of the engine and every sweep."""
        while condition():
            self._has_changed.clear()
            await self._has_changed.wait()

    async def _watch_lease(self) -> None:
        await self._arena.lost.wait()
        await self._host.stop(_ENGINE_STOP_S)  # at once: it must not write any more
        self._break("the lease on the arena is lost: another worker may own its pages by now")

    async def _sweep(self) -> None:
        posted_cost = None
        while True:
            self._manager.sweep()
            cost = self._cost_meter.cost()
            if cost is not None and cost != posted_cost:
                with contextlib.suppress(InboxFull):  # posted at a later sweep
                    self._host.post(SetCost(cost))
                    posted_cost = cost
            self._has_changed.set()
            await asyncio.sleep(_SWEEP_S)

    def _break(self, reason: str) -> None:
        """Nothing more can be computed here; gateways learn it by the end of their streams."""
        if self._is_broken:
            return
        self._is_broken = True
        _log.critical("%s", reason)
        self._context.request_shutdown(reason)

    def _check_end(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and task.exception() is not None:
            _log.critical("%s failed", task.get_name(), exc_info=task.exception())
            self._context.request_shutdown(f"{task.get_name()} failed")
