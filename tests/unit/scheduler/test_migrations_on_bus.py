"""Migrations over the in-memory bus: asked until answered, and settled by the next list of held requests."""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from tests.unit.scheduler.rig import make_worker
from tests.unit.scheduler.scripted import SUBJECTS, Stack, eventually

from weir.bus.in_memory import LOST, Leg, ScriptedFaults
from weir.bus.messages import Prefilled
from weir.bus.migration import Migrate, MigrateReply


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
