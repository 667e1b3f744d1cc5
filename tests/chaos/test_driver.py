"""The driver of faults does what its reports say: it fills what it fills, and sees what is wrong with a stream."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from tests.chaos.driver.faults import FaultLog, describe_work
from tests.chaos.driver.file_system import SmallFileSystem
from tests.chaos.driver.kinds import without_descriptors
from tests.chaos.driver.memory import try_read_own_mib
from tests.chaos.driver.requests import try_find_problem

from weir.testing.load import StreamRecord, follow
from weir.testing.stack import ProcessView, Stack
from weir.wire.v1 import inference_pb2, types_pb2

LENGTH = types_pb2.FINISH_REASON_LENGTH
WHOLE = StreamRecord(token_ids=[5, 6, 7], text="abc", finish_reasons=[LENGTH], logprobs=[-1.0, -2.0, -3.0])
PART = StreamRecord(token_ids=[5], text="a", logprobs=[-1.0], code=grpc.StatusCode.UNAVAILABLE)


def test_a_stream_is_right_if_it_is_what_it_was_or_where_a_part_is_asked_for_the_beginning_of_that() -> None:
    assert try_find_problem(WHOLE, WHOLE, is_part=False) is None
    assert try_find_problem(PART, WHOLE, is_part=True) is None
    assert try_find_problem(PART, WHOLE, is_part=False) is not None


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": [5, 6, 8]},
        {"token_ids": [5, 6]},
        {"text": "abd"},
        {"logprobs": [-1.0, -2.0, -4.0]},
        {"logprobs": [-1.0, -2.0]},
        {"num_index_errors": 1},
        {"finish_reasons": []},
        {"finish_reasons": [LENGTH, LENGTH]},
        {"finish_reasons": [types_pb2.FINISH_REASON_STOP]},
        {"code": grpc.StatusCode.UNAVAILABLE},
    ],
)
def test_whatever_is_wrong_with_a_stream_is_seen(change: dict[str, Any]) -> None:
    assert try_find_problem(replace(WHOLE, **change), WHOLE, is_part=False) is not None


def test_a_part_with_a_wrong_token_is_wrong() -> None:
    assert try_find_problem(replace(PART, token_ids=[6]), WHOLE, is_part=True) is not None


def test_a_gateway_was_disturbed_if_a_fault_of_its_lasts_or_ended_after_the_stream_began() -> None:
    log = FaultLog(disturbed={"gateway-0": [[10.0, 20.0]], "gateway-1": [[10.0, float("inf")]]})
    assert log.was_disturbed("gateway-0", since_s=15.0)
    assert not log.was_disturbed("gateway-0", since_s=30.0)
    assert log.was_disturbed("gateway-1", since_s=1000.0)
    assert not log.was_disturbed("gateway-2", since_s=0.0)


def test_a_leader_with_a_queue_is_busier_than_one_without_and_that_than_a_standby() -> None:
    queue, leading, standby = ({"is_leader": 1.0, "queued": 3.0}, {"is_leader": 1.0}, {"is_leader": 0.0})
    busy = [describe_work("scheduler", metrics)[0] for metrics in (standby, leading, queue)]
    assert busy == sorted(set(busy))


def test_a_full_file_system_takes_no_byte_and_when_it_is_freed_it_does(tmp_path: Path) -> None:
    small = SmallFileSystem(tmp_path / "small", 4 << 20)
    if not small.is_real:
        with pytest.raises(RuntimeError, match="is not a file system of its own"):
            small.fill()
        pytest.skip(f"no file system can be mounted here: {small.why_not}")
    try:
        small.fill()
        with pytest.raises(OSError, match="No space left"):
            (small.folder / "one").write_bytes(b"x")
        small.free()
        (small.folder / "one").write_bytes(b"x")
    finally:
        small.close()
    assert not os.path.ismount(small.folder)


def test_a_process_without_descriptors_opens_hardly_anything_and_afterwards_it_does() -> None:
    program = "import sys\nkept = []\nfor line in sys.stdin:\n"
    program += " try: kept += [open('/dev/null') for _ in range(9)]; print('opened', flush=True)\n"
    program += " except OSError as error: print(error.errno, flush=True)\n"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        print("", file=process.stdin, flush=True)
        assert process.stdout.readline() == "opened\n"
        with without_descriptors(process.pid):
            print("", file=process.stdin, flush=True)
            assert process.stdout.readline() == "24\n"
        print("", file=process.stdin, flush=True)
        assert process.stdout.readline() == "opened\n"


def test_a_process_that_is_just_being_restarted_is_not_killed_nor_is_whoever_asks(tmp_path: Path) -> None:
    without_pid = ProcessView("decode-0", "decode", 0, "", "restarting", 1)
    with pytest.raises(RuntimeError, match="decode-0 has no process now: it is restarting"):
        Stack(tmp_path).kill(without_pid, signal.SIGCONT)


class Responses:
    """A call that sends a token a step and, once it is cancelled, no more."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self.num_sent = 0
        self.num_cancels = 0

    async def __aiter__(self) -> AsyncIterator[inference_pb2.GenerateResponse]:
        for index in range(self._num_tokens):
            if self.num_cancels:
                raise asyncio.CancelledError
            self.num_sent += 1
            finish_reason = LENGTH if index == self._num_tokens - 1 else types_pb2.FINISH_REASON_UNSPECIFIED
            yield inference_pb2.GenerateResponse(token_ids=[5], first_index=index, finish_reason=finish_reason)

    def cancel(self) -> None:
        self.num_cancels += 1

    def cancelled(self) -> bool:
        return self.num_cancels > 0


@pytest.mark.parametrize(
    ("cancel_after", "num_tokens", "code"),
    [
        (None, 3, grpc.StatusCode.OK),
        (2, 2, grpc.StatusCode.CANCELLED),
        (3, 3, grpc.StatusCode.OK),  # it has ended by itself
    ],
)
async def test_a_client_goes_after_so_many_tokens_unless_that_is_all(
    cancel_after: int | None, num_tokens: int, code: grpc.StatusCode
) -> None:
    call, record = Responses(3), StreamRecord()
    is_cancelled = await follow(cast(Any, call), record, cancel_after_tokens=cancel_after)
    assert (len(record.token_ids), record.code, is_cancelled) == (num_tokens, code, code is grpc.StatusCode.CANCELLED)
    assert (record.num_terminal_events, record.num_index_errors, call.num_sent) == (1, 0, num_tokens)


def test_the_memory_of_a_process_grows_by_what_it_fills() -> None:
    before = try_read_own_mib(os.getpid())
    block = bytearray(64 << 20)
    after = try_read_own_mib(os.getpid())
    assert before is not None
    assert after is not None
    assert len(block) / (1 << 20) * 0.9 < after - before < len(block) / (1 << 20) * 1.5
    assert try_read_own_mib(2**22 + 1) is None
