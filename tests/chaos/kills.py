"""`python -m tests.chaos.kills`: processes killed, emptied, given another role or restarted amid streams, again and
again; how long the streams paused, and what of them was computed again.

    python -m tests.chaos.kills --how kill --role decode --times 20 --streams 16 --decode 2
    python -m tests.chaos.kills --how drain --times 20
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from tests.chaos.disturbances import HOWS, prepare
from tests.chaos.resuming import Resumed, stream_grpc

from weir.testing.load import StreamRecord, follow, greedy_request, open_stub, stream
from weir.testing.stack import ProcessView, Stack, wait_until
from weir.wire.v1 import inference_pb2

_COMPUTED = ("prompt_tokens_computed_total", "tokens_recomputed_total")
_MAX_TOKENS = 200
_STREAM_S = 300.0


@dataclass
class Tally:
    """`num_computed_again`: tokens of prompts that workers computed after a disturbance amid streams, all of which had
    been computed before; without workers whose counters began anew meanwhile.

    `first_tokens_s`: from a disturbance to the first token of a request that was sent then: at most what the scheduler
    needed to grant again."""

    pauses_s: list[float] = field(default_factory=list)
    first_tokens_s: list[float] = field(default_factory=list)
    num_streams: int = 0
    num_lost: int = 0
    num_wrong: int = 0
    num_computed_again: int = 0
    num_adopted: int = 0
    num_dispatched_again: int = 0

    def add(self, record: StreamRecord, undisturbed: StreamRecord) -> None:
        self.num_streams += 1
        self.num_lost += record.code is not grpc.StatusCode.OK
        self.num_wrong += record.token_ids != undisturbed.token_ids or record.num_index_errors > 0
        self.pauses_s.append(record.max_pause_s)

    def describe(self) -> str:
        pauses = sorted(self.pauses_s)
        p99 = pauses[min(len(pauses) - 1, round(0.99 * len(pauses)))]
        described = (
            f"{self.num_streams} streams: {self.num_lost} lost, {self.num_wrong} wrong; "
            f"{self.num_computed_again} tokens computed again; "
            f"{self.num_adopted} adopted, {self.num_dispatched_again} dispatched again; "
            f"longest pause p50 {statistics.median(pauses):.2f} s, p99 {p99:.2f} s, max {pauses[-1]:.2f} s"
        )
        firsts = sorted(self.first_tokens_s)
        if firsts:
            described += f"; first token after it p50 {statistics.median(firsts):.2f} s, max {firsts[-1]:.2f} s"
        return described


class Series:
    """One stack, disturbed a number of times in one way."""

    def __init__(self, stack: Stack, how: str, role: str, num_streams: int) -> None:
        self._stack = stack
        self._how = how
        self._role = role
        self._num_streams = num_streams
        self._addresses = [view.address for view in stack.processes("gateway")]
        self.tally = Tally()

    async def run(self, times: int) -> None:
        expected = [StreamRecord() for _ in range(self._num_streams)]
        await asyncio.gather(*(self._stream(number, "", record) for number, record in enumerate(expected)))
        for index in range(times):
            await self._disturb_once(index, expected)

    async def _disturb_once(self, index: int, expected: list[StreamRecord]) -> None:
        stack, tally = self._stack, self.tally
        workers, gateways = workers_of(stack), stack.processes("gateway")
        disturbance = await asyncio.to_thread(prepare, self._how, stack, self._role)
        counted = counts_of(stack, gateways)
        is_over = asyncio.Event()
        first_records = [StreamRecord() for _ in range(self._num_streams)]

        async def client(number: int) -> None:
            turn, record = 0, first_records[number]
            while not turn or (disturbance.is_long and not is_over.is_set()):
                key = f"{self._how}-{index}-{number}-{turn}" if HOWS[self._how].is_keyed else ""
                await self._stream(number, key, record)
                tally.add(record, expected[number])
                turn, record = turn + 1, StreamRecord()

        def are_all_decoded() -> bool:
            """And every prompt is computed: decode workers may read one themselves."""
            have_begun = all(record.token_ids for record in first_records)
            return have_begun and num_decoding(stack, workers) == self._num_streams

        clients = [asyncio.create_task(client(number)) for number in range(self._num_streams)]
        await asyncio.to_thread(wait_until, are_all_decoded, timeout_s=60, what="all are decoded")
        before = num_computed(stack, workers)
        first = asyncio.create_task(self._time_first_token()) if self._how == "leader" else None
        await asyncio.to_thread(disturbance.act)
        is_over.set()
        await asyncio.gather(*clients)
        if first is not None:
            tally.first_tokens_s.append(await first)
        await asyncio.to_thread(wait_until, lambda: are_all_back(stack), timeout_s=90, what="all workers are back")
        if not disturbance.is_long and first is None:
            after = num_computed(stack, workers_of(stack))
            again = [total - before.get(process, 0.0) for process, total in after.items()]
            tally.num_computed_again += int(sum(max(0.0, one) for one in again))
        after_counts = counts_of(stack, gateways)
        tally.num_adopted += max(0, after_counts[0] - counted[0])
        tally.num_dispatched_again += max(0, after_counts[1] - counted[1])
        await asyncio.to_thread(disturbance.undo)

    async def _stream(self, number: int, key: str, record: StreamRecord) -> None:
        """With a key: sent again, to the next gateway, whenever it breaks."""
        if key:
            await stream_again(self._addresses, make_request(number, key), record)
            return
        channel, stub = open_stub(self._stack.grpc_address)
        async with channel:
            await follow(stub.Generate(make_request(number), timeout=_STREAM_S), record)

    async def _time_first_token(self) -> float:
        """Of a prompt that nobody has sent, from just before the disturbance on."""
        began_s = time.monotonic()
        await asyncio.sleep(0.01)
        channel, stub = open_stub(self._stack.grpc_address)
        async with channel:
            await stream(stub, greedy_request([7, 8, 9], max_tokens=1, ignore_eos=True), timeout_s=_STREAM_S)
        return time.monotonic() - began_s


async def stream_again(addresses: list[str], request: inference_pb2.GenerateRequest, record: StreamRecord) -> None:
    """A request with a key, sent to the next gateway with what it lacks whenever its stream breaks."""
    seen, last_at_s, num_had = Resumed(token_ids=record.token_ids), 0.0, 0
    running = asyncio.create_task(stream_grpc(addresses, request, seen))
    while not running.done():
        await asyncio.sleep(0.005)
        if seen.num_had > num_had:
            now_s = time.monotonic()
            record.max_pause_s = max(record.max_pause_s, now_s - last_at_s if num_had else 0.0)
            num_had, last_at_s = seen.num_had, now_s
    await running
    record.num_index_errors = seen.num_index_errors
    if not seen.finish_reasons:
        record.code, record.details = grpc.StatusCode.UNAVAILABLE, "; ".join(seen.errors[-1:])


def make_request(number: int, key: str = "") -> inference_pb2.GenerateRequest:
    """Greedy and seeded ones, with penalties, a stop string and log-probabilities."""
    request = greedy_request([500 + number] * (20 + 9 * number), max_tokens=_MAX_TOKENS, ignore_eos=True)
    sampling = request.options.sampling
    if number % 2:
        sampling.temperature, sampling.seed, sampling.presence_penalty = 0.9, number, 0.5
    if number % 4 == 3:
        sampling.logprobs = 2
    if number % 4 == 2:
        request.options.stop_conditions.stop.append("zzzz")
    request.options.idempotency_key = key
    return request


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


def num_computed(stack: Stack, workers: list[ProcessView]) -> dict[tuple[int, str], float]:
    """By process and role."""
    totals = {}
    for worker in workers:
        metrics = stack.metrics(worker)
        totals[worker.pid, worker.role] = sum(metrics[name] for name in _COMPUTED)
    return totals


def counts_of(stack: Stack, gateways: list[ProcessView]) -> tuple[int, int]:
    """Adoptions, and interruptions after which a request was dispatched again."""
    adopted = interrupted = 0.0
    for gateway in gateways:
        try:
            metrics = stack.metrics(gateway)
        except grpc.RpcError:
            continue
        adopted, interrupted = adopted + metrics["adoptions_total"], interrupted + metrics["interruptions_total"]
    return int(adopted), int(interrupted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--how", default="kill", choices=sorted(HOWS))
    parser.add_argument(
        "--role", default="decode", choices=("decode", "prefill"), help="of the worker that it happens to"
    )
    parser.add_argument("--times", "--kills", type=int, default=20)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--decode", type=int, default=2, help="decode workers")
    options = parser.parse_args()
    flags = HOWS[options.how].flags
    with (
        tempfile.TemporaryDirectory() as directory,
        Stack(Path(directory), num_decode=options.decode, flags=flags) as stack,
    ):
        series = Series(stack, options.how, options.role, options.streams)
        asyncio.run(series.run(options.times))
    sys.stdout.write(f"{options.times} times {options.how} ({options.role}), {series.tally.describe()}\n")


if __name__ == "__main__":
    main()
