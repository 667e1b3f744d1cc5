"""`python -m tests.chaos.kills`: one process after another killed amid streams; how long these paused, and what of them
was computed again.

    python -m tests.chaos.kills --role decode --kills 20 --streams 16 --decode 2
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from weir.testing.load import StreamRecord, greedy_request, open_stub, stream
from weir.testing.stack import ProcessView, Stack, wait_until
from weir.wire.v1 import inference_pb2

_COMPUTED = ("prompt_tokens_computed_total", "tokens_recomputed_total")


@dataclass
class KillTally:
    """`num_computed_again`: tokens of prompts that workers computed after a kill amid streams, all of which had been
    computed before."""

    pauses_s: list[float] = field(default_factory=list)
    num_streams: int = 0
    num_lost: int = 0
    num_wrong: int = 0
    num_computed_again: int = 0
    num_adoptions: int = 0
    num_interruptions: int = 0


def make_request(number: int) -> inference_pb2.GenerateRequest:
    """Greedy and seeded ones, with penalties and log-probabilities."""
    request = greedy_request([500 + number] * (20 + 9 * number), max_tokens=200, ignore_eos=True)
    sampling = request.options.sampling
    if number % 2:
        sampling.temperature, sampling.seed, sampling.presence_penalty = 0.9, number, 0.5
    if number % 4 == 3:
        sampling.logprobs = 2
    return request


async def run_streams(stack: Stack, num_streams: int, amid: "asyncio.Future[None] | None" = None) -> list[StreamRecord]:
    channel, stub = open_stub(stack.grpc_address)
    async with channel:
        tasks = [asyncio.create_task(stream(stub, make_request(number))) for number in range(num_streams)]
        if amid is not None:
            await amid
        return list(await asyncio.gather(*tasks))


def num_decoding(stack: Stack, workers: list[ProcessView]) -> float:
    return sum(stack.metrics(worker)["num_running"] for worker in workers if worker.role == "decode")


def are_all_back(stack: Stack) -> bool:
    try:
        num_computed(stack, workers_of(stack))
    except grpc.RpcError:
        return False
    return True


def workers_of(stack: Stack) -> list[ProcessView]:
    return [*stack.processes("prefill"), *stack.processes("decode")]


def num_computed(stack: Stack, workers: list[ProcessView]) -> dict[int, float]:
    """By process id."""
    totals = {}
    for worker in workers:
        metrics = stack.metrics(worker)
        totals[worker.pid] = sum(metrics[name] for name in _COMPUTED)
    return totals


async def kill_once(stack: Stack, role: str, expected: list[StreamRecord], tally: KillTally) -> None:
    num_streams, workers = len(expected), workers_of(stack)
    candidates = stack.processes(role)  # asked for now: it takes longer than an answer
    before: dict[int, float] = {}

    async def kill_amid() -> None:
        await asyncio.to_thread(
            wait_until, lambda: num_decoding(stack, workers) == num_streams, timeout_s=60, what="all are decoded"
        )
        before.update(num_computed(stack, workers))
        stack.kill(max(candidates, key=lambda process: stack.metrics(process).get("num_running", 0.0)))

    records = await run_streams(stack, num_streams, asyncio.ensure_future(kill_amid()))
    for record, undisturbed in zip(records, expected, strict=True):
        tally.num_streams += 1
        tally.num_lost += record.code is not grpc.StatusCode.OK
        tally.num_wrong += record.token_ids != undisturbed.token_ids or record.num_index_errors > 0
        tally.pauses_s.append(record.max_pause_s)
    await asyncio.to_thread(wait_until, lambda: are_all_back(stack), timeout_s=60, what="all workers are back")
    after = num_computed(stack, workers_of(stack))
    tally.num_computed_again += int(sum(total - before.get(pid, 0.0) for pid, total in after.items()))
    gateway = stack.metrics(stack.processes("gateway")[0])
    tally.num_adoptions, tally.num_interruptions = (
        int(gateway["adoptions_total"]),
        int(gateway["interruptions_total"]),
    )


async def measure(stack: Stack, role: str, num_kills: int, num_streams: int) -> KillTally:
    tally = KillTally()
    expected = await run_streams(stack, num_streams)
    for _ in range(num_kills):
        await kill_once(stack, role, expected, tally)
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--role", default="decode")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--decode", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, Stack(Path(directory), num_decode=options.decode) as stack:
        tally = asyncio.run(measure(stack, options.role, options.kills, options.streams))
    pauses = sorted(tally.pauses_s)
    p99 = pauses[min(len(pauses) - 1, round(0.99 * len(pauses)))]
    sys.stdout.write(
        f"{options.kills} kills of {options.role}, {tally.num_streams} streams: {tally.num_lost} lost, "
        f"{tally.num_wrong} wrong; {tally.num_computed_again} tokens computed again; "
        f"{tally.num_adoptions} adoptions, {tally.num_interruptions} interruptions; "
        f"longest pause p50 {statistics.median(pauses):.2f} s, p99 {p99:.2f} s, max {pauses[-1]:.2f} s\n"
    )


if __name__ == "__main__":
    main()
