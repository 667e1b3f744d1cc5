"""A worker runs under the scheduler's bounds, never over those it was started with."""

import asyncio

import pytest
from tests.unit.hubs import made_hub
from tests.unit.worker.rig import eventually

from weir.bus.codec import encode
from weir.bus.configuration import WORKERS_KEY, WorkerBounds, WorkerRules
from weir.bus.subjects import Subjects
from weir.engine.loop import InboxFull
from weir.engine.messages import Command, SetBounds
from weir.worker.bounds import RulesWatch, RunningBounds
from weir.worker.config import WorkerConfig

SUBJECTS = Subjects("bounds")
WORKER = "decode-1-0123abcd"


def bounds_of(posted: list[Command], worker_id: str = WORKER) -> RunningBounds:
    return RunningBounds(worker_id, WorkerConfig(max_num_seqs=32, max_num_batched_tokens=512), posted.append)


def test_the_longest_name_that_is_the_workers_goes_before_the_others_bound_by_bound() -> None:
    posted: list[Command] = []
    bounds = bounds_of(posted)
    rules = WorkerRules(
        1,
        (
            WorkerBounds(WORKER, 0, 100),
            WorkerBounds("decode-1", 4, 200),
            WorkerBounds("decode", 8, 300),
            WorkerBounds("decode-10", 1, 1),
            WorkerBounds("prefill", 2, 2),
        ),
    )
    bounds.follow(rules)
    assert posted == [SetBounds(4, 100)]
    assert bounds.metrics() == {"max_num_seqs": 4.0, "max_num_batched_tokens": 100.0}
    bounds.follow(rules)
    assert len(posted) == 1, "the same rules come again after each reconnect"


def test_a_bound_over_what_it_was_started_with_is_that_and_zero_takes_a_bound_back() -> None:
    posted: list[Command] = []
    bounds = bounds_of(posted)
    bounds.follow(WorkerRules(1, (WorkerBounds("decode", 64, 4096),)))
    assert (posted, bounds.now) == ([], SetBounds(32, 512))
    bounds.follow(WorkerRules(1, (WorkerBounds("decode", 3),), (0.5, 0.0)))
    bounds.follow(WorkerRules(1, (WorkerBounds("decode", 0),)))
    assert posted == [SetBounds(3, 512, (0.5, 0.0)), SetBounds(32, 512)]


def test_what_the_engine_has_no_room_for_or_what_are_no_shares_changes_nothing() -> None:
    def full(command: Command) -> None:
        raise InboxFull(f"no room for {command}")

    bounds = RunningBounds(WORKER, WorkerConfig(max_num_seqs=32, max_num_batched_tokens=512), full)
    with pytest.raises(InboxFull):
        bounds.follow(WorkerRules(1, (WorkerBounds("decode", 3),)))
    with pytest.raises(ValueError, match="step_shares"):
        bounds.follow(WorkerRules(1, (), (0.9, 0.9)))
    assert bounds.now == bounds.most


async def test_rules_are_followed_as_they_are_written_and_those_of_a_replaced_scheduler_are_not() -> None:
    hub, taken = made_hub("bounds"), list[WorkerRules]()
    failures: list[Exception] = [InboxFull("full")]

    def take(rules: WorkerRules) -> None:
        if failures:
            raise failures.pop()
        taken.append(rules)

    async def write(rules: WorkerRules | bytes) -> None:
        bus = hub.connect()
        bucket = await bus.bucket(SUBJECTS.configuration_bucket, durable=True)
        await bucket.put(WORKERS_KEY, rules if isinstance(rules, bytes) else encode(rules))
        await bus.close()

    watch = RulesWatch(SUBJECTS, take)
    first, late, next_one = (WorkerRules(epoch, (WorkerBounds("decode", epoch),)) for epoch in (5, 4, 6))
    await write(first)
    watch.start(hub.connect())
    await eventually(lambda: taken == [first])
    await write(late)
    await asyncio.sleep(0.05)
    await write(b"\xc1")
    await eventually(lambda: watch.metrics()["worker_rules_refused_total"] == 1)
    await write(next_one)
    await eventually(lambda: taken == [first, next_one])
    await watch.stop()
    hub.stop()
