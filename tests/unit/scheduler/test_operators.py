"""Limits and policy of a scheduler that works, as operators see and change them."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.scheduler.keeping import FILE, OTHER_FILE, Served, write
from tests.unit.scheduler.rig import make_limits
from tests.unit.scheduler.scripted import Stack, eventually

from weir.bus.messages import RefusalReason
from weir.core.errors import InvalidRequest, Unavailable, WeirError


@pytest.fixture
def limits_path(tmp_path: Path) -> Path:
    path = tmp_path / "limits.toml"
    path.write_text(FILE)
    return path


@pytest.fixture
async def stack(limits_path: Path) -> AsyncIterator[Stack]:
    whole = Stack(limits=make_limits(gather_s=0.1), limits_file=str(limits_path))
    yield whole
    await whole.close()


async def test_operators_see_and_change_limits_of_a_scheduler_that_works(stack: Stack, limits_path: Path) -> None:
    scheduler, gateway = await stack.add_scheduler(), await stack.add_gateway()
    async with Served(scheduler) as served:
        view = await served.describe()
        assert (view.policy, view.limits_path, view.limits_error) == ("fcfs", str(limits_path), "")
        assert list(view.lanes) == ["interactive", "standard", "batch"]
        assert list(view.tenants) == ["acme", "default"]
        assert view.lanes["standard"]["queued"] == 0
        assert (await gateway.submit("a", "batch")).queued

        toml = await served.set_limits({"default_tenant.lanes": '["standard"]'})
        assert 'lanes = ["standard"]' in toml
        reply = await gateway.submit("b", "batch")
        assert (reply.queued, reply.reason) == (False, RefusalReason.LANE_FORBIDDEN)
        assert dict((await served.describe()).overrides) == {"default_tenant.lanes": '["standard"]'}

        write(limits_path, OTHER_FILE)
        await eventually(lambda: scheduler.describe().metrics["limits_reloads_total"] == 1)
        assert (await gateway.submit("c", "batch")).queued
        assert dict((await served.describe()).overrides) == {}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({}, "settings"),
        ({"lanes.batch.max_queued": "0"}, "lanes.batch"),
        ({"lanes.vip.max_queued": "1"}, "lanes.vip.max_queued"),
        ({f"tenants.t{number}.weight": "1" for number in range(300)}, "settings"),
    ],
)
async def test_a_change_that_cannot_be_names_the_key(stack: Stack, changes: dict[str, str], field: str) -> None:
    async with Served(await stack.add_scheduler()) as served:
        with pytest.raises(InvalidRequest) as refused:
            await served.set_limits(changes)
        assert refused.value.violations[0].field == field


async def test_a_policy_is_changed_while_requests_wait_and_run_and_none_is_lost(stack: Stack) -> None:
    stack.workers["d"] = replace(stack.workers["d"], max_num_seqs=2)
    scheduler, gateway = await stack.add_scheduler(), await stack.add_gateway()
    async with Served(scheduler) as served:
        for number in range(10):
            assert (await gateway.submit(f"r{number}")).queued
        await eventually(lambda: len(gateway.grants) >= 2)
        for name in ("shortest-prompt", "srtf", "fcfs"):
            assert await served.set_policy(name) == name
            assert scheduler.describe().integrity_errors == ()
        with pytest.raises(InvalidRequest, match="must be one of"):
            await served.set_policy("nonsense")
        assert (await served.describe()).policy == "fcfs"
        done = 0
        while done < 10:
            await eventually(lambda: any(entry.placement for entry in gateway.held.values()))
            for request_id in [name for name, entry in gateway.held.items() if entry.placement]:
                await gateway.finish(request_id)
                done += 1
    assert set(gateway.ends.values()) == {"finished"}
    assert sorted(gateway.granted_ids) == sorted(f"r{number}" for number in range(10))


async def test_a_standby_sends_operators_on_and_takes_up_their_changes(stack: Stack) -> None:
    leader, standby = await stack.add_scheduler("s0"), await stack.add_scheduler("s1")
    async with Served(standby) as alone:
        with pytest.raises(Unavailable, match="stands by"):
            await alone.describe()
    async with Served(standby, leader) as both:
        await both.set_limits({"tenants.acme.weight": "7"})
        await both.set_policy("srtf")
    await leader.stop()
    await eventually(lambda: standby.describe().metrics["is_leader"] == 1)
    async with Served(standby) as alone:
        view = await alone.describe()
        assert (view.policy, view.overrides) == ("srtf", {"tenants.acme.weight": "7"})


async def test_a_scheduler_with_a_bad_file_does_not_start(tmp_path: Path) -> None:
    path = tmp_path / "limits.toml"
    path.write_text("[tenants.acme]\nwieght = 1\n")
    stack = Stack(limits_file=str(path))
    try:
        with pytest.raises(WeirError, match=r"tenants\.acme\.wieght"):
            await stack.add_scheduler()
    finally:
        await stack.close()


async def test_the_bus_may_be_away_while_the_file_changes(stack: Stack, limits_path: Path) -> None:
    scheduler = await stack.add_scheduler()
    stack.hub.stop()
    write(limits_path, OTHER_FILE)
    await eventually(lambda: scheduler.describe().metrics["limits_reloads_total"] == 1)
    assert scheduler.describe().metrics["rules_unpublished"] > 0
    stack.hub.start()
    await eventually(lambda: scheduler.describe().metrics["rules_unpublished"] == 0)
