"""The limits file and the configuration bucket, around a keeper of rules."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from tests.unit.scheduler.keeping import FILE, OTHER_FILE, Keeping, write
from tests.unit.scheduler.scripted import eventually

from weir.bus.configuration import ACCESS_KEY, LIMITS_KEY, POLICY_KEY, AccessRules, PolicyChoice
from weir.bus.in_memory import InMemoryHub
from weir.bus.protocol import BusUnavailable
from weir.core.errors import InvalidRequest, Unavailable
from weir_scheduler.limits_keeper import LimitsSource


@pytest.fixture
def limits_path(tmp_path: Path) -> Path:
    path = tmp_path / "limits.toml"
    path.write_text(FILE)
    return path


@pytest.fixture
async def keep() -> AsyncIterator[Callable[..., "asyncio.Future[Keeping]"]]:
    hub = InMemoryHub()
    made: list[Keeping] = []

    def start(path: Path | None, **options: object) -> "asyncio.Future[Keeping]":
        keeping = Keeping(hub, path, **options)  # type: ignore[arg-type]
        made.append(keeping)
        return asyncio.ensure_future(keeping.start())

    yield start
    for keeping in made:
        await keeping.stop()


Keep = Callable[..., "asyncio.Future[Keeping]"]


async def test_a_change_of_the_file_is_in_force_without_a_restart(keep: Keep, limits_path: Path) -> None:
    keeping = await keep(limits_path)
    assert (keeping.weight(), keeping.changes) == (2, [])
    write(limits_path, OTHER_FILE)
    await eventually(lambda: keeping.changes == ["limits"])
    assert keeping.weight() == 4
    metrics = keeping.keeper.metrics()
    assert (metrics["limits_reloads_total"], metrics["limits_reload_errors_total"]) == (1, 0)


async def test_a_file_of_the_same_size_and_time_is_still_read_while_it_is_young(keep: Keep, limits_path: Path) -> None:
    keeping = await keep(limits_path)
    found = os.stat(limits_path)  # noqa: PTH116  a path's own stat() blocks
    write(limits_path, OTHER_FILE)
    os.utime(limits_path, ns=(found.st_atime_ns, found.st_mtime_ns))
    await eventually(lambda: keeping.weight() == 4)


async def test_a_file_that_is_replaced_by_an_older_one_is_read(keep: Keep, limits_path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text(OTHER_FILE)
    os.utime(other, (1_000_000, 1_000_000))
    os.utime(limits_path, (2_000_000, 2_000_000))
    keeping = await keep(limits_path)
    other.replace(limits_path)
    await eventually(lambda: keeping.weight() == 4)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("[tenants.acme]\nwieght = 2\n", "tenants.acme.wieght"),
        ("[tenants.acme]\nweight = 'two'\n", "tenants.acme.weight"),
        ("[lanes", "not TOML"),
        ("\x80".encode("latin-1"), "cannot be read"),
        (None, "cannot be read"),
    ],
)
async def test_a_bad_file_keeps_the_old_and_is_named_and_counted_once(
    keep: Keep, limits_path: Path, content: str | bytes | None, named: str
) -> None:
    keeping = await keep(limits_path)
    write(limits_path, content)
    await eventually(lambda: keeping.keeper.file_error != "")
    await asyncio.sleep(0.1)
    assert named in keeping.keeper.file_error
    assert (keeping.weight(), keeping.changes) == (2, [])
    metrics = keeping.keeper.metrics()
    assert (metrics["limits_reload_errors_total"], metrics["limits_file_is_wrong"]) == (1, 1)
    write(limits_path, OTHER_FILE)
    await eventually(lambda: keeping.weight() == 4)
    assert (keeping.keeper.file_error, keeping.keeper.metrics()["limits_file_is_wrong"]) == ("", 0)


async def test_a_policy_that_the_core_cannot_take_leaves_the_one_before_in_force(keep: Keep) -> None:
    keeping = await keep(None)

    def broken() -> None:
        raise RuntimeError("no place for what waits")

    keeping.keeper.attach(lambda: None, broken)
    with pytest.raises(RuntimeError, match="no place for what waits"):
        await keeping.keeper.set_policy("srtf")
    assert str(keeping.keeper.effective_limits.policy) == "fcfs"
    keeping.keeper.attach(lambda: None, lambda: None)
    await keeping.keeper.set_policy("edf")
    assert await keeping.published(POLICY_KEY) == PolicyChoice(1, "edf", "fcfs")


async def test_gateways_workers_and_the_next_scheduler_find_what_is_in_force(keep: Keep, limits_path: Path) -> None:
    keeping = await keep(limits_path)
    access = await keeping.published(ACCESS_KEY)
    assert isinstance(access, AccessRules)
    assert [tenant.name for tenant in access.tenants] == ["acme", "default"]
    await keeping.keeper.set_limits([("tenants.acme.lanes", '["batch"]')])
    await keeping.keeper.set_policy("srtf:max_age=0.5")
    access, policy = await keeping.published(ACCESS_KEY), await keeping.published(POLICY_KEY)
    assert isinstance(access, AccessRules)
    assert isinstance(policy, PolicyChoice)
    assert access.tenants[0].lanes == ("batch",)
    assert policy.policy == "srtf:max_age=0.5"
    assert keeping.changes == ["limits", "policy"]

    await keeping.stop()
    follower = await keep(limits_path, epoch=2)
    assert follower.keeper.effective_limits.limits == keeping.keeper.effective_limits.limits
    assert str(follower.keeper.effective_limits.policy) == "srtf:max_age=0.5"
    assert (await follower.published(ACCESS_KEY)).epoch == 2


async def test_a_scheduler_that_was_replaced_does_not_write_over_its_follower(keep: Keep, limits_path: Path) -> None:
    deposed = await keep(limits_path, epoch=1)
    follower = await keep(limits_path, epoch=2)
    with pytest.raises(Unavailable, match="another scheduler leads"):
        await deposed.keeper.set_policy("srtf")
    with pytest.raises(Unavailable, match="another scheduler leads"):
        await deposed.keeper.set_limits([("tenants.acme.weight", "9")])
    assert await follower.published(POLICY_KEY) == PolicyChoice(2, "fcfs", "fcfs")


async def test_of_two_changes_at_once_the_later_is_published_whichever_is_written_first(
    keep: Keep, limits_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeping = await keep(limits_path)
    update, is_held, may_go = keeping.bucket.update, asyncio.Event(), asyncio.Event()

    async def slow_update(key: str, value: bytes, *, revision: int) -> int:
        if not is_held.is_set():
            is_held.set()
            await may_go.wait()
        return await update(key, value, revision=revision)

    monkeypatch.setattr(keeping.bucket, "update", slow_update)
    earlier = asyncio.create_task(keeping.keeper.set_policy("edf"))
    await is_held.wait()
    await keeping.keeper.set_policy("srtf")
    assert await keeping.published(POLICY_KEY) == PolicyChoice(1, "srtf", "fcfs")
    may_go.set()
    await earlier
    assert await keeping.published(POLICY_KEY) == PolicyChoice(1, "srtf", "fcfs")


async def test_a_change_that_could_not_be_written_is_not_forgotten_for_an_earlier_one_that_was(
    keep: Keep, limits_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeping = await keep(limits_path)
    update, is_held, may_go = keeping.bucket.update, asyncio.Event(), asyncio.Event()

    async def update_once(key: str, value: bytes, *, revision: int) -> int:
        if is_held.is_set() and not may_go.is_set():
            raise BusUnavailable("not now")
        is_held.set()
        await may_go.wait()
        return await update(key, value, revision=revision)

    monkeypatch.setattr(keeping.bucket, "update", update_once)
    earlier = asyncio.create_task(keeping.keeper.set_policy("edf"))
    await is_held.wait()
    with pytest.raises(Unavailable, match="not published yet"):
        await keeping.keeper.set_policy("srtf")
    may_go.set()
    await earlier
    async with asyncio.timeout(5):
        while await keeping.published(POLICY_KEY) != PolicyChoice(1, "srtf", "fcfs"):  # noqa: ASYNC110  what is waited for has no event
            await asyncio.sleep(0.02)


async def test_a_change_that_nobody_else_has_yet_is_not_called_done(
    keep: Keep, limits_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeping = await keep(limits_path)

    async def refuse(key: str, value: bytes, *, revision: int) -> int:
        raise BusUnavailable("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(keeping.bucket, "update", refuse)
        with pytest.raises(Unavailable, match=r"in force here, not published yet \(access, limits, workers\)"):
            await keeping.keeper.set_limits([("tenants.acme.weight", "9")])
        with pytest.raises(Unavailable, match=r"in force here, not published yet \(policy\)"):
            await keeping.keeper.set_policy("srtf")
        assert (keeping.weight(), keeping.changes) == (9, ["limits", "policy"])
        assert keeping.keeper.metrics()["rules_unpublished"] == 4
    await eventually(lambda: keeping.keeper.metrics()["rules_unpublished"] == 0)
    assert await keeping.published(POLICY_KEY) == PolicyChoice(1, "srtf", "fcfs")
    await keeping.keeper.set_limits([("tenants.acme.weight", "8")])


async def test_a_write_that_gets_no_answer_is_not_waited_for_for_ever(
    keep: Keep, limits_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeping = await keep(limits_path)

    async def no_answer(key: str, value: bytes, *, revision: int) -> int:
        await asyncio.sleep(60)
        return 0

    monkeypatch.setattr("weir_scheduler.limits_keeper._WRITE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(keeping.bucket, "update", no_answer)
    async with asyncio.timeout(5):
        with pytest.raises(Unavailable, match="not published yet"):
            await keeping.keeper.set_policy("srtf")


async def test_what_was_lost_from_the_bucket_is_written_again(keep: Keep, limits_path: Path) -> None:
    keeping = await keep(limits_path)
    await keeping.bucket.delete(ACCESS_KEY)
    async with asyncio.timeout(5):
        while await keeping.bucket.get(ACCESS_KEY) is None:  # noqa: ASYNC110  what is waited for has no event
            await asyncio.sleep(0.02)
    assert (await keeping.published(ACCESS_KEY)).epoch == 1


async def test_what_cannot_be_read_in_the_bucket_is_written_anew(keep: Keep, limits_path: Path) -> None:
    keeping = await keep(limits_path)
    await keeping.stop()
    for key in (ACCESS_KEY, POLICY_KEY, LIMITS_KEY):
        await keeping.bucket.put(key, b"\x93nonsense")
    follower = await keep(limits_path, epoch=2)
    assert (await follower.published(LIMITS_KEY)).epoch == 2


async def test_a_bad_file_at_the_start_is_refused_unless_the_last_right_one_is_known(
    keep: Keep, limits_path: Path
) -> None:
    bad = "[tenants.acme]\nweight = -1\n"
    write(limits_path, bad)
    with pytest.raises(InvalidRequest, match="weight"):
        await keep(limits_path)
    write(limits_path, FILE)
    keeping = await keep(limits_path)
    await keeping.stop()
    write(limits_path, bad)
    follower = await keep(limits_path, epoch=2)
    assert follower.weight() == 2
    assert "weight -1" in follower.keeper.file_error


async def test_a_file_that_is_half_written_is_not_taken(limits_path: Path) -> None:
    source = LimitsSource(limits_path)
    assert await source.read() == FILE
    write(limits_path, "")
    assert await source.try_read_changed() is None
    write(limits_path, OTHER_FILE)
    assert await source.try_read_changed() is None
    assert await source.try_read_changed() == OTHER_FILE


async def test_a_file_that_could_not_be_opened_for_a_moment_is_read_again_though_it_is_the_same(
    limits_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = LimitsSource(limits_path)
    await source.read()
    write(limits_path, OTHER_FILE)
    os.utime(limits_path, (1_000_000, 1_000_000))

    def refuse(*_: object) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refuse)
        with pytest.raises(InvalidRequest, match="Too many open files"):
            await source.try_read_changed()
    looks = [await source.try_read_changed() for _ in range(3)]
    assert looks == [None, OTHER_FILE, None]


async def test_a_young_file_is_read_at_every_look_and_an_old_one_when_it_has_changed(limits_path: Path) -> None:
    source = LimitsSource(limits_path)
    await source.read()
    found = os.stat(limits_path)  # noqa: PTH116  a path's own stat() blocks
    write(limits_path, OTHER_FILE)
    os.utime(limits_path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert [await source.try_read_changed() for _ in range(2)] == [None, OTHER_FILE]
    os.utime(limits_path, (1_000_000, 1_000_000))
    looks = [await source.try_read_changed() for _ in range(4)]
    assert looks[-2:] == [None, None]
