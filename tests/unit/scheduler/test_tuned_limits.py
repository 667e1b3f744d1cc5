"""Bounds of workers that a tuner tries and keeps: beside what operators set by hand, and after it has died."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.scheduler.keeping import Keeping, Served, write
from tests.unit.scheduler.rig import make_limits
from tests.unit.scheduler.scripted import Stack, eventually

from weir.bus.configuration import WORKERS_KEY, WorkerBounds, WorkerRules
from weir.bus.in_memory import InMemoryHub
from weir.bus.protocol import BusUnavailable
from weir.client.scheduling import LimitChanged, SchedulingClient
from weir.core.errors import AlreadyExists, InvalidRequest, Unavailable
from weir.runtime.change_log import ChangeLog
from weir.scheduling.limits import CoreLimits

CANARY = "decode-0-00000000"
TRIED, KEPT = f"workers.{CANARY}.max_num_seqs", "workers.decode.max_num_seqs"


def anything(limits: CoreLimits) -> None:
    del limits


async def bounds(keeping: Keeping) -> tuple[WorkerBounds, ...]:
    rules = await keeping.published(WORKERS_KEY)
    assert isinstance(rules, WorkerRules)
    return rules.bounds


@pytest.fixture
async def keeping() -> AsyncIterator[Keeping]:
    made = await Keeping(InMemoryHub(), None).start()
    yield made
    await made.stop()


async def test_what_nobody_renews_is_as_before_and_what_is_renewed_goes_on(keeping: Keeping) -> None:
    keeper = keeping.keeper
    await keeper.tune([(KEPT, "8")], anything)
    [changed] = await keeper.tune([(TRIED, "16")], anything, lease_s=0.3)
    assert (changed.key, changed.was, changed.now) == (TRIED, None, "16")
    both = (WorkerBounds("decode", 8), WorkerBounds(CANARY, 16))
    assert await bounds(keeping) == both
    assert await keeper.tune([(TRIED, "16")], anything, lease_s=60.0) == ()
    assert keeper.metrics()["limits_on_trial"] == keeper.metrics()["limits_tuned"] == 1
    await keeper.tune([(TRIED, "16")], anything, lease_s=0.05)
    await eventually(lambda: keeper.metrics()["limits_on_trial"] == 0)
    assert await bounds(keeping) == both[:1]


async def test_the_next_scheduler_goes_on_with_what_was_kept_and_not_with_what_was_tried() -> None:
    hub = InMemoryHub()
    first = await Keeping(hub, None).start()
    await first.keeper.set_limits([("lanes.batch.max_n", "2")])
    await first.keeper.tune([(KEPT, "8")], anything)
    await first.keeper.tune([(TRIED, "16")], anything, lease_s=60.0)
    await first.stop()
    next_one = await Keeping(hub, None, epoch=2).start()
    assert await bounds(next_one) == (WorkerBounds("decode", 8),)
    assert next_one.keeper.effective_limits.overrides == {"lanes.batch.max_n": "2"}
    [changed] = await next_one.keeper.forget_tuned()
    assert (changed.key, changed.was, changed.now) == (KEPT, "8", "")
    assert await bounds(next_one) == ()
    await next_one.stop()


@pytest.mark.parametrize("other", [(TRIED, "4"), ("workers.decode-1-00000000.max_num_seqs", "16")])
async def test_keeping_ends_the_trial_and_while_it_goes_on_there_is_no_other(
    keeping: Keeping, other: tuple[str, str]
) -> None:
    await keeping.keeper.tune([(TRIED, "16")], anything, lease_s=60.0)
    with pytest.raises(AlreadyExists, match=f"{TRIED} = 16 is on trial; end that first"):
        await keeping.keeper.tune([other], anything, lease_s=60.0)
    assert keeping.keeper.effective_limits.tuned.trial == {TRIED: "16"}
    await keeping.keeper.tune([(KEPT, "4")], anything)
    assert await bounds(keeping) == (WorkerBounds("decode", 4),)


@pytest.mark.parametrize("lease_s", [0.0, 60.0])
async def test_what_is_asked_for_again_is_not_called_done_before_it_is_published(
    keeping: Keeping, monkeypatch: pytest.MonkeyPatch, lease_s: float
) -> None:
    async def refuse(key: str, value: bytes, *, revision: int) -> int:
        raise BusUnavailable("not now")

    change = (TRIED, "16") if lease_s else (KEPT, "8")
    with monkeypatch.context() as patched:
        patched.setattr(keeping.bucket, "update", refuse)
        for _ in range(2):
            with pytest.raises(Unavailable, match="in force here, not published yet"):
                await keeping.keeper.tune([change], anything, lease_s=lease_s)
    assert await keeping.keeper.tune([change], anything, lease_s=lease_s) == ()
    assert len(await bounds(keeping)) == 1


@pytest.mark.parametrize("by_hand", [KEPT, "workers.decode-0.max_num_seqs", TRIED])
async def test_what_an_operator_has_set_by_hand_is_not_tried(keeping: Keeping, by_hand: str) -> None:
    await keeping.keeper.set_limits([(by_hand, "6")])
    with pytest.raises(InvalidRequest, match=f"{by_hand} is set by hand"):
        await keeping.keeper.tune([(TRIED, "16")], anything, lease_s=60.0)
    await keeping.keeper.tune([("workers.decode-0-00000000.max_num_batched_tokens", "64")], anything, lease_s=60.0)
    await keeping.keeper.set_limits([(by_hand, "0")])
    await keeping.keeper.tune([(TRIED, "16")], anything, lease_s=60.0)


async def test_a_role_bounded_by_hand_is_not_kept_over_and_one_worker_of_it_keeps_its_own(keeping: Keeping) -> None:
    await keeping.keeper.set_limits([("workers.decode-0.max_num_seqs", "6")])
    await keeping.keeper.tune([(KEPT, "16")], anything)
    assert set(await bounds(keeping)) == {WorkerBounds("decode-0", 6), WorkerBounds("decode", 16)}
    await keeping.keeper.set_limits([(KEPT, "5")])
    assert set(await bounds(keeping)) == {WorkerBounds("decode-0", 6), WorkerBounds("decode", 5)}
    with pytest.raises(InvalidRequest, match="is set by hand"):
        await keeping.keeper.tune([(KEPT, "16")], anything)
    await keeping.keeper.set_limits([(KEPT, "0")])
    assert WorkerBounds("decode", 16) in await bounds(keeping), "a 0 by hand gives it back"


async def test_a_trial_ends_when_an_operator_changes_workers_and_all_of_it_when_the_file_does(tmp_path: Path) -> None:
    path = tmp_path / "limits.toml"
    write(path, "")
    keeping = await Keeping(InMemoryHub(), path).start()
    keeper = keeping.keeper
    await keeper.tune([(KEPT, "8")], anything)
    await keeper.tune([(TRIED, "16")], anything, lease_s=60.0)
    await keeper.set_limits([("lanes.batch.max_n", "2")])
    assert keeper.effective_limits.tuned.trial
    await keeper.set_limits([("workers.prefill.max_num_seqs", "2")])
    assert not keeper.effective_limits.tuned.trial
    write(path, "[workers.decode]\nmax_num_seqs = 3\n")
    await eventually(lambda: not keeper.effective_limits.tuned.kept)
    assert await bounds(keeping) == (WorkerBounds("decode", 3),)
    with pytest.raises(InvalidRequest, match="is set by hand"):
        await keeper.tune([(KEPT, "16")], anything)
    await keeping.stop()


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    whole = Stack(limits=make_limits(gather_s=0.1))
    whole.workers["d"] = replace(whole.workers["d"], worker_id=CANARY, most_num_seqs=32)
    whole.changes = ChangeLog(tmp_path / "changes-s0.jsonl", "s0")
    yield whole
    await whole.close()


def logged(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "changes-s0.jsonl").read_text().splitlines()]


async def test_every_call_stands_in_the_log_of_changes_with_its_reason(stack: Stack, tmp_path: Path) -> None:
    scheduler = await stack.add_scheduler()
    async with Served(scheduler) as served:
        with SchedulingClient(served.addresses) as client:
            for _ in range(2):  # the second renews it
                await served.call(lambda: client.try_limits({TRIED: "16"}, lease_s=60, reason="waiting: met_share 1"))
            view = await served.describe()
            assert (dict(view.tuned), dict(view.trial)) == ({}, {TRIED: "16"})
            kept = await served.call(lambda: client.keep_limits({KEPT: "16"}, reason="better: evidence 31"))
            assert LimitChanged(KEPT, None, "16") in kept
            assert dict((await served.describe()).tuned) == {KEPT: "16"}
            await served.call(lambda: client.try_limits({TRIED: "32"}, lease_s=60, reason="waiting"))
            await served.call(lambda: client.end_trial(reason="harm"))
            await served.call(lambda: client.revert_tuned(reason="by hand"))
    told = [(one["action"], one["object"], one.get("after"), one["reason"]) for one in logged(tmp_path)]
    assert told == [
        ("try limits", TRIED, "16", "waiting: met_share 1"),
        ("keep limits", TRIED, None, "better: evidence 31"),
        ("keep limits", KEPT, "16", "better: evidence 31"),
        ("try limits", TRIED, "32", "waiting"),
        ("end trial", TRIED, None, "harm"),
        ("revert tuned limits", KEPT, None, "by hand"),
    ]


async def test_a_trial_that_is_not_renewed_stands_there_too(stack: Stack, tmp_path: Path) -> None:
    scheduler = await stack.add_scheduler()
    async with Served(scheduler) as served:
        with SchedulingClient(served.addresses) as client:
            await served.call(lambda: client.try_limits({TRIED: "16"}, lease_s=1, reason="waiting"))
        await eventually(lambda: scheduler.describe().metrics["limits_on_trial"] == 0)
    last = logged(tmp_path)[-1]
    assert (last["actor"], last["action"], last["before"], last["reason"]) == (
        "lease",
        "end trial",
        "16",
        "not renewed in time",
    )


async def test_what_an_operator_or_a_new_file_ends_stands_there_too(stack: Stack, tmp_path: Path) -> None:
    path = tmp_path / "limits.toml"
    write(path, "")
    stack.limits_file = str(path)
    scheduler = await stack.add_scheduler()
    async with Served(scheduler) as served:
        with SchedulingClient(served.addresses) as client:
            await served.call(lambda: client.keep_limits({KEPT: "8"}, reason="better"))
            await served.call(lambda: client.try_limits({TRIED: "16"}, lease_s=60, reason="waiting"))
            changed = await served.call(lambda: client.change_limits({"workers.prefill.max_num_seqs": "2"}))
            assert LimitChanged(TRIED, "16", "") in changed
            await served.call(lambda: client.try_limits({TRIED: "4"}, lease_s=60, reason="missed"))
        write(path, "[workers.decode]\nmax_num_seqs = 3\n")
        await eventually(lambda: scheduler.describe().metrics["limits_tuned"] == 0)
    told = [(one["action"], one["object"], one.get("before"), one.get("after")) for one in logged(tmp_path)]
    assert ("set limits", TRIED, "16", None) in told
    assert told[-2:] == [("revert tuned limits", KEPT, "8", "3"), ("revert tuned limits", TRIED, "4", None)]
    assert {one["reason"] for one in logged(tmp_path)[-2:]} == {"limits file changed"}


@pytest.mark.parametrize(
    ("key", "value", "lease_s", "reason", "words"),
    [
        (KEPT, "4", 60.0, "", "names 'decode'; what is tried is of the id of a worker"),
        ("workers.decode-0.max_num_seqs", "4", 60.0, "", "what is tried is of the id of a worker"),
        ("lanes.batch.max_queued", "4", 60.0, "", "cannot be tuned"),
        (TRIED, "4", 0.5, "", "is 500; must be from 1000 to 600000"),
        (TRIED, "33", 60.0, "", "has room for 32, with which it was started"),
        (TRIED, "4", 60.0, "a\nb", "must be at most 400 printable characters"),
    ],
)
async def test_what_cannot_be_tried_is_named_and_changes_nothing(
    stack: Stack, key: str, value: str, lease_s: float, reason: str, words: str
) -> None:
    scheduler = await stack.add_scheduler()
    await eventually(lambda: scheduler.describe().metrics["workers"] == 2)
    async with Served(scheduler) as served:
        with SchedulingClient(served.addresses) as client:
            with pytest.raises(InvalidRequest, match=words):
                await served.call(lambda: client.try_limits({key: value}, lease_s=lease_s, reason=reason))
            with pytest.raises(InvalidRequest, match="what is kept is of prefill or decode"):
                await served.call(lambda: client.keep_limits({TRIED: "4"}, reason=""))
        assert scheduler.describe().metrics["limits_on_trial"] == 0
