"""Workers, the scheduler and the bus fail; requests end clearly and soon, and the gateway serves again."""

import asyncio

import grpc
import pytest
from tests.unit.gateway.fake_model import ids_of
from tests.unit.gateway.fake_workers import LENGTH, update, worker_error
from tests.unit.gateway.world import FAST, World, open_world

from weir.bus.messages import Outcome, RefusalReason, SubmitReply
from weir.client import AsyncWeirClient, GenerateOptions
from weir.core.errors import InternalError, InvalidRequest, NotFound, Overloaded, Unavailable, WeirError
from weir.testing.load import StreamRecord, greedy_request, stream
from weir.wire.v1 import types_pb2, worker_pb2


def run(world: World, max_tokens: int = 11) -> "asyncio.Task[StreamRecord]":
    return asyncio.create_task(stream(world.stub, greedy_request("x", max_tokens=max_tokens)))


async def error_of(world: World, max_tokens: int = 11) -> tuple[WeirError, str]:
    """The error that ends a request, and the text before it."""
    text = ""
    async with AsyncWeirClient(world.grpc_address) as client:
        try:
            async for chunk in client.generate("x", GenerateOptions(max_tokens=max_tokens)):
                text += chunk.text
        except WeirError as error:
            return error, text
    raise AssertionError(f"no error came, but {text!r}")


async def assert_serves(world: World) -> None:
    world.pair.stops_after = None
    record = await run(world)
    assert record.text == "hello world"


def request_id_of(world: World) -> str:
    return next(iter(world.pair.starts))


class TestStreams:
    @pytest.mark.parametrize("side", ["prefill", "decode"])
    @pytest.mark.parametrize("held_after", [0, 4])
    async def test_a_broken_stream_is_resumed_and_no_token_is_lost_or_doubled(
        self, world: World, side: str, held_after: int
    ) -> None:
        world.pair.stops_after = held_after
        running = run(world)
        await world.until(lambda: world.pair.starts, "started")
        await asyncio.sleep(0.05)
        worker = getattr(world, side)
        worker.break_streams()
        world.pair.stops_after = None
        await world.until(lambda: worker.num_streams == 2, "connected again")
        if side == "prefill" and held_after == 4:
            world.decode.send(
                *(update(request_id_of(world), i, ids_of("hello world")[i : i + 1]) for i in range(4, 10))
            )
            world.decode.send(update(request_id_of(world), 10, ids_of("d"), finish=LENGTH))
        if side == "decode" and held_after == 0:
            world.prefill.send(update(request_id_of(world), 0, ids_of("h"), handed_off=True))
            world.decode.send(update(request_id_of(world), 1, ids_of("ello world"), finish=LENGTH))
        record = await running
        assert record.text == "hello world"
        assert record.num_index_errors == 0

    async def test_tokens_that_were_lost_with_a_stream_are_asked_for_by_index(self, world: World) -> None:
        world.pair.stops_after = 4
        running = run(world)
        await world.until(lambda: world.metric("link_subscriptions") == 2, "runs")
        await asyncio.sleep(0.1)
        world.decode.break_streams()
        await world.until(lambda: world.decode.num_streams == 2, "connected again")
        await world.until(lambda: len(world.decode.named("resume")) >= 2, "resumed")
        assert world.decode.named("resume")[-1].next_index == 4
        world.pair.stops_after = None
        assert (await running).text == "hello world"

    @pytest.mark.parametrize("side", ["prefill", "decode"])
    async def test_a_lost_worker_ends_its_requests_with_a_hint_to_try_again(self, world: World, side: str) -> None:
        world.pair.stops_after = 0
        running = asyncio.create_task(error_of(world))
        await world.until(lambda: world.pair.starts, "started")
        await getattr(world, side).stop()
        error, text = await running
        assert isinstance(error, Unavailable)
        assert getattr(world, side).worker_id in error.message
        assert (error.retry_after_s, text) == (1.0, "")
        other = world.decode if side == "prefill" else world.prefill
        await world.until(lambda: other.named("cancel"), "the other worker is told")
        await world.until_idle()
        assert world.scheduler.finishes[0].outcome is Outcome.FAILED
        await getattr(world, side).start()
        await assert_serves(world)

    async def test_a_worker_lost_after_tokens_says_how_many_were_sent_and_gives_no_hint(self, world: World) -> None:
        world.pair.stops_after = 4
        running = asyncio.create_task(error_of(world))
        await world.until(lambda: world.pair.starts, "started")
        await asyncio.sleep(0.05)
        await world.decode.stop()
        error, text = await running
        assert isinstance(error, Unavailable)
        assert "4 tokens were sent" in error.message
        assert (error.retry_after_s, text) == (None, "hell")

    async def test_a_prefill_worker_that_has_handed_off_is_not_missed(self, world: World) -> None:
        world.pair.stops_after = 4
        running = run(world)
        await world.until(lambda: world.scheduler.prefilled, "handed off")
        await asyncio.sleep(0.05)
        await world.prefill.stop()
        await asyncio.sleep(0.8)  # longer than a worker may be away
        world.decode.send(update(request_id_of(world), 4, ids_of("o world"), finish=LENGTH))
        assert (await running).text == "hello world"

    async def test_another_worker_at_the_address_means_that_everything_there_is_lost(self, world: World) -> None:
        world.pair.stops_after = 4
        running = asyncio.create_task(error_of(world))
        await world.until(lambda: world.pair.starts, "started")
        await asyncio.sleep(0.05)
        world.decode.worker_id = "decode-0-cccccccc"
        world.decode.break_streams()
        error, _ = await running
        assert isinstance(error, Unavailable)
        assert "decode-0-bbbbbbbb is gone: decode-0-cccccccc answers" in error.message

    async def test_a_worker_that_never_answers_ends_the_request(self, world: World) -> None:
        world.decode.refuses_streams = True
        error, _ = await error_of(world)
        assert isinstance(error, Unavailable)
        assert error.retry_after_s is not None
        await world.until_idle()
        assert world.metric("links") == 1

    async def test_the_idle_link_to_a_worker_that_went_away_is_closed(self, world: World) -> None:
        await run(world)
        assert world.metric("links") == 2
        await world.decode.stop()
        await world.until(lambda: world.metric("links") == 1, "the link is closed")


class TestFrames:
    async def test_a_request_that_nobody_knows_is_counted_and_cancelled_at_its_worker(self, world: World) -> None:
        await run(world)
        for index in range(5):
            world.decode.send(update("f" * 32, index, [7]))
        await world.until(lambda: world.decode.named("cancel"), "cancelled")
        await asyncio.sleep(0.05)
        assert [cancel.request_id for cancel in world.decode.named("cancel")] == ["f" * 32]
        assert world.metric("unexpected_requests_total") == 1
        await assert_serves(world)

    async def test_a_gap_is_asked_for_and_then_filled(self, world: World) -> None:
        world.pair.stops_after = 2
        running = run(world)
        await world.until(lambda: world.scheduler.prefilled, "runs")
        world.pair.stops_after = None
        world.decode.send(update(request_id_of(world), 5, ids_of(" world"), finish=LENGTH))
        assert (await running).text == "hello world"
        assert [resume.next_index for resume in world.decode.named("resume")] == [0, 2]

    async def test_a_gap_that_stays_ends_the_request(self, world: World) -> None:
        world.pair.stops_after = 2
        running = asyncio.create_task(error_of(world))
        await world.until(lambda: world.scheduler.prefilled, "runs")
        world.decode.send(update(request_id_of(world), 5, ids_of(" world"), finish=LENGTH))
        error, text = await running
        assert isinstance(error, Unavailable)
        assert "token 2 never came" in error.message
        assert text == "he"

    async def test_a_contradicting_token_ends_the_request_as_a_defect(self, world: World) -> None:
        world.pair.stops_after = 4
        running = asyncio.create_task(error_of(world))
        await world.until(lambda: world.scheduler.prefilled, "runs")
        await asyncio.sleep(0.05)
        world.decode.send(update(request_id_of(world), 1, [0]))
        error, _ = await running
        assert isinstance(error, InternalError)
        assert "token 1 was 101, and is 0 now" in error.message

    async def test_older_attempts_are_ignored_and_unknown_newer_ones_are_a_defect(self, world: World) -> None:
        world.pair.stops_after = 4
        running = asyncio.create_task(error_of(world))
        await world.until(lambda: world.scheduler.prefilled, "runs")
        await asyncio.sleep(0.05)
        world.decode.send(update(request_id_of(world), 4, [0], dispatch=0))
        world.decode.send(update(request_id_of(world), 4, ids_of("o"), dispatch=1))
        world.decode.send(update(request_id_of(world), 5, [0], dispatch=2))
        error, text = await running
        assert isinstance(error, InternalError)
        assert text == "hello"

    async def test_an_adopted_sequence_goes_on_under_its_newer_attempt(self, world: World) -> None:
        world.pair.stops_after = 4
        running = run(world)
        await world.until(lambda: world.scheduler.prefilled, "runs")
        await asyncio.sleep(0.05)
        adopted = update(request_id_of(world), 4, ids_of("o world"), finish=LENGTH)
        adopted.attempt.adoption = 1
        world.decode.send(adopted)
        assert (await running).text == "hello world"

    async def test_frames_that_are_none_are_counted(self, world: World) -> None:
        await run(world)
        world.decode.send_raw(worker_pb2.ServeResponse())
        world.decode.send_raw(worker_pb2.ServeResponse(welcome=worker_pb2.Welcome(worker_id="again")))
        await world.until(lambda: world.metric("malformed_frames_total") == 2, "counted")
        await assert_serves(world)

    @pytest.mark.parametrize(
        ("reason", "kind", "has_hint"),
        [
            (worker_pb2.WORKER_ERROR_REASON_NO_CAPACITY, Overloaded, True),
            (worker_pb2.WORKER_ERROR_REASON_DRAINING, Unavailable, True),
            (worker_pb2.WORKER_ERROR_REASON_HAND_OFF_REFUSED, Unavailable, True),
            (worker_pb2.WORKER_ERROR_REASON_UNKNOWN_REQUEST, Unavailable, True),
            (worker_pb2.WORKER_ERROR_REASON_STALE_ATTEMPT, InternalError, False),
            (worker_pb2.WORKER_ERROR_REASON_INTERNAL, InternalError, False),
        ],
    )
    async def test_a_worker_that_gives_up_a_request_says_why(
        self, world: World, reason: worker_pb2.WorkerErrorReason.ValueType, kind: type[WeirError], has_hint: bool
    ) -> None:
        world.pair.stops_after = 0
        running = asyncio.create_task(error_of(world))
        await world.until(lambda: world.pair.starts, "started")
        world.prefill.send(worker_error(request_id_of(world), reason))
        error, _ = await running
        assert type(error) is kind
        assert "says the worker" in error.message
        assert (error.retry_after_s is not None) == has_hint
        await world.until(lambda: world.decode.named("cancel"), "the decode worker is told")

    async def test_a_worker_that_cancels_by_itself_ends_the_request(self, world: World) -> None:
        world.pair.stops_after = 4
        running = asyncio.create_task(error_of(world))
        await world.until(lambda: world.scheduler.prefilled, "runs")
        world.decode.send(update(request_id_of(world), 4, finish=types_pb2.FINISH_REASON_CANCELLED))
        error, _ = await running
        assert isinstance(error, Unavailable)
        assert "cancelled the request" in error.message


class TestScheduler:
    @pytest.mark.parametrize(
        ("reason", "kind", "field"),
        [
            (RefusalReason.UNKNOWN_LANE, InvalidRequest, "options.lane"),
            (RefusalReason.UNKNOWN_MODEL, NotFound, "options.model"),
            (RefusalReason.TOO_LARGE, InvalidRequest, "text"),
            (RefusalReason.QUEUE_FULL, Overloaded, None),
            (RefusalReason.NO_WORKER, Unavailable, None),
        ],
    )
    async def test_a_refusal_says_why_and_when_to_try_again(
        self, world: World, reason: RefusalReason, kind: type[WeirError], field: str | None
    ) -> None:
        world.scheduler.refusal = SubmitReply(5, False, reason, "says the scheduler", 2500)
        error, _ = await error_of(world)
        assert type(error) is kind
        assert "says the scheduler" in error.message
        if isinstance(error, InvalidRequest):
            assert [violation.field for violation in error.violations] == [field]
        elif isinstance(error, NotFound):
            assert error.field == field
        else:
            assert error.retry_after_s == 2.5
        await world.until_idle()
        assert world.metric("refused_total") == 1
        assert world.scheduler.cancels == world.scheduler.finishes == []

    async def test_a_silent_scheduler_makes_new_requests_wait_and_then_fail_with_a_hint(self, world: World) -> None:
        world.scheduler.is_silent = True
        error, _ = await error_of(world)
        assert isinstance(error, Unavailable)
        assert "has not answered for 0.6 s" in error.message
        assert error.retry_after_s == 2.0
        assert len({submit.request_id for submit in world.scheduler.submits}) == 1
        assert len(world.scheduler.submits) > 1

    async def test_a_scheduler_that_comes_back_in_time_is_not_noticed(self, world: World) -> None:
        world.scheduler.is_silent = True
        running = run(world)
        await world.until(lambda: world.scheduler.submits, "asked")
        world.scheduler.is_silent = False
        assert (await running).text == "hello world"

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

    async def test_a_queued_request_does_not_wait_for_ever_for_a_scheduler_that_died(self, world: World) -> None:
        world.scheduler.grants_at_once = False
        running = asyncio.create_task(error_of(world))
        await world.until(lambda: any(held.requests for held in world.scheduler.helds), "queued")
        world.scheduler.is_silent = True
        error, _ = await running
        assert isinstance(error, Unavailable)
        assert error.retry_after_s == 2.0

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
            world.scheduler.submits[0], RefusalReason.WAITED_TOO_LONG, dispatch=0, retry_after_ms=4000
        )
        error, _ = await running
        assert isinstance(error, Overloaded)
        assert (error.message, error.retry_after_s) == ("says the scheduler", 4.0)
        await world.until_idle()
        assert world.scheduler.cancels == []

    async def test_a_running_request_that_is_revoked_ends_and_is_cancelled_at_its_workers(self, world: World) -> None:
        world.pair.stops_after = 4
        running = asyncio.create_task(error_of(world))
        await world.until(lambda: world.scheduler.prefilled, "runs")
        await asyncio.sleep(0.05)
        await world.scheduler.revoke(world.scheduler.submits[0], RefusalReason.WORKER_LOST, dispatch=1)
        error, _ = await running
        assert isinstance(error, Unavailable)
        assert "4 tokens were sent" in error.message
        await world.until(lambda: world.decode.named("cancel") and world.prefill.named("cancel"), "both are told")

    async def test_a_revocation_of_the_queued_request_comes_too_late_once_it_is_granted(self, world: World) -> None:
        world.pair.stops_after = 4
        running = run(world)
        await world.until(lambda: world.scheduler.prefilled, "runs")
        await world.scheduler.revoke(world.scheduler.submits[0], RefusalReason.WAITED_TOO_LONG, dispatch=0)
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

    async def test_the_held_list_says_what_is_queued_granted_and_prefilled(self, world: World) -> None:
        world.scheduler.grants_at_once = False
        running = run(world)
        await world.until(lambda: any(held.requests for held in world.scheduler.helds), "queued")
        assert world.scheduler.helds[-1].requests[0].placement is None
        world.pair.stops_after = 4
        await world.scheduler.grant(world.scheduler.submits[0])
        await world.until(lambda: world.scheduler.helds[-1].requests[0].is_prefilled, "prefilled")
        assert world.scheduler.helds[-1].requests[0].placement == world.scheduler.placement
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
    assert error.retry_after_s == 1.0
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
        await world.until(lambda: world.scheduler.prefilled, "runs")
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
