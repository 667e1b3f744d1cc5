"""`weir planner tune` beside a stack of two decode workers that run too few sequences at once: it raises their bound on
one of them first, keeps it when that is better, and what it tries does not outlive it."""

import asyncio
import json
import random
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import grpc
import pytest

from weir.cli.planner.page import DecisionLog
from weir.cli.planner.tune import TuneLoop, parse_knob
from weir.cli.planner.watch import GatewayPages
from weir.client.scheduling import SchedulingClient
from weir.core.errors import InvalidRequest
from weir.planner.tuning.settings import TunerSettings
from weir.planner.tuning.tuner import Tuner
from weir.runtime.change_log import read_changes
from weir.testing.load import greedy_request, open_stub, stream
from weir.testing.stack import Stack, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.long, pytest.mark.timeout(400)]

NUM_CLIENTS = 12
LONG_S = 200.0
TICK_S = 1.0
LEASE_TICK_S = 5.0
"""What the lease is reckoned by: what is tried is still there when looks come late."""
BOUND = "workers.decode.max_num_seqs"
KNOB = "decode.max_num_seqs=2,8"
SETTINGS = TunerSettings(
    (parse_knob(KNOB),), 60.0, 5.0, window_s=2.0, max_error=0.4, min_tokens=1, check_windows=1, retry_windows=5
)
"""Surer than this it would be after some windows more; the test is about what is done then, whatever the noise."""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("run"), num_decode=2) as stack:
        yield stack


class Answers:
    """Clients that have one long answer after the other, more than run at once."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._is_over = asyncio.Event()
        self.outcomes: set[tuple[grpc.StatusCode | None, int]] = set()

    def end(self) -> None:
        self._is_over.set()

    async def run(self) -> None:
        channel, stub = open_stub(self._stack.grpc_address)
        async with channel:
            await asyncio.gather(*(self._client(stub, number) for number in range(NUM_CLIENTS)))

    async def _client(self, stub: Any, number: int) -> None:
        request = greedy_request([700 + number] * 20, max_tokens=48, ignore_eos=True)
        while not self._is_over.is_set():
            record = await stream(stub, request, timeout_s=LONG_S)
            self.outcomes.add((record.code, record.num_index_errors))


class LiveTuner:
    """The command's loop, in this process: so that it can be left to die."""

    def __init__(self, stack: Stack, pages: GatewayPages, client: SchedulingClient) -> None:
        self.lines: list[dict[str, Any]] = []
        log = DecisionLog(lambda line: self.lines.append(json.loads(line)), every_s=1.0, mode="tune")
        self._loop = TuneLoop(pages, client, Tuner(SETTINGS, random.Random(0)), log, LEASE_TICK_S, acts=True)
        self._stack = stack

    async def until(self, event: str) -> dict[str, Any]:
        """Looks until it is told anew."""
        told = len(self.lines)
        async with asyncio.timeout(LONG_S):
            while not (found := [line for line in self.lines[told:] if line["event"] == event]):
                await asyncio.to_thread(self._loop.step)
                await asyncio.sleep(TICK_S)
        return found[0]


async def test_a_bound_that_is_too_low_is_raised_on_a_canary_then_on_all_and_a_dead_tuner_leaves_no_trial(
    stack: Stack,
) -> None:
    addresses = [view.address for view in stack.processes("scheduler")]
    with SchedulingClient(addresses) as client, closing(GatewayPages([stack.http_url], "")) as pages:
        client.keep_limits({BOUND: "2"}, reason="a bad start")
        answers = Answers(stack)
        answering = asyncio.create_task(answers.run())
        try:
            advised = await asyncio.to_thread(advice, stack)
            assert dict(client.describe().trial) == {}, "advice changes nothing"
            tuner = LiveTuner(stack, pages, client)
            first = await tuner.until("tune_try")
            [canary] = first["workers"]
            assert advised["value"] == first["value"] == 4
            assert dict(client.describe().trial) == {f"workers.{canary}.max_num_seqs": "4"}
            kept = await tuner.until("tune_keep")
            assert kept["cause"] == "better"
            assert kept["figures"]["evidence"] >= kept["figures"]["evidence_needed"]
            assert dict(client.describe().tuned) == {BOUND: str(kept["value"])}
            await tuner.until("tune_try")
            assert client.describe().trial
            in_force = dict(client.describe().tuned)
            # From here on nobody looks: the tuner is dead.
            await asyncio.to_thread(
                wait_until, lambda: not client.describe().trial, timeout_s=90, what="the lease ends"
            )
        finally:
            answers.end()
            await answering
        assert dict(client.describe().tuned) == in_force, "what was kept stays"
        client.set_limits({BOUND: "3"})
        with pytest.raises(InvalidRequest, match="set by hand"):
            client.keep_limits({BOUND: "4"}, reason="")
        client.set_limits({BOUND: "0"})
        reverted = stack.weir("planner", "tune", "--revert", "--instance", stack.instance, timeout_s=LONG_S)
        assert (reverted.returncode, BOUND in reverted.stderr) == (0, True), reverted.stderr
        assert dict(client.describe().tuned) == {}
    assert answers.outcomes == {(grpc.StatusCode.OK, 0)}
    actions = [
        (one["action"], one["reason"].partition(":")[0])
        for one in read_changes(stack.runtime_dir / stack.instance / "logs")
        if "reason" in one
    ]
    expected = [("keep limits", "a bad start"), ("try limits", "waiting"), ("keep limits", "better")]
    assert [one for one in expected if one in actions] == expected
    assert ("end trial", "not renewed in time") in actions


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def advice(stack: Stack) -> dict[str, Any]:
    """What the command says that it would try, without `--apply`."""
    words = ("planner", "tune", "--tune", KNOB, "--instance", stack.instance, "--itl-ms", "5000")
    options = ("--tick-s", "1", "--window-s", "2", "--num-looks", "6")
    ended = stack.weir(*words, *options, timeout_s=LONG_S)
    assert ended.returncode == 0, ended.stderr
    begun, *told = lines_of(ended.stdout)
    assert (begun["event"], begun["acts"]) == ("tune_begin", False)
    advised = [one for one in told if one["event"] == "tune_advice"]
    assert advised, told
    return advised[0]
