"""Lanes, tenants, limits and policies of a running stack, as its clients and its operators meet them."""

import asyncio
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import httpx
import pytest
from typer.testing import CliRunner, Result

from weir.cli.app import app
from weir.client import GenerateOptions, WeirClient
from weir.client.scheduling import SchedulingClient
from weir.core.credentials import key_digest, make_key
from weir.core.errors import PermissionDenied, QuotaExceeded, Unauthenticated
from weir.kv.geometry import PAGE_TOKENS
from weir.testing.load import StreamRecord, greedy_request, open_stub, stream
from weir.testing.otlp import OtlpReceiver, ReceivedSpan
from weir.testing.stack import Stack, wait_until
from weir.wire.v1 import inference_pb2

pytestmark = [pytest.mark.stack, pytest.mark.timeout(180)]

KEY, ADMIN_KEY = make_key(), make_key()
ONE = GenerateOptions(max_tokens=1, temperature=0.0)
NUM_FLOOD = 96
"""So many that some wait for long."""
KEYED_FILE = f"""
admin_key_digests = ["{key_digest(ADMIN_KEY).hex()}"]
[tenants.reports]
requests_per_min = 2
lanes = ["batch"]
api_key_digests = ["{key_digest(KEY).hex()}"]
"""


class Limits:
    """The stack's limits file, and what its scheduler and its gateway made of it."""

    def __init__(self, stack: Stack, path: Path) -> None:
        self._stack = stack
        self._path = path
        # Looked up once: each look starts a process.
        views = {view.role: view for view in stack.processes()}
        self._gateway = views["gateway"]
        self.scheduler_address = views["scheduler"].address

    def scheduling(self, admin_key: str = ADMIN_KEY) -> SchedulingClient:
        return SchedulingClient([self.scheduler_address], admin_key=admin_key)

    def write(self, text: str) -> None:
        """Returns when it is in force for new requests."""
        changes = self._num_changes()
        self._path.write_text(text)
        digest = hashlib.sha256(text.encode()).hexdigest() if text else ""
        with self.scheduling() as scheduling:
            wait_until(lambda: scheduling.describe().limits_digest == digest, timeout_s=30, what="the file is read")
        wait_until(lambda: self._num_changes() > changes, timeout_s=30, what="the gateway knows the rules")

    def _num_changes(self) -> float:
        return self._stack.metrics(self._gateway)["access_rules_changes_total"]


@pytest.fixture
def limits(stack: Stack, limits_path: Path) -> Iterator[Limits]:
    limits = Limits(stack, limits_path)
    yield limits
    if limits_path.read_text():
        Limits(stack, limits_path).write("")  # the scheduler may be another one by now


def assert_nothing_is_lost(records: list[StreamRecord], num_tokens: int) -> None:
    """P2: one end each, and every token once."""
    assert [record.code for record in records] == [grpc.StatusCode.OK] * len(records)
    assert [record for record in records if record.num_terminal_events != 1 or record.num_index_errors] == []
    assert {len(record.token_ids) for record in records} == {num_tokens}


def generate(stack: Stack, api_key: str = "", options: GenerateOptions = ONE) -> str:
    with WeirClient(stack.grpc_address, timeout_s=60, api_key=api_key) as client:
        return "".join(chunk.text for chunk in client.generate("The capital of France is", options))


def test_a_tenant_has_its_key_its_lanes_and_its_quota(stack: Stack, limits: Limits) -> None:
    limits.write(KEYED_FILE)
    for wrong in ("", "wrong-key"):
        with pytest.raises(Unauthenticated):
            generate(stack, wrong)
    with pytest.raises(PermissionDenied):
        generate(stack, KEY, GenerateOptions(max_tokens=1, lane="interactive"))
    for _ in range(2):
        generate(stack, KEY)
    with pytest.raises(QuotaExceeded) as refused:
        generate(stack, KEY)
    assert refused.value.tenant == "reports"
    assert refused.value.retry_after_s is not None
    assert 0 < refused.value.retry_after_s <= 60
    body = {"model": "smollm2-135m", "prompt": "x", "max_tokens": 1}
    with httpx.Client(base_url=stack.http_url, timeout=30) as http:
        by_http = http.post("/v1/completions", json=body, headers={"X-API-Key": KEY})
        unknown = http.post("/v1/completions", json=body)
    assert (by_http.status_code, by_http.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(by_http.headers["Retry-After"]) <= 60
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (401, "authentication_error")
    with limits.scheduling() as scheduling:
        assert scheduling.describe().lanes["batch"]["granted_total"] >= 2


def test_once_there_are_keys_limits_are_an_operators_alone(stack: Stack, limits: Limits) -> None:
    limits.write(KEYED_FILE)
    for key, error in (("", Unauthenticated), (make_key(), Unauthenticated), (KEY, PermissionDenied)):
        with limits.scheduling(key) as scheduling, pytest.raises(error):
            scheduling.set_limits({"tenants.reports.requests_per_min": "1000"})
    with limits.scheduling() as scheduling:
        scheduling.set_limits({"tenants.reports.requests_per_min": "1000"})
    # Whoever started the stack needs no key: it lies where only they can read it.
    where = ("--instance", stack.instance, "--runtime-dir", str(stack.runtime_dir))
    shown = CliRunner().invoke(app, ["limits", "show", "--json", *where])
    assert json.loads(shown.stdout)["overrides"] == {"tenants.reports.requests_per_min": "1000"}
    refused = CliRunner().invoke(app, ["limits", "show", "--scheduler", limits.scheduler_address])
    assert (refused.exit_code, "--admin-key" in refused.output) == (1, True)


async def test_limits_change_under_load_and_a_bad_file_changes_nothing(
    stack: Stack, limits: Limits, limits_path: Path
) -> None:
    channel, stub = open_stub(stack.grpc_address)
    async with channel:
        load = [
            asyncio.create_task(stream(stub, greedy_request([700 + number] * 20, max_tokens=24, ignore_eos=True)))
            for number in range(16)
        ]
        await asyncio.to_thread(limits.write, "[tenants.new]\nweight = 2\n\n[default_tenant]\nlanes = ['standard']\n")
        refused = await stream(stub, greedy_request([1], max_tokens=1, lane="batch"))
        assert refused.code is grpc.StatusCode.PERMISSION_DENIED
        await asyncio.to_thread(limits_path.write_text, "[tenants.new]\nwieght = 2\n")
        with limits.scheduling() as scheduling:
            await asyncio.to_thread(
                wait_until, lambda: scheduling.describe().limits_error != "", timeout_s=30, what="the fault is seen"
            )
            view = scheduling.describe()
        assert "tenants.new.wieght" in view.limits_error
        assert "weight = 2" in view.limits_toml
        still = await stream(stub, greedy_request([1], max_tokens=1, lane="batch"))
        assert still.code is grpc.StatusCode.PERMISSION_DENIED
        await asyncio.to_thread(limits.write, "")
        assert_nothing_is_lost(list(await asyncio.gather(*load)), 24)


async def test_an_urgent_request_passes_a_flood_that_came_before_it(stack: Stack) -> None:
    """Order, not time: it has its whole answer while others that came before it still wait for their first token."""
    channel, stub = open_stub(stack.grpc_address)
    first_tokens: list[str] = []
    scheduler = stack.processes("scheduler")[0]

    async def one(name: str, lane: str, max_tokens: int) -> None:
        request = greedy_request([hash_id(name)] * 40, max_tokens=max_tokens, ignore_eos=True, lane=lane)
        async for response in stub.Generate(request, timeout=120):
            if response.first_index == 0 and response.token_ids:
                first_tokens.append(name)

    async with channel:
        flood = [asyncio.create_task(one(f"flood {number}", "batch", 16)) for number in range(NUM_FLOOD)]
        await asyncio.to_thread(
            wait_until,
            lambda: stack.metrics(scheduler)["queued"] > 16,
            timeout_s=30,
            what="the flood waits",
            interval_s=0.02,
        )
        await one("urgent", "interactive", 4)
        num_before = first_tokens.index("urgent")
        num_waiting = sum(not task.done() for task in flood)
        await asyncio.gather(*flood)
    assert len(first_tokens) == NUM_FLOOD + 1
    assert num_before < NUM_FLOOD, "somebody of the flood came after it"
    assert num_waiting > 8


def hash_id(name: str) -> int:
    """A token id of its own for each prompt, so that no prompt is a cached one."""
    return 1000 + int.from_bytes(hashlib.sha256(name.encode()).digest()[:2]) % 30_000


async def test_the_policy_changes_under_load_and_nothing_is_lost(stack: Stack, limits: Limits) -> None:
    channel, stub = open_stub(stack.grpc_address)
    with limits.scheduling() as scheduling:
        async with channel:
            load = [
                asyncio.create_task(
                    stream(stub, greedy_request([2000 + number] * (5 + number), max_tokens=16, ignore_eos=True))
                )
                for number in range(32)
            ]
            for policy in ("srtf", "slai", "wait", "bucketed", "unchunked", "magnus", "edf", "fcfs"):
                assert (await asyncio.to_thread(scheduling.set_policy, policy)).partition(":")[0] == policy
                await asyncio.sleep(0.3)
            assert_nothing_is_lost(list(await asyncio.gather(*load)), 16)
        assert scheduling.describe().policy == "fcfs"
    assert stack.integrity_errors() == []


def test_the_commands_of_operators(stack: Stack, limits: Limits, tmp_path: Path) -> None:
    by_name = stack.weir("limits", "set", "tenants.acme.weight=3", "--instance", stack.instance)
    assert by_name.returncode == 0, by_name.stderr

    def weir(*arguments: str) -> Result:
        return CliRunner().invoke(app, [*arguments, "--scheduler", limits.scheduler_address])

    assert weir("limits", "set", "lanes.batch.max_queued=900", "lane_order=weighted").exit_code == 0
    view = json.loads(weir("limits", "show", "--json").stdout)
    assert view["overrides"] == {
        "tenants.acme.weight": "3",
        "lanes.batch.max_queued": "900",
        "lane_order": "weighted",
    }
    shown = weir("limits", "show").stdout
    assert "changed at run time: lane_order = weighted" in shown
    wrong = weir("limits", "set", "lanes.vip.max_queued=1")
    assert (wrong.exit_code, "lanes.vip.max_queued" in wrong.output) == (1, True)
    saved = tmp_path / "saved.toml"
    saved.write_text(weir("limits", "show", "--toml").stdout)
    assert CliRunner().invoke(app, ["limits", "check", str(saved)]).exit_code == 0
    assert weir("policy", "set", "nonsense").exit_code == 2
    assert weir("policy", "show").stdout.strip() == "fcfs"
    limits.write("# nothing\n")
    assert json.loads(weir("limits", "show", "--json").stdout)["overrides"] == {}


async def test_what_tenants_had_operators_changed_and_arenas_cached_is_known_to_the_next_scheduler(
    stack: Stack, limits: Limits, otlp_receiver: OtlpReceiver
) -> None:
    limits.write("# outlives\n")
    prompt = [9000 + 7 * number for number in range(10 * PAGE_TOKENS + 5)]
    await ask(stack, greedy_request(prompt, max_tokens=2, request_id="computed"))
    scheduler, transfer = stack.processes("scheduler")[0], stack.processes("transfer")[0]
    wait_until(
        lambda: 10 <= stack.metrics(scheduler)["prefix_pages_known"] == stack.metrics(transfer)["cached_pages"],
        timeout_s=20,
        what="the scheduler knows what is cached",
    )
    with limits.scheduling() as scheduling:
        scheduling.set_limits({"tenants.acme.weight": "3"})
        generate(stack, options=GenerateOptions(max_tokens=4, lane="batch"))
        served, before = 0.0, -1.0
        while served != before:  # the last tokens are told late, and counters are saved once a second
            before = served
            await asyncio.sleep(1.5)
            served = scheduling.describe().tenants["default"]["virtual_tokens_batch"]
    assert served > 0
    stack.kill(scheduler)
    generate(stack, options=GenerateOptions(max_tokens=1, lane="interactive"))
    wait_until(lambda: stack.has_restarted(scheduler), timeout_s=30, what="another scheduler is ready")
    follower = stack.processes("scheduler")[0]
    with SchedulingClient([follower.address]) as scheduling:
        view = scheduling.describe()
    assert view.overrides == {"tenants.acme.weight": "3"}
    assert view.tenants["default"]["virtual_tokens_batch"] == pytest.approx(served)
    wait_until(
        lambda: stack.metrics(follower)["prefix_pages_known"] >= 10, timeout_s=20, what="the arena has told everything"
    )
    await ask(stack, greedy_request(prompt, max_tokens=2, request_id="found"))
    assert [placed_with(otlp_receiver, name) for name in ("computed", "found")] == [
        "0 of 165 tokens cached",
        "160 of 165 tokens cached",
    ]
    assert stack.integrity_errors() == []


async def ask(stack: Stack, request: inference_pb2.GenerateRequest) -> None:
    channel, stub = open_stub(stack.grpc_address)
    async with channel:
        record = await stream(stub, request)
    assert record.code is grpc.StatusCode.OK, record


def placed_with(receiver: OtlpReceiver, request_id: str) -> str:
    """What the scheduler believed to be cached where it placed the request, as the request's span says."""

    def of_request(spans: Sequence[ReceivedSpan]) -> list[ReceivedSpan]:
        return [span for span in spans if span.attributes.get("weir.request.client_id") == request_id]

    [span] = of_request(receiver.wait_for(lambda spans: bool(of_request(spans)), timeout_s=15))
    return str(span.attributes["weir.placement.reason"]).rpartition("ms, ")[2]
