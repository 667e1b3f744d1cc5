"""Migrations over the in-memory bus: asked until answered, and settled by the next list of held requests."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from opentelemetry.trace import NoOpTracer
from tests.unit.scheduler.rig import make_worker
from tests.unit.scheduler.scripted import SUBJECTS, Stack, eventually
from tests.unit.scheduler.test_migrations import drain, two_hosts

from weir.bus.endpoint import BusEndpoint
from weir.bus.in_memory import LOST, InMemoryHub, Leg, ScriptedFaults
from weir.bus.messages import Prefilled
from weir.bus.migration import Migrate, MigrateReply
from weir.core.clock import SystemClock
from weir.scheduling.commands import SendMigrate
from weir_scheduler.command_sender import CommandSender


@pytest.fixture
def faults() -> ScriptedFaults:
    return ScriptedFaults()


@pytest.fixture
async def stack(faults: ScriptedFaults) -> AsyncIterator[Stack]:
    whole = Stack(faults=faults)
    yield whole
    await whole.close()


@pytest.mark.parametrize("leg", [Leg.THERE, Leg.BACK])
async def test_a_lost_migrate_or_answer_is_sent_again(stack: Stack, faults: ScriptedFaults, leg: Leg) -> None:
    stack.workers["d"] = replace(stack.workers["d"], pages_address="h:9")
    scheduler, gateway = await stack.add_scheduler(), await stack.add_gateway()
    asked: list[Migrate] = []

    async def on_migrate(migrate: Migrate) -> MigrateReply:
        asked.append(migrate)
        return MigrateReply(accepted=True)

    await gateway.endpoint.serve(SUBJECTS.migrate("g0"), Migrate, on_migrate)
    await gateway.submit("a")
    await eventually(lambda: gateway.grants != [])
    await gateway.endpoint.publish(SUBJECTS.prefilled, Prefilled("a", "g0", 1))
    faults.script(SUBJECTS.migrate("g0"), LOST, leg=leg)
    there = make_worker("d2", "decode", host="h2")
    stack.workers |= {"d": replace(stack.workers["d"], is_draining=True), "d2": replace(there, serves_locally=True)}
    await eventually(lambda: len(asked) == (2 if leg is Leg.BACK else 1))
    assert len(set(asked)) == 1
    assert (asked[0].pages_address, asked[0].placement.decode_worker_id) == ("h:9", "d2")
    gateway.held["a"] = replace(gateway.held["a"], placement=replace(asked[0].placement, dispatch=2))
    await eventually(lambda: scheduler.describe().metrics.get("migrations_moved_total") == 1)
    metrics = scheduler.describe().metrics
    assert (metrics["messages_under_way"], metrics["migrations_under_way"]) == (0, 0)
    assert scheduler.describe().integrity_errors == ()


async def test_a_scheduler_that_is_not_certain_of_leading_asks_for_no_migration() -> None:
    rig = two_hosts(1)
    drain(rig)
    [command] = [command for command in rig.commands if isinstance(command, SendMigrate)]
    hub, asked, certain = InMemoryHub(), list[Migrate](), asyncio.Event()
    tracer = NoOpTracer()
    gateway, endpoint = BusEndpoint(hub.connect(), tracer), BusEndpoint(hub.connect(), tracer)

    async def on_migrate(migrate: Migrate) -> MigrateReply:
        asked.append(migrate)
        return MigrateReply(accepted=True)

    await gateway.serve(SUBJECTS.migrate("g"), Migrate, on_migrate)
    sender = CommandSender(endpoint, SUBJECTS, rig.core, SystemClock(), lambda: None, tracer, certain.is_set)
    sender.run(command)
    await asyncio.sleep(0.05)
    assert asked == []
    certain.set()
    await eventually(lambda: asked == [command.migrate])
    await sender.close()
    await endpoint.close()
    await gateway.close()
