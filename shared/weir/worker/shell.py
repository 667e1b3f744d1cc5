"""The process of a worker: engine, arena, streams and registry put together, started and ended in order.

gateways <──> servicer <──> desk <──> engine host <──> engine thread
                             role         │
                                          └──> arena keeper <──> transfer service
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from weir.bus.messages import WorkerRecord
from weir.core.clock import SystemClock
from weir.engine.loop import InboxFull
from weir.engine.messages import EngineReport, FailAllSequences, Failure, FailureReason, SetCost, SetPolicy
from weir.kv.arena.watermark import num_reservable_pages
from weir.kv.geometry import PAGE_TOKENS
from weir.kv.memory.kinds import ArenaMemory
from weir.policy.registry import PolicySpec
from weir.runtime.admin import Description
from weir.worker.arena.page_keeper import Arena, PageKeeper
from weir.worker.arena.prefixes import Prefixes
from weir.worker.engine.cost_meter import CostMeter
from weir.worker.engine.engine_host import EngineHost
from weir.worker.engine.policy_watch import PolicyWatch
from weir.worker.registry import RegistryEntry
from weir.worker.requests.endings import FinishNotifier
from weir.worker.requests.request_manager import RequestManager
from weir.worker.requests.streams import StreamHub
from weir.worker.role import LoadedModel, Role, WorkerInfo

_log = logging.getLogger(__name__)
_REGISTER_TIMEOUT_S = 60.0
_SWEEP_S = 0.5
_EXPECTED_S = 2.0
_LAST_WORDS_S = 1.0
_ENGINE_STOP_S = 3.0


@dataclass(frozen=True)
class WorkerParts:
    """What a shell is made of."""

    arena: Arena
    keeper: PageKeeper
    prefixes: Prefixes
    endings: FinishNotifier
    host: EngineHost
    hub: StreamHub
    manager: RequestManager
    role: Role
    policy_watch: PolicyWatch


class WorkerShell:
    """Implements `weir.runtime.service.Component`."""

    def __init__(
        self,
        info: WorkerInfo,
        parts: WorkerParts,
        load_model: Callable[[ArenaMemory], LoadedModel],
        make_registration: Callable[[Callable[[], WorkerRecord]], RegistryEntry],
        request_shutdown: Callable[[str], None],
    ) -> None:
        """`load_model` runs in a thread of its own; it may take seconds."""
        self._info = info
        self._parts = parts
        self._load_model = load_model
        self._registration = make_registration(self._record)
        self._request_shutdown = request_shutdown
        self._tasks: list[asyncio.Task[None]] = []
        self._cost_meter = CostMeter(SystemClock(), must_decode=info.role != "prefill")
        self._is_draining = False
        self._is_broken = False
        self._has_changed = asyncio.Event()

    async def start(self) -> None:
        """Returns when warmed up and registered."""
        parts = self._parts
        await parts.arena.start()
        self._tasks.append(asyncio.create_task(self._watch_lease(), name="lease watch"))
        model = await asyncio.to_thread(self._load_model, parts.arena.memory)
        await parts.host.start(parts.role.make_batcher(parts.arena.segment), model.runner, model.warm_up)
        if self._info.policy:
            parts.host.post(SetPolicy(PolicySpec.parse(self._info.policy).make()))
        parts.keeper.start()
        parts.policy_watch.start()
        self._tasks.append(asyncio.create_task(self._sweep(), name="sweep"))
        for task in self._tasks:
            task.add_done_callback(self._check_end)
        await self._registration.start(_REGISTER_TIMEOUT_S)

    async def drain(self, deadline_s: float) -> None:
        """Running sequences end; what has not by the deadline is told so and ends with DRAINING."""
        loop = asyncio.get_running_loop()
        ends_at_s = loop.time() + deadline_s
        self._is_draining = True
        self._parts.manager.begin_drain()
        self._registration.put_now()
        if self._is_broken:
            return
        await self._wait_for_expected(min(_EXPECTED_S, deadline_s / 4))
        try:
            async with asyncio.timeout(max(0.0, ends_at_s - _LAST_WORDS_S - loop.time())):
                await self._wait_quiet()
        except TimeoutError:
            _log.warning("%d sequences did not end in time", self._parts.manager.num_live)
            self._parts.prefixes.post(FailAllSequences(Failure(FailureReason.DRAINING, "this worker is shutting down")))
            try:
                async with asyncio.timeout(_LAST_WORDS_S):
                    await self._wait_quiet()
            except TimeoutError:
                _log.warning("%d sequences are left behind", self._parts.manager.num_live)
        self._parts.hub.finish()

    async def stop(self) -> None:
        """Everything goes back to the arena, unless a step still runs and may write there."""
        parts = self._parts
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await parts.policy_watch.stop()
        await self._registration.stop()
        await parts.role.stop()
        await parts.prefixes.stop()
        has_stopped = await parts.host.stop(_ENGINE_STOP_S)
        await parts.keeper.stop()
        parts.hub.close()
        if has_stopped:
            await parts.arena.close()
        else:
            _log.error("a step still runs: the lease is left to the transfer service, which ends this process")

    @property
    def policy(self) -> str:
        """By which the engine makes its batches; empty: no scheduler has said any."""
        return self._parts.host.report.policy

    def on_report(self, report: EngineReport) -> None:
        """For the engine host."""
        try:
            self._take_in(report)
        except Exception as error:  # noqa: BLE001 - the boundary of a callback: what was lost cannot be told any more
            _log.exception("a report of the engine could not be taken in")
            self._break(f"a report of the engine could not be taken in: {type(error).__name__}: {error}")
        self._has_changed.set()
        if report.fatal:
            self._break(report.fatal)

    def describe(self) -> Description:
        report, parts = self._parts.host.report, self._parts
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
            "num_live": parts.manager.num_live,
            "num_gateways": parts.hub.num_connected,
            "registry_failures_total": self._registration.num_failures,
        }
        makers = (parts.keeper, parts.prefixes, parts.role, parts.policy_watch, self._cost_meter)
        metrics = counters | {name: value for maker in makers for name, value in maker.metrics().items()}
        return Description(
            {**metrics, **{name: float(value) for name, value in gauges.items()}}, report.integrity_errors
        )

    def _take_in(self, report: EngineReport) -> None:
        step = report.timing.step if report.timing is not None else 0
        self._cost_meter.on_report(report)
        self._parts.prefixes.on_report(report)
        self._parts.endings.tell(report, step, self._parts.keeper.on_report(report))
        self._parts.role.on_report(report)

    def _record(self) -> WorkerRecord:
        info, load = self._info, self._parts.host.report.load
        segment = self._parts.arena.segment
        return WorkerRecord(
            worker_id=info.worker_id,
            role=info.role,
            model=info.model,
            address=info.address,
            host_id=segment.arena_id,
            max_context_tokens=min(info.max_context_tokens, segment.geometry.max_context_tokens),
            page_tokens=PAGE_TOKENS,
            num_arena_pages=num_reservable_pages(segment.geometry.num_pages),
            max_num_seqs=info.max_num_seqs,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            is_draining=self._is_draining,
            group=info.group,
            serves_locally=info.serves_locally,
            max_num_batched_tokens=load.max_step_tokens or info.max_num_batched_tokens,
            cost=self._cost_meter.cost(),
        )

    async def _wait_for_expected(self, timeout_s: float) -> None:
        """What a prefill worker computes for this one now should not be lost for a moment's patience."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._wait_while(lambda: self._parts.manager.num_expected > 0)
        except TimeoutError:
            _log.info("%d sequences that were announced did not come", self._parts.manager.num_expected)

    async def _wait_quiet(self) -> None:
        await self._wait_while(lambda: self._parts.manager.num_live > 0)

    async def _wait_while(self, condition: Callable[[], bool]) -> None:
        """Looks again after every report of the engine and every sweep."""
        while condition():
            self._has_changed.clear()
            await self._has_changed.wait()

    async def _watch_lease(self) -> None:
        await self._parts.arena.lost.wait()
        await self._parts.host.stop(_ENGINE_STOP_S)  # at once: it must not write any more
        self._break("the lease on the arena is lost: another worker may own its pages by now")

    async def _sweep(self) -> None:
        told_cost = None
        while True:
            self._parts.manager.sweep()
            cost = self._cost_meter.cost()
            if cost is not None and cost != told_cost:
                with contextlib.suppress(InboxFull):  # told at a later sweep
                    self._parts.host.post(SetCost(cost))
                    told_cost = cost
            self._has_changed.set()
            await asyncio.sleep(_SWEEP_S)

    def _break(self, reason: str) -> None:
        """Nothing more can be computed here; whoever waits learns it by the end of its stream."""
        if self._is_broken:
            return
        self._is_broken = True
        _log.critical("%s", reason)
        self._request_shutdown(reason)

    def _check_end(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and task.exception() is not None:
            _log.critical("%s failed", task.get_name(), exc_info=task.exception())
            self._request_shutdown(f"{task.get_name()} failed")
