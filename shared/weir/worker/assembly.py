"""A worker of this machine: its model from files, its arena from the transfer service, its bus from NATS.

What a worker is made of, and how the parts are connected, is the constructor of `WorkerShell`.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from weir.bus.nats import NatsBus
from weir.bus.protocol import Bus
from weir.kv.memory.device import try_memory_kind
from weir.kv.messages import HandedOff
from weir.rpc.arena.client import ArenaClient
from weir.runtime.address import find_unreachable
from weir.runtime.service import ServiceContext
from weir.worker.arena.arena import Arena
from weir.worker.config import WorkerConfig
from weir.worker.engine.model_loading import begin_loading, read_model_spec
from weir.worker.requests.request_manager import RequestLimits
from weir.worker.role import Role, RoleParts
from weir.worker.shell import WorkerShell

_log = logging.getLogger(__name__)
_BUS_CONNECT_TIMEOUT_S = 60.0
_ConfigT = TypeVar("_ConfigT", bound=WorkerConfig)


async def build_worker(
    context: ServiceContext[_ConfigT], limits: RequestLimits, make_role: Callable[[RoleParts], Role]
) -> WorkerShell:
    """A worker of the model that its configuration names. Weights begin to load at once, the shell waits for them.
    Libraries are imported when this returns. Raises ModelError, ExtraMissing, DeviceMissing.
    """
    config = context.config
    unreachable = find_unreachable(context.address, config.nats_url)
    if unreachable is not None:
        _log.warning("%s", unreachable)
    loading = begin_loading(config)
    model = await asyncio.to_thread(read_model_spec, config)
    await asyncio.to_thread(loading.wait_for_imports)
    memory_kind = try_memory_kind(config.device)

    def make_arena(on_handed_off: Callable[[HandedOff], None]) -> Arena:
        return ArenaClient(
            config.arena_socket_path,
            context.process_id,
            context.role,
            model.page_bytes,
            model.digest,
            on_handed_off,
            memory_kind.open if memory_kind is not None else None,
        )

    async def connect_bus() -> Bus:
        return await NatsBus.connect(config.nats_url, name=context.process_id, timeout_s=_BUS_CONNECT_TIMEOUT_S)

    return WorkerShell(
        context,
        model,
        limits,
        make_role,
        make_arena=make_arena,
        load_model=loading.over,
        connect_bus=connect_bus,
    )
