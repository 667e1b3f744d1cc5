"""The process of a worker: its parts connected, started and ended in order.

gateways <──> servicer <──> request manager ──> grammars ──> prefixes ──> engine host <──> engine thread
                             role                               │            │
                             page keeper <──────────────────────┼── reports ─┘
                                  └─────────────────────────────┴──> arena (transfer service)
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from weir.bus.configuration import WorkerRules
from weir.bus.messages import WorkerRecord
from weir.bus.protocol import Bus
from weir.bus.subjects import Subjects
from weir.core.clock import Clock, SystemClock
from weir.core.errors import InvalidRequest, told_to_others
from weir.engine.loop import EngineLoop, InboxFull, LoopSettings
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
from weir.kv.geometry import PAGE_TOKENS, most_pages_read, num_reservable_pages
from weir.kv.memory.device import ArenaMemory
from weir.kv.messages import HandedOff
from weir.policy.registry import PolicySpec
from weir.runtime.admin import Description
from weir.runtime.service import ServiceContext
from weir.wire.v1 import worker_pb2
from weir.worker.arena.arena import Arena
from weir.worker.arena.page_keeper import PageKeeper
from weir.worker.arena.prefixes import Prefixes
from weir.worker.bounds import RunningBounds
from weir.worker.bus_link import BusLink
from weir.worker.config import WorkerConfig
from weir.worker.engine.cost_meter import CostMeter
from weir.worker.engine.engine_host import EngineHost, MakeEngine
from weir.worker.engine.gpu_meter import GpuMeter, try_gpu_meter
from weir.worker.engine.model_loading import LoadedModel, ModelSpec
from weir.worker.engine.step_histograms import StepHistograms
from weir.worker.engine.step_ring import StepRing
from weir.worker.requests.commands import start_from_pb
from weir.worker.requests.drain import Duty, Untaken, WorkerDrain
from weir.worker.requests.end_releases import EndReleases
from weir.worker.requests.grammars import WorkerGrammars
from weir.worker.requests.request_manager import RequestLimits, RequestManager
from weir.worker.requests.servicer import WorkerServicer
from weir.worker.requests.stagings import Stagings
from weir.worker.requests.streams import GatewayStream, StreamHub
from weir.worker.role import Role, RoleParts
from weir.worker.tasks import WorkerTasks

_log = logging.getLogger(__name__)
_INBOX_SIZE = 16_384
"""A sequence makes at most four commands, and both kinds of worker bound their sequences well below a quarter of it."""
_SWEEP_S = 0.5
_EXPECTED_S = 2.0
_FAILING_S = 1.0
_ENGINE_STOP_S = 3.0
_KEPT_ENDS_SHARE = 4
"""A worker keeps ends in one of so many of the arena's slots at most."""
_ConfigT = TypeVar("_ConfigT", bound=WorkerConfig)


@dataclass(frozen=True)
class ShellOutside:
    """What a shell reaches the outside by. `load_model` runs in a thread of its own and may take seconds. `connect_bus`
    raises BusError; the bus is closed by `stop`."""

    make_arena: Callable[[Callable[[HandedOff], None]], Arena]
    load_model: Callable[[ArenaMemory], LoadedModel]
    connect_bus: Callable[[], Awaitable[Bus]]
    clock: Clock = field(default_factory=SystemClock)
    make_engine: MakeEngine = EngineLoop


class WorkerShell:
    """Implements `weir.runtime.service.Component`."""

    def __init__(
        self,
        context: ServiceContext[_ConfigT],
        model: ModelSpec,
        limits: RequestLimits,
        make_role: Callable[[RoleParts], Role],
        outside: ShellOutside,
    ) -> None:
        """Made in the event loop."""
        clock, shut_down = outside.clock, context.request_shutdown
        self._context: ServiceContext[Any] = context
        self._config: WorkerConfig = context.config
        self._model = model
        self._load_model = outside.load_model
        self._gpu_meter: GpuMeter | None = None

        self._host = EngineHost(
            LoopSettings(_INBOX_SIZE, async_scheduling=self._config.is_async_scheduling),
            clock,
            outside.make_engine,
            self._on_report,
        )
        post = self._host.post
        self._arena = outside.make_arena(self._on_handed_off)
        # Kept: the registry has them until after the arena has closed.
        self._arena_id, self._num_arena_pages, self._page_bytes = "", 0, 0
        self._keeper = PageKeeper(self._arena, post, shut_down)
        most_ahead = _most_pages_ahead(model, self._config)
        self._prefixes = Prefixes(self._arena, self._keeper, post, shut_down, most_ahead)
        self._hub = StreamHub(clock)
        self._grammars = WorkerGrammars(model.vocab_size, self._prefixes.post, shut_down)
        self._manager = RequestManager(limits, self._grammars.post, self._hub, clock)
        self._end_releases = EndReleases(
            post, self._manager.is_end_sent, clock, kept_s=limits.ended_kept_s, max_kept_s=limits.max_ended_kept_s
        )
        self._role = make_role(
            RoleParts(context.process_id, self._arena, self._keeper, self._prefixes, self._manager, post, shut_down)
        )
        self._bounds = RunningBounds(context.process_id, context.config, post)
        self._step_histograms = StepHistograms()
        self._step_ring = StepRing(clock)
        self._cost_meter = CostMeter(clock, must_decode=context.role != "prefill")
        self._bus_link = BusLink(
            outside.connect_bus,
            Subjects(context.config.instance),
            self._record,
            on_policy=lambda policy: self._host.post(SetPolicy(policy)),
            on_rules=self._follow_rules,
        )
        self._stagings = Stagings(self._arena.stage, shut_down)
        self.servicer = WorkerServicer(context.process_id, self._hub, self._manager, self._stagings, self._on_start)

        self._tasks = WorkerTasks(shut_down)
        self._early_hand_offs: list[HandedOff] | None = []
        """What came before the engine runs, at most one a slot of the arena; None from then on."""
        self._drain = WorkerDrain(self._manager, self._role.hand_over, self._interrupt, self._on_duty, shut_down)
        self._is_broken = False
        self.has_let_go = False
        """After `stop`: whether it writes nothing into the arena any more."""

    async def start(self, *, is_spare: bool = False) -> None:
        """Returns when warmed up and registered; one that `is_spare` is drained then. Raises Unavailable without a
        transfer service or a bus."""
        await self._arena.start()
        self._tasks.spawn(self._watch_lease(), "lease watch")
        memory = self._arena.memory
        geometry = memory.segment.geometry
        self._arena_id, self._num_arena_pages = memory.segment.arena_id, num_reservable_pages(geometry.num_pages)
        self._page_bytes = geometry.page_bytes
        longest = min(self._model.max_context_tokens, geometry.max_context_tokens)
        self._model = replace(self._model, max_context_tokens=longest)
        runner, warm_up = await asyncio.to_thread(self._make_runner, memory)
        # Only what decode workers leave is adopted, so that nobody would read the ends of others.
        is_adoptable = self._context.role == "decode"
        max_kept_ends = max(1, geometry.num_slots // _KEPT_ENDS_SHARE) if is_adoptable else 0
        batch_limits = replace(self._model.batch_limits(self._config), max_kept_ends=max_kept_ends)
        batcher = self._role.make_batcher(memory.segment, batch_limits)
        await self._host.start(batcher, runner, warm_up)
        early, self._early_hand_offs = self._early_hand_offs or [], None
        for handed_off in early:
            self._role.on_handed_off(handed_off)
        if self._config.policy:
            self._host.post(SetPolicy(PolicySpec.parse(self._config.policy).make()))
        self._keeper.start()
        self._tasks.spawn(self._sweep(), "sweep")
        if is_spare:
            self._drain.start_drained()
            self._arena.set_draining(is_draining=True)
        await self._bus_link.start()

    def begin_drain(self, grace_s: float, *, is_spare: bool = False) -> None:
        """Takes nothing new; other workers go on with what is here. What nobody takes, and what has not ended after the
        grace period, is interrupted. `is_spare`: the planner may have it take work again."""
        self._drain.begin(grace_s)
        self._drain.mark_spare(is_spare=is_spare)

    async def empty(self, grace_s: float) -> None:
        """As `begin_drain`; returns when drained, soon after the grace period at the latest."""
        await self._drain.finish(grace_s)

    def end_drain(self) -> None:
        """Takes work again."""
        self._drain.end()

    @property
    def duty(self) -> Duty:
        return self._drain.duty

    async def drain(self, deadline_s: float) -> None:
        """Before the process ends. Running sequences are handed over, or end; those that have not by the deadline are
        left in the arena, if another worker can go on with them, and else fail with DRAINING."""
        if self._is_broken:
            self._drain.begin(0.0)
            return
        expected_s = min(_EXPECTED_S, deadline_s / 4)
        await self._drain.finish(max(0.0, deadline_s - _FAILING_S), expected_s, Untaken.LEFT)
        self._hub.finish()

    async def stop(self) -> None:
        """Everything goes back to the arena, unless a step still runs and may write there."""
        await self._tasks.stop()
        await self._drain.stop()
        await self._stagings.stop()
        await self._role.stop()
        await self._grammars.stop()
        await self._prefixes.stop()
        self.has_let_go = await self._host.stop(_ENGINE_STOP_S)
        await self._keeper.stop()
        self._hub.close()
        if self.has_let_go:
            await self._arena.close()
        else:
            _log.error("a step still runs: the lease is left to the transfer service, which ends this process")
        await self._bus_link.stop()  # last: a bus that hangs keeps nobody's pages

    def describe(self) -> Description:
        report = self._host.report
        counters = {
            name if name == "page_fingerprint" else f"{name}_total": float(count)
            for name, count in report.counters.items()
        }
        gauges = asdict(report.load) | {"num_live": self._manager.num_live, "num_gateways": self._hub.num_connected}
        gauges |= {"num_unclaimed": self._manager.num_unclaimed, "claimed_total": self._manager.num_claimed}
        gauges |= {f"is_{duty.value}": self._drain.duty is duty for duty in (Duty.DRAINING, Duty.DRAINED)}
        metrics = counters | {name: float(value) for name, value in gauges.items()}
        for maker in (
            self._keeper,
            self._prefixes,
            self._grammars,
            self._stagings,
            self._role,
            self._bus_link,
            self._bounds,
            self._cost_meter,
        ):
            metrics |= maker.metrics()
        if self._gpu_meter is not None:
            metrics |= self._gpu_meter.metrics()
        histograms = (*self._step_histograms.figures(), *self._role.histograms())
        return Description(
            metrics, lambda: report.integrity_errors, histograms=histograms, list_steps=self._step_ring.newest
        )

    def _follow_rules(self, rules: WorkerRules) -> None:
        """The registry says it at once: the scheduler places by these bounds."""
        self._bounds.follow(rules)
        self._bus_link.put_now()

    def _make_runner(self, memory: ArenaMemory) -> tuple[ModelRunner, Callable[[], None]]:
        """In a thread of its own."""
        loaded = self._load_model(memory)
        self._gpu_meter = try_gpu_meter(self._config.device)
        runner = self._role.make_runner(loaded, memory.segment)
        return self._grammars.masking(runner, loaded.grammar_engine), loaded.warm_up

    def _on_start(self, stream: GatewayStream, key: SequenceKey, start: worker_pb2.Start) -> None:
        """A prompt with a wrong field is refused alone: the other requests of its gateway go on."""
        try:
            prompt = start_from_pb(start, stream.gateway_id, self._model)
            self._role.on_start(stream, prompt, start.decode_worker_id)
        except InvalidRequest as error:
            _log.warning("gateway %s: request %s refused: %s", stream.gateway_id, key.request_id, told_to_others(error))
            stream.answer(SequenceEnded(key, failure=Failure(FailureReason.INTERNAL, str(error))))

    def _on_handed_off(self, handed_off: HandedOff) -> None:
        if self._early_hand_offs is not None:
            self._early_hand_offs.append(handed_off)
        else:
            self._role.on_handed_off(handed_off)  # which is made after the arena

    def _on_report(self, report: EngineReport) -> None:
        try:
            self._cost_meter.on_report(report)
            self._step_ring.observe(report)
            if report.timing is not None:
                self._step_histograms.observe(report.timing)
            self._prefixes.on_report(report)
            self._manager.on_report(report, self._keeper.on_report(report))
            self._role.on_report(report)
            self._end_releases.on_report(report)
        except Exception as error:  # noqa: BLE001 - the boundary of a callback: the report's events are lost
            _log.exception("a report of the engine could not be processed")
            self._break(f"a report of the engine could not be processed: {type(error).__name__}: {error}")
        if report.events or report.timing is not None:  # else it may but answer what a drain asked
            self._drain.look_again()
        if report.fatal:
            self._break(report.fatal)

    def _record(self) -> WorkerRecord:
        """What the registry says of this worker now."""
        load = self._host.report.load
        return WorkerRecord(
            worker_id=self._context.process_id,
            role=self._context.role,
            model=self._model.name,
            address=self._context.address,
            host_id=self._arena_id,
            max_context_tokens=self._model.max_context_tokens,
            page_tokens=PAGE_TOKENS,
            num_arena_pages=self._num_arena_pages,
            max_num_seqs=self._bounds.now.max_num_seqs,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            is_draining=self._drain.duty is not Duty.SERVING,
            is_drained=self._drain.duty is Duty.DRAINED,
            is_spare=self._drain.is_spare,
            num_live=self._manager.num_live + self._manager.num_expected,
            group=self._config.group,
            serves_locally=self._role.serves_locally,
            max_num_batched_tokens=load.max_step_tokens or self._bounds.now.max_num_batched_tokens,
            cost=self._cost_meter.cost(),
            most_num_seqs=self._bounds.most.max_num_seqs,
            most_num_batched_tokens=self._bounds.most.max_num_batched_tokens,
            arena_address=f"unix:{self._config.arena_socket_path}",
            pages_address=self._arena.pages_address,
            page_bytes=self._page_bytes,
        )

    def _on_duty(self) -> None:
        self._arena.set_draining(is_draining=self._drain.duty is not Duty.SERVING)
        self._bus_link.put_now()

    def _interrupt(self) -> None:
        """Gateways have what was running here go on elsewhere, after the tokens that they have."""
        with contextlib.suppress(InboxFull):  # called again
            self._grammars.post(FailAllSequences(Failure(FailureReason.DRAINING, "this worker drains")))

    async def _watch_lease(self) -> None:
        await self._arena.lost.wait()
        await self._host.stop(_ENGINE_STOP_S)  # at once: it must not write any more
        self._break("the lease on the arena is lost: another worker may own its pages by now")

    async def _sweep(self) -> None:
        posted_cost = None
        while True:
            self._manager.sweep()
            self._end_releases.sweep()
            cost = self._cost_meter.cost()
            if cost is not None and cost != posted_cost:
                with contextlib.suppress(InboxFull):  # posted at a later sweep
                    self._host.post(SetCost(cost))
                    posted_cost = cost
            await asyncio.sleep(_SWEEP_S)

    def _break(self, reason: str) -> None:
        """Nothing more can be computed here; gateways learn it by the end of their streams."""
        if self._is_broken:
            return
        self._is_broken = True
        _log.critical("%s", reason)
        self._context.request_shutdown(reason)


def _most_pages_ahead(model: ModelSpec, config: WorkerConfig) -> int | None:
    """That a prompt behind windows needs at a time; None: all of its own."""
    return None if model.window is None else most_pages_read(model.window, config.chunk_tokens)
