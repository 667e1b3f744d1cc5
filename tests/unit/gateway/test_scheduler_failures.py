"""The scheduler refuses, revokes, is silent or is replaced; and the gateway's own bounds."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import grpc
import pytest
from tests.unit.gateway.failing import assert_serves, error_of, request_id_of, run
from tests.unit.gateway.fake_model import ids_of
from tests.unit.gateway.fake_workers import LENGTH, update
from tests.unit.gateway.test_interruptions import begin
from tests.unit.gateway.world import FAST, World, open_world

from weir.bus.messages import RefusalReason, SubmitReply
from weir.core.errors import InvalidRequest, Overloaded, Unavailable, WeirError


@pytest.fixture
def outage_s() -> float:
    return FAST.port.outage_s


@pytest.fixture
def accepted_outage_s() -> float:
    """Longer than any outage here."""
    return 60.0


@pytest.fixture
async def world(outage_s: float, accepted_outage_s: float) -> AsyncIterator[World]:
    port = dataclasses.replace(FAST.port, outage_s=outage_s, accepted_outage_s=accepted_outage_s)
    async with open_world(dataclasses.replace(FAST, port=port)) as world:
        yield world


class TestScheduler:
    @pytest.mark.parametrize(
        ("reason", "kind", "field"),
        [
            (RefusalReason.UNKNOWN_LANE, InvalidRequest, "options.lane"),
            (RefusalReason.TOO_LARGE, InvalidRequest, "text"),
            (RefusalReason.QUEUE_FULL, Overloaded, None),
            (RefusalReason.NO_WORKER, Unavailable, None),
        ],
    )
    async def test_a_refusal_has_its_reason_and_when_to_try_again(
        self, world: World, reason: RefusalReason, kind: type[WeirError], field: str | None
    ) -> None:
        world.scheduler.refusal = SubmitReply(5, False, reason, "says the scheduler", 2500)
        error, _ = await error_of(world)
        assert type(error) is kind
        assert "says the scheduler" in error.message
        if isinstance(error, InvalidRequest):
            assert [violation.field for violation in error.violations] == [field]
        else:
            assert error.retry_after_s == 2.5
        await world.until_idle()
        assert world.metric("refused_total") == 1
        assert world.scheduler.cancels == []
        assert world.scheduler.finishes == []

    async def test_a_silent_scheduler_makes_new_requests_wait_and_then_fail_with_a_hint(self, world: World) -> None:
        world.scheduler.is_silent = True
        error, _ = await error_of(world)
        assert isinstance(error, Unavailable)
        assert "has not answered for 0.6 s" in error.message
        assert error.retry_after_s == 2.0
        assert len({submit.request_id for submit in world.scheduler.submits}) == 1

    @pytest.mark.parametrize("outage_s", [60.0])
    async def test_a_scheduler_that_comes_back_in_time_is_not_noticed(self, world: World) -> None:
        world.scheduler.is_silent = True
        running = run(world)
        await world.until(lambda: world.scheduler.submits, "asked")
        world.scheduler.is_silent = False
        assert (await running).text == "hello world"
        assert len(world.scheduler.submits) > 1
        assert len({submit.request_id for submit in world.scheduler.submits}) == 1

    async def test_a_bus_that_is_away_fails_new_requests_and_not_running_ones(self, world: World) -> None:
        world.pair.stops_after = 4
        running = run(world)
        await world.until(lambda: world.scheduler.prefilled, "runs")
        world.hub.stop()
        error, _ = await error_of(world)
        assert isinstance(error, Unavailable)
        await asyncio.sleep(0.3)
        world.decode.send(update(request_id_of(world), 4, ids_of("o world"), finish=LENGTH))
        assert (await running).text == "hello world"
        world.hub.start()
        await assert_serves(world)

    @pytest.mark.parametrize("accepted_outage_s", [1.5])
    async def test_a_queued_request_does_not_wait_for_ever_for_a_scheduler_that_died(self, world: World) -> None:
        world.scheduler.grants_at_once = False
        running = asyncio.create_task(error_of(world))
        await world.until(lambda: any(held.requests for held in world.scheduler.helds), "queued")
        world.scheduler.is_silent = True
        error, _ = await running
        assert isinstance(error, Unavailable)
        assert error.retry_after_s == 2.0

    async def test_an_accepted_request_outlives_an_outage_that_no_new_one_waits_for(self, world: World) -> None:
        world.scheduler.grants_at_once = False
        running = run(world)
        await world.until(lambda: any(held.requests for held in world.scheduler.helds), "queued")
        world.scheduler.is_silent = True
        error, _ = await error_of(world)
        assert isinstance(error, Unavailable)
        await asyncio.sleep(0.2)
        world.scheduler.is_silent = False
        assert (await world.scheduler.grant(world.scheduler.submits[0])).accepted
        assert (await running).text == "hello world"

    async def test_so_does_one_whose_worker_is_lost_meanwhile(self, world: World) -> None:
        world.pair.stops_after = 4
        running = run(world)
        await world.until(lambda: world.scheduler.prefilled, "runs")
        world.scheduler.is_silent = True
        await world.decode.stop()
        await world.until(lambda: world.metric("interruptions_total") == 1, "interrupted")
        await asyncio.sleep(0.9)
        world.pair.stops_after = None
        await world.decode.start()
        world.scheduler.is_silent = False
        assert (await running).text == "hello world"

    async def test_a_grant_that_overtakes_the_answer_counts(self, world: World) -> None:
        world.scheduler.is_silent = True
        running = run(world)
        await world.until(lambda: world.scheduler.submits, "asked")
        reply = await world.scheduler.grant(world.scheduler.submits[0])
        assert reply.accepted
        assert (await running).text == "hello world"

    async def test_a_repeated_grant_is_accepted_again_and_starts_nothing_twice(self, world: World) -> None:
        world.pair.stops_after = 4
        running = run(world)
        await world.until(lambda: world.scheduler.prefilled, "runs")
        assert (await world.scheduler.grant(world.scheduler.submits[0])).accepted
        world.decode.send(update(request_id_of(world), 4, ids_of("o world"), finish=LENGTH))
        assert (await running).text == "hello world"
        assert len(world.prefill.named("start")) == 1

    async def test_grants_for_ended_requests_and_of_replaced_schedulers_are_refused(self, world: World) -> None:
        world.scheduler.grants_at_once = False
        running = run(world)
        await world.until(lambda: any(held.requests for held in world.scheduler.helds), "queued")
        [submit] = world.scheduler.submits
        assert not (await world.scheduler.grant(submit, epoch=4)).accepted
        assert world.metric("stale_epochs_total") == 1
        assert (await world.scheduler.grant(submit, epoch=6)).accepted
        world.scheduler.epoch = 6
        assert (await running).text == "hello world"
        await world.until_idle()
        assert not (await world.scheduler.grant(submit, epoch=6)).accepted

    async def test_a_queued_request_that_is_revoked_ends_with_the_reason(self, world: World) -> None:
        world.scheduler.grants_at_once = False
        running = asyncio.create_task(error_of(world))
        await world.until(lambda: any(held.requests for held in world.scheduler.helds), "queued")
        await world.scheduler.revoke(
            world.scheduler.submits[0], RefusalReason.WAITED_TOO_LONG, dispatch=1, retry_after_ms=4000
        )
        error, _ = await running
        assert isinstance(error, Overloaded)
        assert (error.message, error.retry_after_s) == ("says the scheduler", 4.0)
        await world.until_idle()
        assert world.scheduler.cancels == []

    async def test_no_revocation_ends_a_granted_request(self, world: World) -> None:
        world.pair.stops_after = 4
        running = run(world)
        await world.until(lambda: world.scheduler.prefilled, "runs")
        for dispatch in (0, 1):
            await world.scheduler.revoke(world.scheduler.submits[0], RefusalReason.WAITED_TOO_LONG, dispatch=dispatch)
        world.decode.send(update(request_id_of(world), 4, ids_of("o world"), finish=LENGTH))
        assert (await running).text == "hello world"

    async def test_another_grant_of_the_same_dispatch_is_declined_and_what_runs_runs_on(self, world: World) -> None:
        world.pair.stops_after = 4
        running = run(world)
        await world.until(lambda: world.scheduler.prefilled, "runs")
        another = dataclasses.replace(world.scheduler.placement, decode_worker_id="decode-9-cccccccc")
        reply = await world.scheduler.grant(world.scheduler.submits[0], epoch=6, placement=another)
        assert not reply.accepted
        world.scheduler.epoch = 6
        await world.until(lambda: any(held.requests for held in world.scheduler.helds), "it got the list")
        assert {entry.placement for held in world.scheduler.helds for entry in held.requests} == {
            world.scheduler.placement
        }
        world.decode.send(update(request_id_of(world), 4, ids_of("o world"), finish=LENGTH))
        assert (await running).text == "hello world"

    async def test_a_request_that_the_scheduler_does_not_take_back_ends(self, world: World) -> None:
        world.scheduler.grants_at_once = False
        running = asyncio.create_task(error_of(world))
        await world.until(lambda: world.scheduler.submits, "asked")
        world.scheduler.refused_ids = (world.scheduler.submits[0].request_id,)
        error, _ = await running
        assert isinstance(error, Unavailable)
        assert error.retry_after_s is not None

    async def test_the_held_list_has_what_is_queued_granted_and_prefilled(self, world: World) -> None:
        world.scheduler.grants_at_once = False
        running = run(world)
        await world.until(lambda: any(held.requests for held in world.scheduler.helds), "queued")
        (queued,) = world.scheduler.helds[-1].requests
        assert queued.placement is None
        world.pair.stops_after = 4
        await world.scheduler.grant(world.scheduler.submits[0])
        await world.until(lambda: world.scheduler.helds[-1].requests[0].is_prefilled, "prefilled")
        (prefilled,) = world.scheduler.helds[-1].requests
        assert prefilled.placement == world.scheduler.placement
        sequences = [held.sequence for held in world.scheduler.helds]
        assert sequences == sorted(set(sequences))
        world.decode.send(update(request_id_of(world), 4, ids_of("o world"), finish=LENGTH))
        await running
        await world.until(lambda: world.scheduler.helds[-1].requests == (), "held no more")


async def test_more_requests_than_fit_are_refused_at_once_with_a_hint(world: World) -> None:
    world.pair.stops_after = 0
    running = [run(world) for _ in range(FAST.driver.max_requests)]
    await world.until(lambda: world.metric("requests_in_flight") == FAST.driver.max_requests, "full")
    error, _ = await error_of(world)
    assert isinstance(error, Overloaded)
    assert error.retry_after_s is not None
    assert 1.0 <= error.retry_after_s <= 75.0
    assert "16 requests are in flight, at most 16" in error.message
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    await world.until_idle()
    await assert_serves(world)


async def test_a_gateway_that_stops_takes_nothing_new_and_ends_what_runs() -> None:
    async with open_world() as world:
        world.pair.stops_after = 4
        running = run(world)
        await begin(world, 4)
        draining = asyncio.create_task(world.gateway.drain(0.2))
        await asyncio.sleep(0.05)
        error, _ = await error_of(world)
        assert isinstance(error, Unavailable)
        assert "shutting down" in error.message
        await draining
        await world.gateway.stop()
        record = await running
        assert record.code is grpc.StatusCode.UNAVAILABLE
        assert "shutting down; 4 tokens were sent" in record.details
