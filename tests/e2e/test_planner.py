"""`weir planner` beside a stack whose prompts queue: what it advises, and that a change of roles costs no token."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from weir.client.workers import WorkersClient
from weir.core.cost import StepCost
from weir.sim.profile import CostProfile, save_profile
from weir.testing.load import StreamRecord, greedy_request, open_stub, stream
from weir.testing.stack import Stack, wait_until
from weir.wire.v1 import inference_pb2

pytestmark = [pytest.mark.stack, pytest.mark.long, pytest.mark.timeout(400)]

NUM_CLIENTS = 12
LONG_S = 200.0
OPTIONS = ("--ttft-ms", "1500", "--itl-ms", "2000", "--tick-s", "0.2", "--window-s", "1", "--start-s", "5")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    flags = ("--arena-bytes", "0")  # as the machine has it: in a small one no decode worker is to spare
    environ = {"WEIR_ADOPTER_WAIT_S": "30"}
    with Stack(tmp_path_factory.mktemp("run"), num_decode=2, flags=flags, environ=environ) as stack:
        yield stack


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """About what a step takes here: the decisions of this test do not hang on how exactly."""
    path = tmp_path_factory.mktemp("profile") / "here.yaml"
    save_profile(CostProfile("here", StepCost(10.0, 1.0, 0.0, 3.0, 0.0), 2000, 23_040), path)
    return str(path)


def answers() -> list[inference_pb2.GenerateRequest]:
    return [greedy_request([700 + number] * 30, max_tokens=120, ignore_eos=True) for number in range(4)]


class Prompts:
    """Clients that send one prompt after the other, none of which is known, so that prompts queue all the time."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._number = 0
        self._is_over = asyncio.Event()
        self.codes: set[grpc.StatusCode] = set()

    def end(self) -> None:
        self._is_over.set()

    async def run(self) -> None:
        channel, stub = open_stub(self._stack.grpc_address)
        async with channel:
            await asyncio.gather(*(self._client(stub) for _ in range(NUM_CLIENTS)))

    async def _client(self, stub: Any) -> None:
        while not self._is_over.is_set():
            self._number += 1
            prompt = [1000 + self._number, *([40] * 500)]
            record = await stream(stub, greedy_request(prompt, max_tokens=2, ignore_eos=True), timeout_s=LONG_S)
            self.codes.add(record.code)


async def planner(stack: Stack, profile: str, mode: str, num_looks: int) -> list[dict[str, Any]]:
    """The lines that it wrote."""
    words = ("planner", mode, "--instance", stack.instance, "--profile", profile, "--num-looks", str(num_looks))
    ended = await asyncio.to_thread(stack.weir, *words, *OPTIONS, "--grace-s", "0.5", timeout_s=LONG_S)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


async def streamed(stack: Stack) -> list[StreamRecord]:
    channel, stub = open_stub(stack.grpc_address)
    async with channel:
        return list(await asyncio.gather(*(stream(stub, one, timeout_s=LONG_S) for one in answers())))


async def test_queued_prompts_get_another_prefill_worker_and_running_answers_do_not_change(
    stack: Stack, profile: str
) -> None:
    schedulers = [view.address for view in stack.processes("scheduler")]

    def roles() -> list[str]:
        with WorkersClient(schedulers) as workers:
            return sorted(one.role for one in workers.list() if one.duty == "serving")

    undisturbed = await streamed(stack)
    prompts = Prompts(stack)
    queueing = asyncio.create_task(prompts.run())
    try:
        advising = asyncio.create_task(planner(stack, profile, "advise", 14))
        streaming = asyncio.create_task(streamed(stack))
        told = await planner(stack, profile, "switch", 18)
        advice, during = await advising, await streaming
    finally:
        prompts.end()
        await queueing
    wants_more = [one for one in advice if one["event"] == "decision" and one["prefill"]["delta"] > 0]
    assert wants_more, advice
    assert {one["prefill"]["reason"] for one in wants_more} <= {"backlog", "floor"}
    events = [one["event"] for one in told]
    assert events.count("switch_begun") == 1, told
    # on a slow machine a page of figures is missing now and then
    assert {one["event"] for one in advice} - {"missing"} == {"decision"}, "advice changes nothing"
    wait_until(lambda: roles() == ["decode", "prefill", "prefill"], timeout_s=90, what="a decode worker prefills")
    assert [one.token_ids for one in during] == [one.token_ids for one in undisturbed]
    assert {(one.code, one.num_index_errors) for one in during} == {(grpc.StatusCode.OK, 0)}
    assert prompts.codes == {grpc.StatusCode.OK}
    wait_until(stack.is_idle, timeout_s=90, what="every page is free or cached, and nothing is reserved")
