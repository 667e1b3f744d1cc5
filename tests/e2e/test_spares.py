"""A warmed spare beside a running stack: nothing is placed on it until it is told to take work, as by the planner."""

import asyncio
import json
from collections.abc import Iterator

import grpc
import pytest

from weir.client.workers import WorkersClient, WorkerView
from weir.core.cost import StepCost
from weir.sim.profile import CostProfile, save_profile
from weir.testing.load import StreamRecord, greedy_request, open_stub, stream
from weir.testing.stack import Stack, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.long, pytest.mark.timeout(400)]

LONG_S = 200.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("run"), flags=("--spares", "1")) as stack:
        yield stack


async def answers(stack: Stack, num: int) -> list[StreamRecord]:
    """Of as many prompts."""
    channel, stub = open_stub(stack.grpc_address)
    async with channel:
        requests = [greedy_request([900 + n] * 20, max_tokens=16, ignore_eos=True) for n in range(num)]
        return list(await asyncio.gather(*(stream(stub, one, timeout_s=LONG_S) for one in requests)))


async def test_a_spare_gets_nothing_until_it_is_used_and_the_planner_uses_it_before_it_takes_from_a_pool(
    stack: Stack, tmp_path_factory: pytest.TempPathFactory
) -> None:
    addresses = [view.address for view in stack.processes("scheduler")]

    def tokens_of_spare() -> float:
        return stack.metrics(stack.processes("decode")[-1])["tokens_generated_total"]

    with WorkersClient(addresses) as workers:

        def views() -> list[WorkerView]:
            return sorted(workers.list(), key=lambda one: one.worker_id)

        def spares() -> list[str]:
            return [one.worker_id for one in views() if one.is_spare and one.duty == "drained"]

        [spare] = spares()
        assert spare.startswith("decode-1-")
        undisturbed = await answers(stack, 4)
        assert tokens_of_spare() == 0
        workers.end_drain(spare)
        await asyncio.to_thread(wait_until, lambda: not spares(), timeout_s=30, what="it serves")
        workers.drain(spare, grace_s=1.0)
        await asyncio.to_thread(
            wait_until, lambda: [one.duty for one in views()].count("drained") == 1, timeout_s=30, what="it is drained"
        )
        assert spares() == [], "who was drained by an operator is left alone"
        workers.end_drain(spare)
        path = tmp_path_factory.mktemp("profile") / "here.yaml"
        save_profile(CostProfile("here", StepCost(10.0, 1.0, 0.0, 3.0, 0.0), 2000, 23_040), path)
        words = ("planner", "switch", "--instance", stack.instance, "--profile", str(path))
        times = ("--tick-s", "0.2", "--window-s", "1", "--start-s", "5", "--grace-s", "0.5")
        options = (*times, "--ttft-ms", "1500", "--itl-ms", "2000", "--max-workers", "2,2")
        down = ("--spares", "1", "--down-after-s", "1", "--num-looks", "25")
        rested = await asyncio.to_thread(stack.weir, *words, *options, *down, timeout_s=LONG_S)
        assert "rest_begun" in {json.loads(line)["event"] for line in rested.stdout.splitlines()}, rested.stdout
        await asyncio.to_thread(wait_until, lambda: len(spares()) == 1, timeout_s=90, what="one rests as a spare")
        [spare] = spares()

        up = ("--min-workers", "1,2", "--num-looks", "12")
        ended = await asyncio.to_thread(stack.weir, *words, *options, *up, timeout_s=LONG_S)
        assert ended.returncode == 0, ended.stderr
        told = [json.loads(line) for line in ended.stdout.splitlines()]
        used = [one for one in told if one["event"] == "spare_used"]
        assert [one["worker"] for one in used] == [spare], told
        assert "switch_begun" not in {one["event"] for one in told}
        await asyncio.to_thread(
            wait_until, lambda: {one.duty for one in views()} == {"serving"}, timeout_s=90, what="all of them serve"
        )
        assert spares() == []
    again = await answers(stack, 4)
    assert [one.token_ids for one in again] == [one.token_ids for one in undisturbed]
    assert {(one.code, one.num_index_errors) for one in again} == {(grpc.StatusCode.OK, 0)}
