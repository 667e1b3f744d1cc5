"""Workers drained, given another role and ended, processes restarted, all of it under streams: every stream has the
tokens that it has undisturbed, and nothing is left."""

import asyncio
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from weir.client.workers import WorkersClient
from weir.core.errors import Unavailable
from weir.kv.arena.segment import segment_path
from weir.testing.load import StreamRecord, greedy_request, open_stub, stream
from weir.testing.stack import ProcessView, Stack, wait_until
from weir.wire.v1 import inference_pb2

pytestmark = [pytest.mark.stack, pytest.mark.timeout(400)]

NUM_STREAMS = 8
NUM_TOKENS = 160
LONG_S = 200.0
REFUSALS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""CANCELLED is what gRPC itself makes of a call that comes in the moment in which its server closes."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    # However slow the machine: what another worker gets is not computed again.
    environ = {"WEIR_ADOPTER_WAIT_S": "30"}
    flags = ("--schedulers", "2")
    with Stack(tmp_path_factory.mktemp("run"), num_decode=2, flags=flags, environ=environ) as stack:
        yield stack


def request_of(number: int, max_tokens: int) -> inference_pb2.GenerateRequest:
    """Greedy and seeded ones, with penalties, stop strings and log-probabilities, short and long prompts."""
    request = greedy_request([500 + number] * (20 + 20 * number), max_tokens=max_tokens, ignore_eos=True)
    if number % 2:
        request.options.sampling.temperature = 0.9
        request.options.sampling.seed = number
        request.options.sampling.repetition_penalty = 1.1
    if number % 4 == 2:
        request.options.stop_conditions.stop.append("zzzz")
    if number % 4 == 3:
        request.options.sampling.logprobs = 2
    return request


def weir(stack: Stack, *arguments: str, timeout_s: float = LONG_S) -> subprocess.CompletedProcess[str]:
    return stack.weir(*arguments, "--instance", stack.instance, timeout_s=timeout_s)


async def streams(stack: Stack, max_tokens: int, act: Callable[[], object] | None = None) -> list[StreamRecord]:
    """All at once; amid them something is done."""
    channel, stub = open_stub(stack.grpc_address)
    async with channel:
        tasks = [
            asyncio.create_task(stream(stub, request_of(number, max_tokens), timeout_s=LONG_S))
            for number in range(NUM_STREAMS)
        ]
        if act is not None:
            await asyncio.sleep(0.8)
            assert not all(task.done() for task in tasks)
            await asyncio.to_thread(act)
        return list(await asyncio.gather(*tasks))


@pytest.fixture(scope="module")
def undisturbed(stack: Stack) -> list[StreamRecord]:
    return asyncio.run(streams(stack, NUM_TOKENS))


def same(records: list[StreamRecord], undisturbed: list[StreamRecord]) -> None:
    for record, expected in zip(records, undisturbed, strict=True):
        assert (record.code, record.details) == (grpc.StatusCode.OK, "")
        assert (record.num_terminal_events, record.num_index_errors) == (1, 0)
        assert record.token_ids == expected.token_ids[: len(record.token_ids)]
        assert len(record.token_ids) == len(expected.token_ids)


def nothing_is_left(stack: Stack) -> None:
    wait_until(stack.is_idle, timeout_s=90, what="every page is free or cached, and nothing is reserved")


def duty_of(workers: WorkersClient, worker_id: str) -> str:
    """Empty while no scheduler answers, or knows it."""
    try:
        return next((one.duty for one in workers.list() if one.worker_id == worker_id), "")
    except Unavailable:
        return ""


def process(stack: Stack, name: str) -> ProcessView:
    return next(view for view in stack.processes() if view.name == name)


async def test_a_decode_worker_is_drained_under_streams_and_none_notices(
    stack: Stack, undisturbed: list[StreamRecord]
) -> None:
    def drain() -> None:
        shown = weir(stack, "drain", "decode-0", "--grace-s", "0.5", "--wait")
        assert shown.returncode == 0, shown.stderr
        assert re.search(r"decode-0-\w+ is drained after", shown.stderr)

    same(await streams(stack, NUM_TOKENS, drain), undisturbed)
    nothing_is_left(stack)
    drained = stack.metrics(process(stack, "decode-0"))
    assert (drained["is_drained"], drained["num_live"], drained["num_held_pages"]) == (1, 0, 0)
    assert "drained" in weir(stack, "status").stdout
    num_steps = drained["decode_steps_total"]
    same(await streams(stack, NUM_TOKENS), undisturbed)
    assert stack.metrics(process(stack, "decode-0"))["decode_steps_total"] == num_steps, "it got something"

    again = weir(stack, "drain", "decode-0")
    assert again.returncode == 0
    assert "drained with 0 sequences" in again.stderr
    refused = weir(stack, "drain", "decode-1")
    assert refused.returncode == 1
    assert "no worker serves its model" in refused.stderr
    undone = weir(stack, "drain", "decode-0", "--undo")
    assert "takes work again; it was drained" in undone.stderr
    same(await streams(stack, NUM_TOKENS), undisturbed)
    assert stack.metrics(process(stack, "decode-0"))["decode_steps_total"] > num_steps


@pytest.mark.parametrize("how", ["drain", pytest.param("sigterm", marks=pytest.mark.long)])
async def test_the_streams_of_an_emptied_decode_worker_go_on_at_another_one_at_once(
    stack: Stack, undisturbed: list[StreamRecord], how: str
) -> None:
    """Nothing is computed again, no request is dispatched again, and no log-probability is missing."""
    prefill, victim, other = (process(stack, name) for name in ("prefill-0", "decode-0", "decode-1"))
    gateway = process(stack, "gateway-0")
    schedulers = [view.address for view in stack.processes("scheduler")]

    def counts() -> dict[str, float]:
        at_gateway, at_other, at_prefill = (stack.metrics(view) for view in (gateway, other, prefill))
        names = ("prompt_tokens_computed_total", "tokens_recomputed_total")
        return {
            "computed": sum(metrics[name] for metrics in (at_prefill, at_other) for name in names),
            "dispatched again": at_gateway["interruptions_total"],
            "adopted": at_other["adopted_total"],
            "followed": at_gateway["adoptions_total"],
        }

    before: dict[str, float] = {}

    def empty() -> None:
        def num_running() -> float:
            return sum(stack.metrics(view)["num_running"] for view in (victim, other))

        with WorkersClient(schedulers) as workers:  # streams may end before `weir drain` has started
            (worker_id,) = [one.worker_id for one in workers.list() if one.address == victim.address]
            wait_until(lambda: num_running() == NUM_STREAMS, timeout_s=30, what="all are decoded", interval_s=0.02)
            before.update(counts())
            if how == "drain":
                workers.drain(worker_id, grace_s=600)  # it would wait for so long for what it does not give away
                wait_until(lambda: duty_of(workers, worker_id) == "drained", timeout_s=90, what="it is drained")
            else:
                stack.kill(victim, signal.SIGTERM)
                wait_until(lambda: stack.has_restarted(victim), timeout_s=90, what="decode-0 is back")

    try:
        records = await streams(stack, NUM_TOKENS, empty)
        same(records, undisturbed)
        assert [record.logprobs for record in records] == [record.logprobs for record in undisturbed]
        after = counts()
        grown = {name: after[name] - before[name] for name in before}
        assert grown["adopted"] == grown["followed"] > 0
        assert (grown["computed"], grown["dispatched again"]) == (0, 0)
        assert max(record.max_pause_s for record in records) < 20
    finally:
        weir(stack, "drain", "decode-0", "--undo")
    nothing_is_left(stack)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("drain", "decode-7"), 1, "there is no worker 'decode-7'; there are: decode-0-"),
        (("drain", "gateway-0"), 1, "there is no worker 'gateway-0'"),
        (("drain", "decode-0", "--grace-s", "-1"), 2, "--grace-s"),
        (("role", "decode-7", "prefill"), 1, "there is no worker"),
        (("role", "decode-0", "gateway"), 2, "prefill"),
        (("role", "decode-0", "decode"), 0, "is a decode worker already"),
        (("restart",), 2, "give --rolling"),
        (("restart", "--rolling", "decode-7"), 1, "no process is named 'decode-7'"),
    ],
)
def test_what_cannot_be_is_refused_by_name(stack: Stack, arguments: tuple[str, ...], code: int, message: str) -> None:
    shown = weir(stack, *arguments)
    assert shown.returncode == code
    assert message in shown.stderr


async def test_a_worker_changes_its_role_under_streams_and_back(stack: Stack, undisturbed: list[StreamRecord]) -> None:
    pid = process(stack, "decode-1").pid

    def change_to(role: str) -> Callable[[], None]:
        def change() -> None:
            shown = weir(stack, "role", "decode-1", role, "--grace-s", "0.5", "--wait")
            assert shown.returncode == 0, shown.stderr

        return change

    try:
        same(await streams(stack, NUM_TOKENS, change_to("prefill")), undisturbed)
        changed = process(stack, "decode-1")
        assert (changed.role, changed.pid) == ("prefill", pid), "the same process, with the weights that it had"
        shown = weir(stack, "role", "prefill-0", "decode", "--grace-s", "0.5", "--wait")
        assert shown.returncode == 0, shown.stderr
        num_computed = stack.metrics(changed)["prompt_tokens_computed_total"]
        fresh = greedy_request([9] * 1500, max_tokens=4, ignore_eos=True)
        channel, stub = open_stub(stack.grpc_address)
        async with channel:
            assert (await stream(stub, fresh)).code is grpc.StatusCode.OK
        nothing_is_left(stack)
        assert stack.metrics(changed)["prompt_tokens_computed_total"] > num_computed, "the only prefill worker now"
    finally:
        change_to("decode")()
        back = await streams(stack, NUM_TOKENS, lambda: weir(stack, "role", "prefill-0", "prefill", "--wait"))
    same(back, undisturbed)
    assert {view.role for view in stack.processes("decode")} == {"decode"}
    assert [view.name for view in stack.processes("prefill")] == ["prefill-0"]
    nothing_is_left(stack)


@pytest.mark.parametrize("name", [pytest.param("decode-0", marks=pytest.mark.long), "prefill-0"])
async def test_sigterm_of_a_worker_costs_no_stream_a_token(
    stack: Stack, undisturbed: list[StreamRecord], name: str
) -> None:
    victim = process(stack, name)
    same(await streams(stack, NUM_TOKENS, lambda: stack.kill(victim, signal.SIGTERM)), undisturbed)
    wait_until(lambda: stack.has_restarted(victim), timeout_s=90, what=f"{name} is back")
    nothing_is_left(stack)


class Traffic:
    """One stream after the other from each of some clients. What a gateway refuses while it ends, or nobody takes while
    it starts, is sent again, as clients do; what it has taken must end well."""

    def __init__(self, stack: Stack, undisturbed: list[StreamRecord]) -> None:
        self._stack = stack
        self._undisturbed = undisturbed
        self._is_over = False
        self.num_streams = 0
        self.wrong: list[str] = []

    async def run(self, act: Callable[[], None]) -> None:
        channel, stub = open_stub(self._stack.grpc_address)
        async with channel:
            clients = [asyncio.create_task(self._client(stub, number)) for number in range(NUM_STREAMS)]
            try:
                await asyncio.to_thread(act)
            finally:
                self._is_over = True
                await asyncio.gather(*clients)

    async def _client(self, stub: object, number: int) -> None:
        expected = self._undisturbed[number].token_ids
        while not self._is_over:
            record = await stream(stub, request_of(number, 60), timeout_s=LONG_S)  # type: ignore[arg-type]
            if record.code in REFUSALS and not record.token_ids:
                await asyncio.sleep(0.2)
                continue
            self.num_streams += 1
            if (record.code, record.num_index_errors) != (grpc.StatusCode.OK, 0) or record.token_ids != expected[:60]:
                self.wrong.append(f"{number}: {record.code.name} {record.details} {len(record.token_ids)} tokens")


@pytest.mark.long
async def test_every_process_is_restarted_under_streams(stack: Stack, undisturbed: list[StreamRecord]) -> None:
    before = {view.name: view.pid for view in stack.processes()}
    traffic, shown = Traffic(stack, undisturbed), []

    def restart() -> None:
        shown.append(weir(stack, "restart", "--rolling", "--grace-s", "1", timeout_s=360))

    await traffic.run(restart)
    assert shown[0].returncode == 0, shown[0].stderr
    after = {view.name: view.pid for view in stack.processes()}
    assert before.keys() == after.keys()
    assert not set(before.values()) & set(after.values())
    order = re.findall(r"^ *(\S+) +ready again", shown[0].stderr, re.MULTILINE)
    assert sorted(order[:2]) == ["scheduler-0", "scheduler-1"]
    assert order[-1] == "nats"
    assert (traffic.wrong, stack.status()["state"]) == ([], "ready"), f"{traffic.num_streams} streams"
    assert traffic.num_streams > NUM_STREAMS
    nothing_is_left(stack)


@pytest.mark.long
async def test_a_segment_of_another_version_is_started_cold_and_that_is_said(
    stack: Stack, undisturbed: list[StreamRecord]
) -> None:
    """As if the programs on the disk were newer than those that run."""
    path = segment_path(stack.instance)
    with path.open("r+b") as file:
        file.seek(8)  # after the magic number
        file.write(b"\x63")
    traffic, shown = Traffic(stack, undisturbed), []
    await traffic.run(lambda: shown.append(weir(stack, "restart", "--rolling", "decode-0", "--grace-s", "0")))
    assert shown[0].returncode == 0, shown[0].stderr
    assert re.search(
        r"cold start of transfer-0, prefill-0, decode-0, decode-1 together: .* version 99", shown[0].stderr
    )
    assert traffic.wrong == []
    assert path.read_bytes()[8] != 0x63
    nothing_is_left(stack)


@pytest.mark.long
async def test_the_only_decode_worker_is_drained_by_force_and_its_streams_wait(tmp_path: Path) -> None:
    with Stack(tmp_path) as stack:
        expected = await streams(stack, NUM_TOKENS)

        def drain() -> None:
            refused = weir(stack, "drain", "decode-0", "--grace-s", "0")
            assert refused.returncode == 1
            assert "--force" in refused.stderr or "force" in refused.stderr
            assert weir(stack, "drain", "decode-0", "--grace-s", "0", "--force", "--wait").returncode == 0
            assert stack.metrics(process(stack, "decode-0"))["num_live"] == 0
            time.sleep(1.0)
            assert weir(stack, "drain", "decode-0", "--undo").returncode == 0

        records = await streams(stack, NUM_TOKENS, drain)
        same(records, expected)
        assert max(record.max_pause_s for record in records) > 1.0
        nothing_is_left(stack)
