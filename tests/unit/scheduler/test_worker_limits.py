"""Bounds of workers, caps and shares of steps, as operators set them and as workers, gateways and the core get them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import grpc.aio
import pytest
from tests.unit.scheduler.keeping import Keeping, Served
from tests.unit.scheduler.rig import make_limits
from tests.unit.scheduler.scripted import Stack, eventually

from weir.bus.configuration import ACCESS_KEY, WORKERS_KEY, AccessRules, LaneCaps, WorkerBounds, WorkerRules
from weir.bus.in_memory import InMemoryHub
from weir.client.scheduling import LimitChanged, SchedulingClient
from weir.core.caps import RequestCaps
from weir.core.errors import InvalidRequest
from weir.rpc.channel import make_channel
from weir.rpc.server import ErrorGuard, make_server
from weir.runtime.admin import AdminService, Description, Identity, Operations
from weir.scheduling.limits import CoreLimits, LaneLimits
from weir.scheduling.limits_file import change_limits, format_limits, parse_limits
from weir.scheduling.worker_limits import WorkerLimits
from weir.wire.v1 import admin_pb2, admin_pb2_grpc, scheduling_pb2
from weir_scheduler.operator_calls import OperatorGate, WorkerOperations

FILE = """
[lanes.interactive]
max_queued = 10
max_wait_s = 5
guaranteed_step_share = 0.5
max_n = 1

[lanes.standard]
max_queued = 10
max_wait_s = 5

[lanes.batch]
max_queued = 10
max_wait_s = 5
guaranteed_step_share = 0.2
max_sequence_tokens = 2048

[tenants.acme]
max_output_tokens = 100
max_top_k = 40

[workers.decode]
max_num_seqs = 8

[workers.prefill-0]
max_num_batched_tokens = 256
"""


def test_the_file_says_all_of_it_and_what_is_written_out_reads_the_same() -> None:
    limits = parse_limits(FILE, CoreLimits())
    assert limits.workers == (WorkerLimits("decode", 8), WorkerLimits("prefill-0", 0, 256))
    assert limits.step_shares == (0.2, 0.0, 0.5), "the least urgent lane first"
    assert limits.lanes_by_name["batch"].caps == RequestCaps(max_sequence_tokens=2048)
    assert limits.tenants_by_name["acme"].caps == RequestCaps(max_output_tokens=100, max_top_k=40)
    assert parse_limits(format_limits(limits), CoreLimits()) == limits
    assert CoreLimits().step_shares == ()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("workers.gateway.max_num_seqs", "1", "worker 'gateway'"),
        ("workers.decode.max_num_seqs", "-1", "max_num_seqs -1"),
        ("workers.decode.max_num_sequences", "1", "unknown; known are max_num_seqs, max_num_batched_tokens"),
        ("workers.decode", "1", "is no limit"),
        ("lanes.batch.guaranteed_step_share", "0.6", "guaranteed_step_share: lanes have 1.1 in all"),
        ("lanes.batch.max_n", "-1", "max_n -1"),
        ("tenants.acme.max_output_tokens", "many", "must be a whole number"),
    ],
)
def test_a_bound_that_cannot_be_is_named(key: str, value: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        change_limits(parse_limits(FILE, CoreLimits()), [(key, value)])


async def test_workers_gateways_and_the_next_scheduler_find_them_in_the_bucket() -> None:
    hub = InMemoryHub()
    keeping = await Keeping(hub, None).start()
    changes = [
        ("workers.decode.max_num_seqs", "4"),
        ("lanes.batch.guaranteed_step_share", "0.25"),
        ("lanes.batch.max_n", "2"),
    ]
    await keeping.keeper.set_limits(changes)
    lanes = keeping.keeper.effective_limits.limits.lanes
    rules = WorkerRules(
        1, (WorkerBounds("decode", 4),), tuple(0.25 if lane.name == "batch" else 0.0 for lane in reversed(lanes))
    )
    assert await keeping.published(WORKERS_KEY) == rules
    access = await keeping.published(ACCESS_KEY)
    assert isinstance(access, AccessRules)
    assert access.lane_caps == (LaneCaps("batch", RequestCaps(max_n=2)),)
    await keeping.stop()
    follower = await Keeping(hub, None, epoch=2).start()
    assert await follower.published(WORKERS_KEY) == replace(rules, epoch=2)
    await follower.stop()


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    whole = Stack(limits=make_limits(gather_s=0.1))
    whole.workers["d"] = replace(whole.workers["d"], worker_id="decode-0-00000000", most_num_seqs=32)
    yield whole
    await whole.close()


async def test_a_change_says_what_was_and_what_is(stack: Stack) -> None:
    async with Served(await stack.add_scheduler()) as served:
        with SchedulingClient(served.addresses) as client:
            made = await served.call(
                lambda: client.change_limits({"workers.decode.max_num_seqs": "16", "lane_order": "weighted"})
            )
            again = await served.call(lambda: client.change_limits({"workers.decode.max_num_seqs": "8"}))
    assert made == (
        LimitChanged("workers.decode.max_num_seqs", None, "16"),
        LimitChanged("lane_order", '"strict"', '"weighted"'),
    )
    assert again == (LimitChanged("workers.decode.max_num_seqs", "16", "8"),)


async def test_a_bound_over_what_a_worker_was_started_with_names_it_and_changes_nothing(stack: Stack) -> None:
    scheduler = await stack.add_scheduler()
    await eventually(lambda: scheduler.describe().metrics["workers"] == 2)
    async with Served(scheduler) as served:
        both = {"workers.decode.max_num_seqs": "33", "lanes.batch.max_queued": "7"}
        with pytest.raises(InvalidRequest) as refused:
            await served.set_limits(both)
        [violation] = refused.value.violations
        assert violation.field == "workers.decode.max_num_seqs"
        assert violation.description == "is 33; decode-0-00000000 has room for 32, with which it was started"
        assert dict((await served.describe()).overrides) == {}
        await served.set_limits(both | {"workers.decode.max_num_seqs": "32"})
        await served.set_limits({"workers.prefill.max_num_seqs": "500"})


async def test_admin_of_the_leader_sets_limits_and_that_of_another_process_says_who_does(stack: Stack) -> None:
    component = await stack.add_scheduler()
    settings = [scheduling_pb2.LimitSetting(key="lanes.batch.max_queued", value="9")]
    request = admin_pb2.AdminSetLimitsRequest(settings=settings)
    operations = WorkerOperations(OperatorGate(component.leader_admins))
    async with admin_of("scheduler", operations) as stub:
        answer = await stub.SetLimits(request, timeout=10)
    assert [(one.key, one.now) for one in answer.changes] == [("lanes.batch.max_queued", "9")]
    async with admin_of("decode") as stub:
        with pytest.raises(grpc.aio.AioRpcError, match="ask the leading scheduler") as refused:
            await stub.SetLimits(request, timeout=10)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


@asynccontextmanager
async def admin_of(role: str, operations: Operations | None = None) -> AsyncIterator["admin_pb2_grpc.AdminAsyncStub"]:
    admin = AdminService(Identity(role, f"{role}-0", ""), Description)
    if operations is not None:
        admin.answer_operators(operations)
    server = make_server([ErrorGuard()])
    admin_pb2_grpc.add_AdminServicer_to_server(admin, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with make_channel(f"127.0.0.1:{port}") as channel:
        stub: admin_pb2_grpc.AdminAsyncStub = admin_pb2_grpc.AdminStub(channel)
        yield stub
    await server.stop(None)


def test_shares_are_bounded_in_all() -> None:
    lanes = (LaneLimits("a", 1, 1, guaranteed_step_share=0.7), LaneLimits("b", 1, 1, guaranteed_step_share=0.4))
    with pytest.raises(ValueError, match=r"guaranteed_step_share: lanes have 1\.1 in all, must be at most 1"):
        CoreLimits(lanes=lanes, default_lane="a")
