"""What operators change through a scheduler stands in its log of changes: by whom, and what came of it; and every
method of its port is for whom the table says."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from tests.unit.rpc.outcomes import outcome_of
from tests.unit.scheduler.keeping import Served, write
from tests.unit.scheduler.rig import make_limits
from tests.unit.scheduler.scripted import Stack, eventually

from weir.core.credentials import key_digest, make_key
from weir.core.errors import InvalidRequest, NotFound, Unauthenticated
from weir.rpc.access import Callers, Port, RpcAccess, methods_of
from weir.rpc.channel import make_channel
from weir.rpc.errors import from_rpc_error
from weir.runtime.change_log import ChangeLog
from weir.runtime.service import COMMON_SERVICES
from weir.wire.v1 import admin_pb2, admin_pb2_grpc, scheduling_pb2, scheduling_pb2_grpc
from weir_scheduler.component import SchedulerComponent

TENANT_KEY, ADMIN_KEY = make_key(), make_key()
ADMIN = f"key:{key_digest(ADMIN_KEY).hex()[:8]}"
KEYS = f"""
admin_key_digests = ["{key_digest(ADMIN_KEY).hex()}"]
[tenants.acme]
api_key_digests = ["{key_digest(TENANT_KEY).hex()}"]
"""


@pytest.fixture
def limits_path(tmp_path: Path) -> Path:
    path = tmp_path / "limits.toml"
    path.write_text("")
    return path


@pytest.fixture
async def stack(limits_path: Path) -> AsyncIterator[Stack]:
    whole = Stack(limits=make_limits(gather_s=0.1), limits_file=str(limits_path))
    yield whole
    await whole.close()


@pytest.fixture
async def scheduler(stack: Stack, tmp_path: Path) -> SchedulerComponent:
    stack.changes = ChangeLog(tmp_path / "changes-s0.jsonl", "s0", max_failures=4)
    return await stack.add_scheduler()


def changes(tmp_path: Path) -> list[dict[str, Any]]:
    """Without what is different each time."""
    found = [json.loads(line) for line in (tmp_path / "changes-s0.jsonl").read_text().splitlines()]
    for change in found:
        assert {change.pop("process"), bool(change.pop("time"))} == {"s0", True}
    return found


async def test_settings_and_policies_stand_there_with_what_was_before(
    scheduler: SchedulerComponent, tmp_path: Path
) -> None:
    async with Served(scheduler) as served:
        await served.set_limits({"lanes.batch.max_queued": "7", "lane_order": '"weighted"'})
        await served.set_policy("srtf")
        with pytest.raises(InvalidRequest):
            await served.set_policy("no-such-policy")
        with pytest.raises(InvalidRequest):
            await served.set_limits({"lanes.batch.max_queued": '"a secret"'})
        await served.describe()
    first, second, policy, no_policy, no_limits = changes(tmp_path)
    assert first["correlation_id"] == second["correlation_id"] != policy["correlation_id"]
    shown = [(one["actor"], one["action"], one["object"], one["result"]) for one in (first, second, policy)]
    assert shown == [
        ("here", "set limits", "lanes.batch.max_queued", "done"),
        ("here", "set limits", "lane_order", "done"),
        ("here", "set policy", "policy", "done"),
    ]
    assert (first["after"], policy["before"], policy["after"]) == ("7", "fcfs", "srtf")
    assert (no_policy["result"], no_policy["reason"]) == ("refused", "InvalidRequest: policy")
    assert (no_limits["object"], no_limits["result"]) == ("lanes.batch.max_queued", "refused")
    assert "secret" not in (tmp_path / "changes-s0.jsonl").read_text()


async def test_who_is_denied_stands_there_some_times_a_minute_and_no_key_does(
    scheduler: SchedulerComponent, limits_path: Path, tmp_path: Path
) -> None:
    write(limits_path, KEYS)
    await eventually(lambda: scheduler.describe().metrics["limits_reloads_total"] == 1)
    for key in ("", TENANT_KEY, make_key(), *[make_key()] * 10):
        async with Served(scheduler, admin_key=key) as served:
            with pytest.raises(Exception, match=r"admin key|tenant's key"):
                await served.set_policy("srtf")
    async with Served(scheduler, admin_key=ADMIN_KEY) as served:
        await served.set_policy("srtf")
    file, *denied, done = changes(tmp_path)
    assert (file["actor"], file["action"], file["result"], len(file["after"])) == ("file", "read limits", "done", 8)
    kinds = [change["actor"].partition(":")[0] for change in denied]
    assert kinds == ["nobody", "tenant-key", "unknown-key", "unknown-key"]
    assert {change["object"] for change in denied} == {"weir.v1.Scheduling/SetPolicy"}
    assert (done["actor"], done["num_failures_before"]) == (ADMIN, 9)
    text = (tmp_path / "changes-s0.jsonl").read_text()
    assert not any(key in text or key_digest(key).hex() in text for key in (TENANT_KEY, ADMIN_KEY))


async def test_workers_that_are_drained_or_changed_stand_there(scheduler: SchedulerComponent, tmp_path: Path) -> None:
    async with Served(scheduler) as served, make_channel(served.addresses[0]) as channel:
        stub: Any = admin_pb2_grpc.AdminStub(channel)
        for call, request in (
            (stub.Drain, admin_pb2.DrainRequest(worker_id="nobody")),
            (stub.EndDrain, admin_pb2.EndDrainRequest(worker_id="nobody")),
            (stub.SetRole, admin_pb2.SetRoleRequest(worker_id="nobody", role="prefill")),
            (stub.SetRole, admin_pb2.SetRoleRequest(worker_id="d", role="decode")),
        ):
            try:
                await call(request, timeout=10, metadata=(("x-request-id", "mine-7"),))
            except grpc.aio.AioRpcError as error:
                assert isinstance(from_rpc_error(error), NotFound)  # noqa: PT017 - of some calls
    *failed, done = changes(tmp_path)
    assert [(one["action"], one["object"], one["result"], one["reason"]) for one in failed] == [
        (action, "nobody", "refused", "NotFound") for action in ("drain", "end drain", "set role")
    ]
    assert {one["correlation_id"] for one in (*failed, done)} == {"mine-7"}
    assert (done["action"], done["before"], done["after"]) == ("set role", "decode", "decode as d")


async def test_a_file_that_is_wrong_stands_there(
    scheduler: SchedulerComponent, limits_path: Path, tmp_path: Path
) -> None:
    write(limits_path, 'default_lane = "a secret"\n')
    await eventually(lambda: scheduler.describe().metrics["limits_file_is_wrong"] == 1)
    (change,) = changes(tmp_path)
    assert (change["actor"], change["result"]) == ("file", "refused")
    assert "secret" not in str(change)


async def test_each_method_of_a_schedulers_port_is_for_whom_the_table_says(
    scheduler: SchedulerComponent, limits_path: Path
) -> None:
    write(limits_path, KEYS)
    await eventually(lambda: scheduler.describe().metrics["limits_reloads_total"] == 1)
    access = RpcAccess(Port.INNER)
    async with Served(scheduler) as served, make_channel(served.addresses[0]) as channel:
        for method in methods_of(("weir.v1.Scheduling", *COMMON_SERVICES)):
            if method.endswith("Health/List"):  # which grpcio's own servicer does not serve
                continue
            found = [await outcome_of(channel, method, key) for key in ("", make_key(), TENANT_KEY, ADMIN_KEY)]
            is_for_operators = access.callers_of(method) is Callers.OPERATOR
            expected = ["unknown", "unknown", "denied", "let in"] if is_for_operators else ["let in"] * 4
            assert found == expected, method


async def test_what_a_handler_serves_is_checked_there_too(scheduler: SchedulerComponent, limits_path: Path) -> None:
    """A port without the guard at its door lets nobody in either."""
    write(limits_path, KEYS)
    await eventually(lambda: scheduler.describe().metrics["limits_reloads_total"] == 1)
    async with Served(scheduler, has_guard=False) as served, make_channel(served.addresses[0]) as channel:
        stub: Any = scheduling_pb2_grpc.SchedulingStub(channel)
        admin: Any = admin_pb2_grpc.AdminStub(channel)
        for call, request in (
            (stub.DescribeScheduling, scheduling_pb2.DescribeSchedulingRequest()),
            (stub.SetLimits, scheduling_pb2.SetLimitsRequest()),
            (stub.TuneLimits, scheduling_pb2.TuneLimitsRequest()),
            (stub.SetPolicy, scheduling_pb2.SetPolicyRequest(policy="srtf")),
            (admin.ListWorkers, admin_pb2.ListWorkersRequest()),
            (admin.Drain, admin_pb2.DrainRequest(worker_id="d")),
            (admin.EndDrain, admin_pb2.EndDrainRequest(worker_id="d")),
            (admin.SetRole, admin_pb2.SetRoleRequest(worker_id="d", role="prefill")),
            (admin.SetLimits, admin_pb2.AdminSetLimitsRequest()),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(request, timeout=10)
            assert isinstance(from_rpc_error(refused.value), Unauthenticated)
