"""Who a key belongs to, and what its tenant may ask for.

The rules are followed whatever happens: a key that was taken away must not open for ever.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.gateway.fake_scheduler import OPEN_RULES
from tests.unit.hubs import made_hub

from weir.bus.codec import MalformedMessage, decode, encode
from weir.bus.configuration import ACCESS_KEY, AccessRules, TenantAccess
from weir.bus.in_memory import InMemoryHub
from weir.bus.subjects import Subjects
from weir.core.credentials import key_digest, make_key, try_read_key
from weir.core.errors import InvalidRequest, PermissionDenied, Unauthenticated, Unavailable
from weir_gateway.access import AccessControl, AccessWatch
from weir_gateway.frontends.openai.schema import HTTP_NAMES
from weir_gateway.requests.client_request import GRPC_NAMES

SUBJECTS = Subjects("test")
KEY_A, KEY_B, OTHER_KEY_B = "key-of-a-0123456789", "key-of-b-0123456789", "other-key-of-b-01234"
CLOSED = replace(
    OPEN_RULES,
    tenants=(
        TenantAccess("a", (key_digest(KEY_A),)),
        TenantAccess("b", (key_digest(KEY_B), key_digest(OTHER_KEY_B)), ("batch", "standard"), isolates_cache=True),
        TenantAccess("c", (key_digest("key-of-c-0123456789"),), ("batch",), isolates_cache=True),
        TenantAccess("default"),
    ),
)


def access_of(rules: AccessRules, *, is_lower_priority_first: bool = False) -> AccessControl:
    access = AccessControl(is_lower_priority_first=is_lower_priority_first)
    assert access.update(rules)
    return access


def test_nobody_is_let_in_before_the_rules_are_known() -> None:
    with pytest.raises(Unavailable) as refused:
        AccessControl().identify(KEY_A)
    assert refused.value.retry_after_s == 1.0


def test_without_keys_everybody_is_the_default_tenant_whatever_key_is_shown() -> None:
    access = access_of(OPEN_RULES)
    assert {access.identify(None).tenant, access.identify("anything").tenant} == {"default"}


def test_with_keys_a_tenant_is_known_by_each_of_its_keys_and_nobody_else_is_let_in() -> None:
    access = access_of(CLOSED)
    assert [access.identify(key).tenant for key in (KEY_A, KEY_B, OTHER_KEY_B)] == ["a", "b", "b"]
    for unknown in (None, "", KEY_A + "x", KEY_A[:-1], KEY_A.upper()):
        with pytest.raises(Unauthenticated) as refused:
            access.identify(unknown)
        assert KEY_A not in refused.value.message


def test_a_digest_that_only_begins_alike_is_not_the_key() -> None:
    digest = key_digest(KEY_A)
    forged = digest[:16] + bytes(16)
    access = access_of(replace(CLOSED, tenants=(TenantAccess("a", (forged,)),)))
    with pytest.raises(Unauthenticated):
        access.identify(KEY_A)


def test_rules_of_a_scheduler_that_was_replaced_are_not_taken() -> None:
    access = access_of(CLOSED)
    assert not access.update(replace(OPEN_RULES, epoch=CLOSED.epoch - 1))
    with pytest.raises(Unauthenticated):
        access.identify(None)
    assert access.update(replace(OPEN_RULES, epoch=CLOSED.epoch))
    assert access.identify(None).tenant == "default"


def test_a_tenant_has_its_own_lanes_and_the_first_it_names_is_its_default() -> None:
    access = access_of(CLOSED)
    free, bound = access.identify(KEY_A), access.identify(KEY_B)
    assert access.scope_of(free, GRPC_NAMES, "", None, "").lane == "standard"
    assert access.scope_of(free, GRPC_NAMES, "interactive", None, "").lane == "interactive"
    assert access.scope_of(bound, GRPC_NAMES, "", None, "").lane == "standard", "the default lane is open to it"
    only_batch = access.identify("key-of-c-0123456789")
    assert access.scope_of(only_batch, GRPC_NAMES, "", None, "").lane == "batch"
    with pytest.raises(PermissionDenied, match="'interactive' is not open to tenant 'b'; it may use standard, batch"):
        access.scope_of(bound, HTTP_NAMES, "interactive", None, "")
    with pytest.raises(InvalidRequest) as refused:
        access.scope_of(free, HTTP_NAMES, "vip", None, "")
    assert refused.value.violations[0].field == "lane"
    assert "interactive, standard, batch" in refused.value.violations[0].description


@pytest.mark.parametrize(
    ("priority", "lane"),
    [(0, "standard"), (1, "interactive"), (10**9, "interactive"), (-1, "batch"), (-(10**9), "batch")],
)
def test_a_higher_priority_is_a_more_urgent_lane_and_the_other_way_round_if_so_configured(
    priority: int, lane: str
) -> None:
    access = access_of(OPEN_RULES)
    assert access.scope_of(access.identify(None), HTTP_NAMES, "", priority, "").lane == lane
    turned = access_of(OPEN_RULES, is_lower_priority_first=True)
    assert turned.scope_of(turned.identify(None), HTTP_NAMES, "", -priority, "").lane == lane


def test_priority_moves_among_the_lanes_that_are_open_and_not_beside_a_lane() -> None:
    access = access_of(CLOSED)
    bound = access.identify(KEY_B)
    assert access.scope_of(bound, HTTP_NAMES, "", 5, "").lane == "standard"
    with pytest.raises(InvalidRequest) as refused:
        access.scope_of(bound, HTTP_NAMES, "batch", 1, "")
    assert refused.value.violations[0].field == "priority"


@given(st.text(max_size=64), st.text(max_size=64))
def test_an_isolated_tenants_salt_is_nobody_elses_whatever_they_ask_for(own: str, others: str) -> None:
    access = access_of(CLOSED)
    isolated = access.scope_of(access.identify(KEY_B), GRPC_NAMES, "", None, own).cache_salt
    assert isolated == access.scope_of(access.identify(OTHER_KEY_B), GRPC_NAMES, "", None, own).cache_salt
    assert isolated != access.scope_of(access.identify(KEY_A), GRPC_NAMES, "", None, others).cache_salt
    assert isolated != access.scope_of(access.identify("key-of-c-0123456789"), GRPC_NAMES, "", None, others).cache_salt
    assert len(isolated) > 64, "longer than a request's salt may be"
    if own != others:
        assert isolated != access.scope_of(access.identify(KEY_B), GRPC_NAMES, "", None, others).cache_salt
    assert access.scope_of(access.identify(KEY_A), GRPC_NAMES, "", None, own).cache_salt == own


@pytest.mark.parametrize(
    ("authorization", "x_api_key", "key"),
    [
        ("Bearer abc", "", "abc"),
        ("bearer  abc ", "", "abc"),
        ("Bearer abc", "other", "abc"),
        ("Basic abc", "other", "other"),
        ("Bearer", "other", "other"),
        ("", " other ", "other"),
        ("", "", None),
        ("abc", "", None),
    ],
)
def test_a_key_is_read_from_either_header(authorization: str, x_api_key: str, key: str | None) -> None:
    assert try_read_key(authorization, x_api_key) == key


def test_keys_that_are_made_are_long_and_differ() -> None:
    keys = {make_key() for _ in range(100)}
    assert len(keys) == 100
    assert min(len(key) for key in keys) >= 43


def test_rules_pass_the_bus_and_wrong_ones_do_not() -> None:
    assert decode(AccessRules, encode(CLOSED)) == CLOSED
    with pytest.raises(ValueError, match="is none of"):
        replace(CLOSED, default_lane="vip")
    broken = encode(CLOSED).replace(b"standard", b"standar!", 1)
    with pytest.raises(MalformedMessage):
        decode(AccessRules, broken)
    with pytest.raises(ValueError, match="31 bytes, must have 32"):
        TenantAccess("a", (bytes(31),))


class _FailingOnce(AccessControl):
    """Fails at its first rules."""

    def __init__(self) -> None:
        super().__init__()
        self.num_updates = 0

    def update(self, rules: AccessRules) -> bool:
        self.num_updates += 1
        if self.num_updates == 1:
            raise RuntimeError("a defect")
        return super().update(rules)


@contextlib.asynccontextmanager
async def following(hub: InMemoryHub, access: AccessControl) -> AsyncIterator[AccessWatch]:
    watch, bus = AccessWatch(access), hub.connect()
    task = asyncio.create_task(watch.follow(bus, SUBJECTS))
    yield watch
    task.cancel()
    await asyncio.wait([task])
    await bus.close()


async def write(hub: InMemoryHub, rules: AccessRules) -> None:
    bus = hub.connect()
    await (await bus.bucket(SUBJECTS.configuration_bucket, durable=True)).put(ACCESS_KEY, encode(rules))
    await bus.close()


async def test_a_defect_is_counted_and_the_rules_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.bus.configuration._RETRY_S", 0.01)
    hub, access = made_hub("test"), _FailingOnce()
    await write(hub, OPEN_RULES)
    async with following(hub, access) as watch:
        assert await watch.wait_known(5)
        assert access.identify(None).tenant == OPEN_RULES.default_tenant
        assert watch.metrics()["access_rules_failures_total"] == 1


async def test_a_bus_that_is_away_at_the_start_and_later_costs_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.bus.configuration._RETRY_S", 0.01)
    hub, access = made_hub("test"), AccessControl()
    hub.stop()
    async with following(hub, access) as watch:
        assert not await watch.wait_known(0.05)
        hub.start()
        await write(hub, OPEN_RULES)
        assert await watch.wait_known(5)
        hub.stop()
        await asyncio.sleep(0.05)
        hub.start()
        later = replace(OPEN_RULES, default_tenant="other")
        await write(hub, later)
        async with asyncio.timeout(5):
            while access.identify(None).tenant != later.default_tenant:  # noqa: ASYNC110  what is waited for has no event
                await asyncio.sleep(0.01)
        assert watch.metrics()["access_rules_failures_total"] == 0
