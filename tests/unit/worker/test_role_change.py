"""A worker process that changes its role: another shell over the same model, under another id; streams find it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest
from opentelemetry.trace import NoOpTracer
from tests.unit.hubs import made_hub
from tests.unit.worker.in_memory_arena import InMemoryArena, InMemoryArenaClient
from tests.unit.worker.rig import (
    GATEWAY,
    INSTANCE,
    MAX_CONTEXT_TOKENS,
    NUM_PAGES,
    NUM_SLOTS,
    VOCAB_SIZE,
    Stream,
    eventually,
    expected_tokens,
    start_command,
)

from weir.bus.in_memory import InMemoryBus, InMemoryHub
from weir.bus.messages import SetDrain, SetRole
from weir.engine.memory.swapping import HostPages
from weir.kv.geometry import ArenaGeometry
from weir.kv.memory.device import ArenaMemory
from weir.kv.messages import HandedOff
from weir.rpc.channel import make_channel
from weir.rpc.server import ErrorGuard, make_server
from weir.runtime.admin import AdminService, Description, Identity
from weir.runtime.config import ConfigError
from weir.runtime.service import ServiceContext
from weir.testing.runner import HashRunner
from weir.worker.engine.model_loading import LoadedModel, ModelSpec
from weir.worker.process import WorkerProcess
from weir.worker.role import RoleParts
from weir.worker.roles.config import DecodeConfig, PrefillConfig
from weir.worker.roles.kinds import KINDS, config_for
from weir.worker.shell import ShellOutside, WorkerShell

WORKER = "prefill-0-11111111"


@dataclass
class World:
    """One process over an arena and a bus in memory. `fails_with`: what the next shell's load raises."""

    arena: InMemoryArena = field(
        default_factory=lambda: InMemoryArena(ArenaGeometry(64, NUM_PAGES, NUM_SLOTS, MAX_CONTEXT_TOKENS))
    )
    hub: InMemoryHub = field(default_factory=lambda: made_hub(INSTANCE))
    loads: list[str] = field(default_factory=list)
    shutdowns: list[str] = field(default_factory=list)
    fails_with: Exception | None = None
    refuses_roles: bool = False

    def prepare(self, context: ServiceContext[PrefillConfig], role: str, worker_id: str) -> Callable[[], WorkerShell]:
        if self.refuses_roles:
            raise ConfigError("on purpose")
        config = (
            PrefillConfig(instance=INSTANCE) if role == "prefill" else DecodeConfig(instance=INSTANCE, swap_bytes=0)
        )
        runner = HashRunner(NUM_PAGES, VOCAB_SIZE)

        def load(memory: ArenaMemory) -> LoadedModel:
            self.loads.append(role)
            if self.fails_with is not None:
                raise self.fails_with
            return LoadedModel(runner, lambda: None, HostPages(memory.segment.pages))

        async def connect() -> InMemoryBus:
            return self.hub.connect()

        def make_arena(on_handed_off: Callable[[HandedOff], None]) -> InMemoryArenaClient:
            return InMemoryArenaClient(self.arena, worker_id, on_handed_off)

        def make_role(parts: RoleParts) -> object:
            return KINDS[role].make_role(parts, config, NoOpTracer())

        return lambda: WorkerShell(
            context.in_role(role, worker_id, config),
            ModelSpec("hash", VOCAB_SIZE, MAX_CONTEXT_TOKENS, digest="", page_bytes=64),
            KINDS[role].limits_of(config),
            make_role,  # type: ignore[arg-type]
            ShellOutside(make_arena, load, connect),
        )


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    made.hub.stop()


@pytest.fixture
async def process(world: World) -> AsyncIterator[tuple[WorkerProcess, str]]:
    """With its address."""
    server = make_server([ErrorGuard()])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    config = PrefillConfig(instance=INSTANCE)
    admin = AdminService(Identity("prefill", WORKER, ""), Description)
    context = ServiceContext(config, "prefill", WORKER, address, server, NoOpTracer(), world.shutdowns.append, admin)

    async def connect(name: str) -> InMemoryBus:
        return world.hub.connect()

    process = WorkerProcess(context, lambda role, worker_id: world.prepare(context, role, worker_id), connect)
    await server.start()
    await process.start()
    yield process, address
    await process.drain(0.5)
    await process.stop()
    await server.stop(0.5)
    assert world.arena.num_free_pages == NUM_PAGES


async def test_a_prefill_worker_becomes_a_decode_worker_that_serves(
    world: World, process: tuple[WorkerProcess, str]
) -> None:
    worker, address = process
    answer = await worker.on_role(SetRole(1, "decode", 0))
    assert answer.refusal == ""
    assert answer.worker_id.startswith("decode-0-")
    assert await worker.on_role(SetRole(1, "decode", 0)) == answer, "asked again"
    await eventually(lambda: worker.describe().metrics["role_changes_total"] == 1)
    assert worker.describe().role == "decode"
    assert (await worker.on_role(SetRole(1, "decode", 0))) == answer, "it has the role"
    async with make_channel(address) as channel:
        stream = Stream(channel)
        assert await stream.open(GATEWAY) == answer.worker_id
        start = start_command(answer.worker_id)
        await stream.send(start=start)
        assert (await stream.receive_all(start.request_id)).token_ids == expected_tokens(start)
        stream.call.cancel()
    assert world.loads == ["prefill", "decode"]
    assert world.shutdowns == []


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (SetRole(1, "gateway", 0), "must be one of prefill, decode"),
        (SetRole(1, "decode", 3_600_001), "grace_ms 3600001"),
        (SetRole(0, "decode", 0), "epoch 0 is over"),
    ],
)
async def test_what_cannot_be_is_refused_and_changes_nothing(
    process: tuple[WorkerProcess, str], command: SetRole, problem: str
) -> None:
    worker, _ = process
    assert (await worker.on_drain(SetDrain(1, is_draining=False))).refusal == ""
    answer = await worker.on_role(command)
    assert problem in answer.refusal
    assert answer.worker_id == WORKER
    assert worker.describe().metrics["is_changing_role"] == 0


async def test_settings_that_do_not_suit_the_role_refuse_it_before_anything_is_drained(
    world: World, process: tuple[WorkerProcess, str]
) -> None:
    worker, _ = process
    world.refuses_roles = True
    assert "on purpose" in (await worker.on_role(SetRole(1, "decode", 0))).refusal
    assert worker.describe().metrics["is_draining"] == 0


async def test_a_change_that_fails_ends_the_process(world: World, process: tuple[WorkerProcess, str]) -> None:
    worker, _ = process
    world.fails_with = MemoryError("on purpose")
    await worker.on_role(SetRole(1, "decode", 0))
    await eventually(lambda: bool(world.shutdowns))
    assert "on purpose" in world.shutdowns[0]


async def test_a_drain_while_the_role_changes_is_refused(process: tuple[WorkerProcess, str]) -> None:
    worker, _ = process
    await worker.on_role(SetRole(1, "decode", 0))
    assert "changing its role" in (await worker.on_drain(SetDrain(1, is_draining=True, grace_ms=0))).refusal
    assert "already" in (await worker.on_role(SetRole(1, "prefill", 0))).refusal
    await asyncio.sleep(0)


def test_the_other_role_keeps_what_is_the_processs_and_takes_its_own_defaults() -> None:
    config = PrefillConfig(instance="i", num_threads=3, max_num_seqs=5, group="g", chunk_tokens=64)
    other = config_for("decode", config, {"WEIR_MAX_PAUSES": "7", "WEIR_INSTANCE": "not this one"})
    assert isinstance(other, DecodeConfig)
    assert (other.instance, other.num_threads, other.group, other.max_pauses) == ("i", 3, "g", 7)
    assert (other.max_num_seqs, other.chunk_tokens) == (DecodeConfig().max_num_seqs, DecodeConfig().chunk_tokens)
