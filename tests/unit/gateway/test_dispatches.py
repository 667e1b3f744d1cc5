"""A grant whose workers cannot be reached is asked for anew, under the next number; older numbers count no more."""

import asyncio
import logging
import socket
from dataclasses import replace

import pytest
from tests.unit.gateway.failing import assert_serves, error_of, request_id_of, run
from tests.unit.gateway.fake_model import ids_of
from tests.unit.gateway.fake_workers import LENGTH, update
from tests.unit.gateway.world import FAST, World

from weir.bus.messages import Placement, RefusalReason, Submit
from weir.bus.subjects import WORKER_TTL_S
from weir.core.errors import Overloaded, Unavailable
from weir.testing.load import greedy_request
from weir_gateway.driving.driver import DriverSettings


def unreachable(world: World, side: str) -> Placement:
    """A worker that is gone: another process answers at its address."""
    placement = world.scheduler.placement
    if side == "prefill":
        return replace(placement, prefill_worker_id="prefill-9-cccccccc")
    return replace(placement, decode_worker_id="decode-9-cccccccc")


async def grant_in_vain(world: World, side: str = "decode") -> Submit:
    """Grants what was submitted last to a worker that is gone. Returns the Submit that follows."""
    scheduler = world.scheduler
    await world.until(lambda: scheduler.submits, "submitted")
    submit = scheduler.submits[-1]
    gone = replace(unreachable(world, side), dispatch=submit.dispatch)
    num_before = len(scheduler.submits)
    assert (await scheduler.grant(submit, placement=gone)).accepted
    await world.until(lambda: len(scheduler.submits) > num_before, "submitted again")
    return scheduler.submits[-1]


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_request_whose_workers_are_gone_is_submitted_again_and_served(world: World, side: str) -> None:
    world.scheduler.grants_at_once = False
    running = run(world)
    again = await grant_in_vain(world, side)
    first = world.scheduler.submits[0]
    lost_id = {"prefill": "prefill-9-cccccccc", "decode": "decode-9-cccccccc"}[side]
    assert again == replace(first, dispatch=2, deadline_ms=again.deadline_ms, lost_worker_id=lost_id)
    assert (await world.scheduler.grant(again)).accepted
    assert (await running).text == "hello world"
    (start,) = world.prefill.named("start")
    assert start.attempt.dispatch == 2
    await world.until_idle()
    assert [finish.dispatch for finish in world.scheduler.finishes] == [2]


async def test_a_request_that_is_cancelled_while_it_connects_leaves_nothing_that_waits(world: World) -> None:
    def waiting() -> list[str]:
        return [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("connections of ")]

    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        world.scheduler.placement = replace(unreachable(world, "decode"), decode_address=address)
        call = world.stub.Generate(greedy_request("x", max_tokens=5))
        await world.until(waiting, "it connects")
        call.cancel()
        await world.until_idle()
        assert waiting() == []


async def test_a_request_outlives_all_the_workers_of_a_host_that_is_gone(world: World) -> None:
    world.scheduler.grants_at_once = False
    running = run(world)
    for _ in range(FAST.driver.max_unreached_dispatches - 1):
        again = await grant_in_vain(world)
    assert again.dispatch > 1 + FAST.driver.max_fruitless_dispatches
    assert (await world.scheduler.grant(again)).accepted
    assert (await running).text == "hello world"


def test_until_the_last_registry_entry_of_a_host_is_gone_dispatches_in_vain_last_long_enough() -> None:
    settings = DriverSettings()
    num_waits = settings.max_unreached_dispatches - 1
    assert settings.fruitless_wait_s * sum(range(1, num_waits + 1)) > 1.5 * WORKER_TTL_S


async def test_what_still_comes_of_older_dispatches_is_dropped(world: World) -> None:
    world.scheduler.grants_at_once = False
    running = run(world)
    again = await grant_in_vain(world)
    first = world.scheduler.submits[0]
    assert not (await world.scheduler.grant(first)).accepted
    await world.scheduler.revoke(first, RefusalReason.WAITED_TOO_LONG, dispatch=1)
    world.pair.stops_after = 4
    assert (await world.scheduler.grant(again)).accepted
    await world.until(lambda: world.scheduler.prefilled, "runs")
    world.decode.send(update(request_id_of(world), 4, ids_of("wrong"), finish=LENGTH, dispatch=1))
    world.decode.send(update(request_id_of(world), 4, ids_of("o world"), finish=LENGTH, dispatch=2))
    assert (await running).text == "hello world"
    assert world.scheduler.prefilled[0].dispatch == 2


async def test_while_it_waits_again_it_is_held_without_a_placement_and_can_be_revoked(world: World) -> None:
    world.scheduler.grants_at_once = False
    running = asyncio.create_task(error_of(world))
    again = await grant_in_vain(world)
    num_lists = len(world.scheduler.helds)
    await world.until(lambda: len(world.scheduler.helds) > num_lists + 1, "a list that was made since")
    (entry,) = world.scheduler.helds[-1].requests
    assert (entry.placement, entry.submit.dispatch) == (None, 2)
    await world.scheduler.revoke(again, RefusalReason.WAITED_TOO_LONG, dispatch=2)
    error, _ = await running
    assert isinstance(error, Overloaded)


async def test_after_as_many_dispatches_as_are_allowed_it_fails_with_a_hint(world: World) -> None:
    world.scheduler.placement = unreachable(world, "decode")
    error, _ = await error_of(world)
    assert isinstance(error, Unavailable)
    assert ("decode-9-cccccccc" in error.message, error.retry_after_s) == (True, 1.0)
    num_dispatches = FAST.driver.max_unreached_dispatches
    assert [submit.dispatch for submit in world.scheduler.submits] == list(range(1, num_dispatches + 1))
    await world.until_idle()
    assert [finish.dispatch for finish in world.scheduler.finishes] == [num_dispatches]
    assert world.prefill.named("start") == []
    world.scheduler.placement = replace(world.scheduler.placement, decode_worker_id=world.decode.worker_id)
    await assert_serves(world)


async def test_one_that_is_cancelled_while_it_waits_again_ends_for_good(world: World) -> None:
    world.scheduler.grants_at_once = False
    running = run(world)
    again = await grant_in_vain(world)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await world.until_idle()
    assert [cancel.request_id for cancel in world.scheduler.cancels] == [again.request_id]
    assert not (await world.scheduler.grant(again)).accepted


async def test_one_that_is_cancelled_as_its_grant_comes_is_not_started(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await assert_serves(world)  # its workers are connected
    world.scheduler.grants_at_once = False
    running = run(world)
    await world.until(lambda: len(world.scheduler.submits) == 2, "submitted")
    (state,) = world.gateway._driver.requests.values()
    state.grant(world.scheduler.placement)
    state.cancel("its client left")
    await asyncio.gather(running, return_exceptions=True)
    await world.until_idle()
    assert len(world.prefill.named("start")) == 1
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_a_refusal_of_what_waited_when_the_list_was_made_does_not_end_what_was_granted_since(
    world: World,
) -> None:
    world.scheduler.grants_at_once = False
    running = run(world)
    await world.until(lambda: any(held.requests for held in world.scheduler.helds), "queued")
    world.scheduler.held_delay_s = 0.15
    world.scheduler.refused_ids = (world.scheduler.submits[0].request_id,)
    num_lists = len(world.scheduler.helds)
    await world.until(lambda: len(world.scheduler.helds) > num_lists, "refused, and the answer is under way")
    world.scheduler.refused_ids = ()
    world.pair.stops_after = 4
    assert (await world.scheduler.grant(world.scheduler.submits[0])).accepted
    await world.until(lambda: len(world.scheduler.helds) > num_lists + 2, "the answer has come, and others since")
    world.decode.send(update(request_id_of(world), 4, ids_of("o world"), finish=LENGTH))
    assert (await running).text == "hello world"
