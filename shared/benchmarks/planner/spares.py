"""`python -m benchmarks.planner.spares`: from the decision until the first token of a spare, and of a new process.

A stack of one prefill worker, one decode worker and a spare, under answers that go on and on. The spare is told to
take work, and drained as a spare again, each round. Then its process is killed, and started anew by the supervisor, as
often: from the kill on, which is the least that an order of a process costs, where model and machine are there already.
"""

import asyncio
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from weir.client.workers import WorkersClient
from weir.testing.load import greedy_request, open_stub, stream
from weir.testing.stack import Stack, wait_until

_NUM_CLIENTS = 6
_LONG_S = 300.0
_POLL_S = 0.02


class Answers:
    """Clients that have one answer after the other."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._is_over = asyncio.Event()

    def end(self) -> None:
        self._is_over.set()

    async def run(self) -> None:
        channel, stub = open_stub(self._address)
        async with channel:
            await asyncio.gather(*(self._client(stub, number) for number in range(_NUM_CLIENTS)))

    async def _client(self, stub: Any, number: int) -> None:
        while not self._is_over.is_set():
            await stream(stub, greedy_request([700 + number] * 20, max_tokens=24, ignore_eos=True), timeout_s=_LONG_S)


def measure(rounds: Annotated[int, typer.Option(min=1, max=50)] = 5) -> None:
    """Medians over rounds; on this machine, with the small model."""
    with tempfile.TemporaryDirectory() as folder, Stack(Path(folder), flags=("--spares", "1")) as stack:
        spare_s, process_s = asyncio.run(_measured(stack, rounds))
    console = Console(highlight=False)
    for what, found in (("a spare", spare_s), ("a new process", process_s)):
        shown = f"{statistics.median(found):.2f} s ({min(found):.2f} to {max(found):.2f})"
        console.print(f"{what}: first token after {shown}; {len(found)} rounds")


async def _measured(stack: Stack, rounds: int) -> tuple[list[float], list[float]]:
    answers = Answers(stack.grpc_address)
    answering = asyncio.create_task(answers.run())
    try:
        return await asyncio.to_thread(_rounds, stack, rounds)
    finally:
        answers.end()
        await answering


def _rounds(stack: Stack, rounds: int) -> tuple[list[float], list[float]]:
    addresses = [view.address for view in stack.processes("scheduler")]
    with WorkersClient(addresses) as workers:
        spare_s = [_spare_round(stack, workers) for _ in range(rounds)]
        return spare_s, [_process_round(stack, workers) for _ in range(rounds)]


def _spare_round(stack: Stack, workers: WorkersClient) -> float:
    wait_until(lambda: bool(_spare_id(workers)), timeout_s=_LONG_S, what="there is a spare")
    worker_id, before = _spare_id(workers), _num_tokens(stack)
    took_s = _seconds(lambda: workers.end_drain(worker_id), lambda: _num_tokens(stack) > before)
    workers.drain(worker_id, grace_s=1.0, as_spare=True)
    return took_s


def _process_round(stack: Stack, workers: WorkersClient) -> float:
    wait_until(lambda: bool(_spare_id(workers)), timeout_s=_LONG_S, what="there is a spare")
    killed = stack.processes("decode")[-1]

    def has_token() -> bool:
        """It comes as a spare, and is told at once to take work."""
        if not stack.has_restarted(killed):
            return False
        worker_id = _spare_id(workers)
        if worker_id:
            workers.end_drain(worker_id)
        return _num_tokens(stack) > 0

    took_s = _seconds(lambda: stack.kill(killed, signal.SIGKILL), has_token)
    worker_id = next(one.worker_id for one in workers.list() if one.worker_id.startswith("decode-1-"))
    workers.drain(worker_id, grace_s=1.0, as_spare=True)
    return took_s


def _num_tokens(stack: Stack) -> float:
    return stack.metrics(stack.processes("decode")[-1])["tokens_generated_total"]


def _spare_id(workers: WorkersClient) -> str:
    """Empty: there is none, or it does not answer yet."""
    return next((one.worker_id for one in workers.list() if one.is_spare and one.duty == "drained"), "")


def _seconds(act: Callable[[], object], is_done: Callable[[], bool]) -> float:
    began_s = time.monotonic()
    act()
    wait_until(is_done, timeout_s=_LONG_S, what="its first token", interval_s=_POLL_S)
    return time.monotonic() - began_s


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(measure)
    app(prog_name="python -m benchmarks.planner.spares")
