"""Who may see and change limits and policy: whoever shows an admin key, once the limits hold a key."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.scheduler.keeping import Served, write
from tests.unit.scheduler.rig import make_limits
from tests.unit.scheduler.scripted import Stack, eventually

from weir.core.credentials import key_digest, make_key
from weir.core.errors import InvalidRequest, PermissionDenied, Unauthenticated, WeirError
from weir_scheduler.component import SchedulerComponent

TENANT_KEY, ADMIN_KEY, OWN_KEY = make_key(), make_key(), make_key()


def digests(key: str) -> str:
    return f'["{key_digest(key).hex()}"]'


WITH_TENANT = f"[tenants.acme]\napi_key_digests = {digests(TENANT_KEY)}\n"
WITH_BOTH = f"admin_key_digests = {digests(ADMIN_KEY)}\n{WITH_TENANT}"


@pytest.fixture
def limits_path(tmp_path: Path) -> Path:
    path = tmp_path / "limits.toml"
    path.write_text("")
    return path


@pytest.fixture
def key_path(tmp_path: Path) -> Path:
    path = tmp_path / "admin.key"
    path.write_text(OWN_KEY + "\n")
    return path


@pytest.fixture
async def stack(limits_path: Path) -> AsyncIterator[Stack]:
    whole = Stack(limits=make_limits(gather_s=0.1), limits_file=str(limits_path))
    yield whole
    await whole.close()


async def add_scheduler(stack: Stack, path: Path, content: str) -> SchedulerComponent:
    write(path, content)
    return await stack.add_scheduler()


async def assert_everything_is_refused(scheduler: SchedulerComponent, key: str, kind: type[WeirError]) -> None:
    before = scheduler.describe().metrics
    async with Served(scheduler, admin_key=key) as served:
        with pytest.raises(kind):
            await served.describe()
        with pytest.raises(kind):
            await served.set_limits({"lanes.batch.max_queued": "7"})
        with pytest.raises(kind):
            await served.set_policy("srtf")
    after = scheduler.describe().metrics
    assert after["operators_refused_total"] == before["operators_refused_total"] + 3
    assert after["limits_overrides"] == before["limits_overrides"]


async def assert_may_change(scheduler: SchedulerComponent, key: str) -> None:
    async with Served(scheduler, admin_key=key) as served:
        await served.set_limits({"lanes.batch.max_queued": "7"})
        await served.set_policy("srtf")
        view = await served.describe()
    assert (view.policy, view.overrides["lanes.batch.max_queued"]) == ("srtf", "7")


async def test_without_any_keys_nobody_needs_one_and_a_wrong_one_does_no_harm(stack: Stack) -> None:
    scheduler = await stack.add_scheduler()
    await assert_may_change(scheduler, "")
    await assert_may_change(scheduler, make_key())


async def test_once_there_are_keys_only_an_admin_key_opens(stack: Stack, limits_path: Path) -> None:
    scheduler = await add_scheduler(stack, limits_path, WITH_BOTH)
    await assert_everything_is_refused(scheduler, "", Unauthenticated)
    await assert_everything_is_refused(scheduler, make_key(), Unauthenticated)
    await assert_everything_is_refused(scheduler, TENANT_KEY, PermissionDenied)
    await assert_may_change(scheduler, ADMIN_KEY)


async def test_an_admin_key_alone_closes_too(stack: Stack, limits_path: Path) -> None:
    scheduler = await add_scheduler(stack, limits_path, f"admin_key_digests = {digests(ADMIN_KEY)}\n")
    await assert_everything_is_refused(scheduler, "", Unauthenticated)
    await assert_may_change(scheduler, ADMIN_KEY)


async def test_tenants_keys_without_an_admin_key_close_to_everybody(stack: Stack, limits_path: Path) -> None:
    scheduler = await add_scheduler(stack, limits_path, WITH_TENANT)
    for key in ("", TENANT_KEY, make_key()):
        await assert_everything_is_refused(scheduler, key, PermissionDenied)
    write(limits_path, WITH_BOTH)
    await eventually(lambda: scheduler.describe().metrics["limits_reloads_total"] == 1)
    await assert_may_change(scheduler, ADMIN_KEY)


async def test_the_key_in_a_file_of_the_schedulers_own_is_an_admin_key(
    stack: Stack, limits_path: Path, key_path: Path
) -> None:
    stack.admin_key_file = str(key_path)
    scheduler = await add_scheduler(stack, limits_path, WITH_TENANT)
    await assert_everything_is_refused(scheduler, "", Unauthenticated)
    await assert_may_change(scheduler, OWN_KEY)


async def test_the_schedulers_own_key_alone_asks_nobody_for_one(stack: Stack, key_path: Path) -> None:
    stack.admin_key_file = str(key_path)
    await assert_may_change(await stack.add_scheduler(), "")


@pytest.mark.parametrize(("content", "said"), [(None, "cannot be read"), ("short\n", "5 characters, must have")])
async def test_a_key_file_that_cannot_be_used_is_named_and_not_repeated(
    stack: Stack, key_path: Path, content: str | None, said: str
) -> None:
    write(key_path, content)
    stack.admin_key_file = str(key_path)
    with pytest.raises(InvalidRequest, match=said) as refused:
        await stack.add_scheduler()
    assert refused.value.violations[0].field == "admin_key_file"
    assert "short" not in refused.value.message


async def test_nobody_locks_the_operators_out_at_run_time(stack: Stack, limits_path: Path) -> None:
    scheduler = await stack.add_scheduler()
    tenant = {"tenants.acme.api_key_digests": digests(TENANT_KEY)}
    async with Served(scheduler) as anybody:
        with pytest.raises(InvalidRequest) as refused:
            await anybody.set_limits(tenant)
        assert refused.value.violations[0].field == "admin_key_digests"
        await anybody.set_limits(tenant | {"admin_key_digests": digests(ADMIN_KEY)})
        with pytest.raises(Unauthenticated):
            await anybody.describe()
    async with Served(scheduler, admin_key=ADMIN_KEY) as operator:
        with pytest.raises(InvalidRequest, match="admin_key_digests"):
            await operator.set_limits({"admin_key_digests": "[]"})
        await operator.set_limits({"admin_key_digests": digests(OWN_KEY)})
        with pytest.raises(Unauthenticated):
            await operator.describe()


async def test_a_key_that_comes_twice_in_one_call_is_named_and_nothing_is_changed(stack: Stack) -> None:
    scheduler = await stack.add_scheduler()
    async with Served(scheduler) as served:
        with pytest.raises(InvalidRequest, match="comes twice") as refused:
            await served.set_raw([("lane_order", "weighted"), ("max_queued", "9"), ("lane_order", "strict")])
        assert refused.value.violations[0].field == "lane_order"
        assert dict((await served.describe()).overrides) == {}
