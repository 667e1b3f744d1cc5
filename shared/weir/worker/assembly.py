"""Puts a worker together from its configuration and its role."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from weir.bus.messages import WorkerRecord
from weir.bus.nats import NatsBus
from weir.bus.protocol import Bus
from weir.bus.subjects import Subjects
from weir.core.clock import SystemClock
from weir.engine.batching.batcher import BatchLimits
from weir.engine.loop import LoopSettings
from weir.engine.messages import Command, EngineReport, SetPolicy
from weir.kv.memory.kinds import ArenaMemory, try_memory_kind
from weir.kv.messages import HandedOff
from weir.model.architecture import ModelConfig
from weir.model.files.config import load_model_config
from weir.model.files.digest import model_digest
from weir.model.files.source import ModelSource, resolve_model
from weir.model.precision import choose_arithmetic, page_geometry
from weir.policy.seams import Policy
from weir.rpc.arena.client import ArenaClient
from weir.runtime.service import ServiceContext
from weir.wire.v1 import worker_pb2_grpc
from weir.worker.arena.page_keeper import Arena, PageKeeper
from weir.worker.arena.prefixes import Prefixes
from weir.worker.config import WorkerConfig
from weir.worker.engine.engine_host import EngineHost
from weir.worker.engine.model_loading import ArenaRunner, begin_loading
from weir.worker.engine.policy_watch import PolicyWatch
from weir.worker.registry import RegistryEntry
from weir.worker.requests.convert import ModelLimits
from weir.worker.requests.endings import FinishNotifier
from weir.worker.requests.request_manager import RequestLimits, RequestManager
from weir.worker.requests.servicer import WorkerServicer
from weir.worker.requests.streams import StreamHub
from weir.worker.role import LoadedModel, Role, WorkerInfo
from weir.worker.shell import WorkerParts, WorkerShell

INBOX_SIZE = 16_384
"""A sequence makes at most four commands, and both kinds of worker bound their sequences well below a quarter of it."""
_BUS_CONNECT_TIMEOUT_S = 2.0
_ConfigT = TypeVar("_ConfigT", bound=WorkerConfig)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What can be known of a model without loading it."""

    source: ModelSource
    config: ModelConfig
    digest: str
    page_bytes: int

    @property
    def limits(self) -> ModelLimits:
        return ModelLimits(self.config.vocab_size, self.config.max_context_tokens, self.digest)

    def batch_limits(self, config: WorkerConfig, chunk_tokens: int) -> BatchLimits:
        return BatchLimits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            chunk_tokens=chunk_tokens,
            max_context_tokens=self.config.max_context_tokens,
            vocab_size=self.config.vocab_size,
            max_stall_s=config.max_stall_s,
            target_step_s=config.target_step_ms / 1e3 or math.inf,
        )


@dataclass(frozen=True)
class RoleParts:
    """What a role may use."""

    arena: Arena
    keeper: PageKeeper
    prefixes: Prefixes
    manager: RequestManager
    post: Callable[[Command], None]


@dataclass(frozen=True)
class WorkerDependencies:
    """Everything of a worker that lies outside its process."""

    make_arena: Callable[[Callable[[HandedOff], None]], Arena]
    make_registration: Callable[[Callable[[], WorkerRecord]], RegistryEntry]
    make_policy_watch: Callable[[Callable[[Policy], None]], PolicyWatch]
    load_model: Callable[[ArenaMemory], LoadedModel]


async def build_worker(
    context: ServiceContext[_ConfigT],
    limits: RequestLimits,
    over_arena: Callable[[ArenaRunner, ArenaMemory], LoadedModel],
    make_role: Callable[[RoleParts, ModelShape], Role],
    *,
    serves_locally: bool = False,
) -> WorkerShell:
    """A worker of the model that its configuration names. Weights begin to load at once, the shell waits for them.
    Libraries are imported when this returns.

    `over_arena` finishes the runner, in a thread of its own before the engine's begins. Raises ModelError,
    ExtraMissing, DeviceMissing.
    """
    config = context.config
    loading = begin_loading(config)
    model = await asyncio.to_thread(_read_model_facts, config)
    await asyncio.to_thread(loading.wait_for_imports)
    return assemble(
        context,
        _info_of(context, model, serves_locally=serves_locally),
        limits,
        _dependencies_of(context, model, lambda arena: over_arena(loading.over(arena), arena)),
        lambda parts: make_role(parts, model),
    )


def assemble(
    context: ServiceContext[_ConfigT],
    info: WorkerInfo,
    limits: RequestLimits,
    dependencies: WorkerDependencies,
    make_role: Callable[[RoleParts], Role],
) -> WorkerShell:
    """The component of a worker; its servicer is added to the context's server. Call it in the event loop."""

    # Both ends of these two calls need each other: they are made before what they call, and called after.
    def on_report(report: EngineReport) -> None:
        shell.on_report(report)

    def on_handed_off(handed_off: HandedOff) -> None:
        role.on_handed_off(handed_off)

    clock = SystemClock()
    hub = StreamHub(clock)
    host = EngineHost(LoopSettings(INBOX_SIZE), clock, on_report)
    arena = dependencies.make_arena(on_handed_off)
    keeper = PageKeeper(arena, host.post, context.request_shutdown)
    prefixes = Prefixes(arena, keeper, host.post, context.request_shutdown)
    manager = RequestManager(limits, prefixes.post, hub, clock)
    policy_watch = dependencies.make_policy_watch(lambda policy: host.post(SetPolicy(policy)))
    role = make_role(RoleParts(arena, keeper, prefixes, manager, host.post))
    shell = WorkerShell(
        info,
        WorkerParts(arena, keeper, prefixes, FinishNotifier(manager), host, hub, manager, role, policy_watch),
        dependencies.load_model,
        dependencies.make_registration,
        context.request_shutdown,
    )
    servicer = WorkerServicer(info.worker_id, hub, manager, role.on_start)
    worker_pb2_grpc.add_WorkerServicer_to_server(servicer, context.grpc_server)
    return shell


def _read_model_facts(config: WorkerConfig) -> ModelShape:
    """Reads every byte of the weights once, for their digest: call it in a thread. Raises ModelError."""
    source = resolve_model(config.model_reference)
    model = load_model_config(source)
    pages = page_geometry(model, choose_arithmetic(config.precision, model, config.device))
    digest = model_digest(source, config.precision, config.device)
    return ModelShape(source, model, digest, pages.page_bytes)


def _info_of(context: ServiceContext[_ConfigT], model: ModelShape, *, serves_locally: bool) -> WorkerInfo:
    """What the registry says of this worker."""
    return WorkerInfo(
        worker_id=context.process_id,
        role=context.role,
        model=model.source.name,
        address=context.address,
        max_context_tokens=model.config.max_context_tokens,
        max_num_seqs=context.config.max_num_seqs,
        max_num_batched_tokens=context.config.max_num_batched_tokens,
        group=context.config.group,
        policy=context.config.policy,
        serves_locally=serves_locally,
    )


def _dependencies_of(
    context: ServiceContext[_ConfigT], model: ModelShape, load_model: Callable[[ArenaMemory], LoadedModel]
) -> WorkerDependencies:
    """The real ones."""
    config = context.config
    memory_kind = try_memory_kind(config.device)

    async def connect() -> Bus:
        return await NatsBus.connect(config.nats_url, name=context.process_id, timeout_s=_BUS_CONNECT_TIMEOUT_S)

    return WorkerDependencies(
        make_arena=lambda on_handed_off: ArenaClient(
            config.arena_socket_path,
            context.process_id,
            context.role,
            model.page_bytes,
            model.digest,
            on_handed_off,
            memory_kind.open if memory_kind is not None else None,
        ),
        make_registration=lambda make_record: RegistryEntry(connect, Subjects(config.instance), make_record),
        make_policy_watch=lambda on_policy: PolicyWatch(connect, Subjects(config.instance), on_policy),
        load_model=load_model,
    )
