"""A worker of this machine: its model from files, its arena from the transfer service, its bus from NATS.

What a worker is made of, and how the parts are connected, is the constructor of `WorkerShell`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from weir.bus.nats import NatsBus
from weir.bus.protocol import Bus
from weir.bus.subjects import Subjects
from weir.kv.memory.device import ArenaMemory, try_memory_kind
from weir.kv.messages import HandedOff
from weir.rpc.arena.client import ArenaAccess, ArenaClient, WorkerIdentity
from weir.runtime.address import find_unreachable
from weir.runtime.service import ServiceContext
from weir.worker.arena.arena import Arena
from weir.worker.config import WorkerConfig
from weir.worker.engine.model_loading import LoadedModel, ModelSpec, begin_loading, read_model_spec, start_in_thread
from weir.worker.requests.request_manager import RequestLimits
from weir.worker.role import Role, RoleParts
from weir.worker.shell import ShellOutside, WorkerShell

_log = logging.getLogger(__name__)
_BUS_CONNECT_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class WorkerModel:
    """What a worker process has whatever its role is. `load`: a runner over an arena's pages; may be called again."""

    spec: ModelSpec
    load: Callable[[ArenaMemory], LoadedModel]
    connect_bus: Callable[[str], Awaitable[Bus]]


async def load_worker_model(config: WorkerConfig) -> WorkerModel:
    """Weights begin to load at once, the shell waits for them. Libraries are imported when this returns.

    Raises ModelError, ExtraMissing, DeviceMissing.
    """
    reading = start_in_thread(lambda: read_model_spec(config), "model spec")
    loading = begin_loading(config, reading)
    spec = await asyncio.wrap_future(reading)
    await asyncio.to_thread(loading.wait_for_imports)

    async def connect_bus(name: str) -> Bus:
        return await NatsBus.connect(
            config.nats_url,
            name=name,
            timeout_s=_BUS_CONNECT_TIMEOUT_S,
            seed_file=config.nats_seed_file,
            inbox=Subjects(config.instance).inbox("worker"),
            ca_file=config.nats_ca_file,
        )

    return WorkerModel(spec, loading.over, connect_bus)


def make_shell(
    context: ServiceContext[WorkerConfig],
    model: WorkerModel,
    limits: RequestLimits,
    make_role: Callable[[RoleParts], Role],
) -> WorkerShell:
    """A worker of that model in one role, under the context's id."""
    config, spec = context.config, model.spec
    unreachable = find_unreachable(context.address, config.nats_url)
    if unreachable is not None:
        _log.warning("%s", unreachable)
    memory_kind = try_memory_kind(config.device)

    def make_arena(on_handed_off: Callable[[HandedOff], None]) -> Arena:
        return ArenaClient(
            config.arena_socket_path,
            WorkerIdentity(context.process_id, context.role, spec.page_bytes, spec.digest),
            on_handed_off,
            ArenaAccess(memory_kind.open if memory_kind is not None else None),
        )

    return WorkerShell(
        context,
        spec,
        limits,
        make_role,
        ShellOutside(make_arena, model.load, lambda: model.connect_bus(context.process_id)),
    )
