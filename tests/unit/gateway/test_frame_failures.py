"""Workers that send what makes no sense."""

import asyncio

import pytest
from tests.unit.gateway.failing import ONE_DISPATCH, assert_serves, error_of, request_id_of, run
from tests.unit.gateway.fake_model import ids_of
from tests.unit.gateway.fake_workers import LENGTH, update, worker_error
from tests.unit.gateway.world import World

from weir.core.errors import InternalError, Overloaded, Unavailable, WeirError
from weir.wire.v1 import types_pb2, worker_pb2


class TestFrames:
    async def test_a_request_that_nobody_knows_is_counted_and_cancelled_at_its_worker(self, world: World) -> None:
        await run(world)
        for index in range(5):
            world.decode.send(update("f" * 32, index, [7]))
        await world.until(lambda: world.decode.named("cancel"), "cancelled")
        await asyncio.sleep(0.05)
        assert [cancel.request_id for cancel in world.decode.named("cancel")] == ["f" * 32]
        assert world.metric("unexpected_updates_total") == 1
        await assert_serves(world)

    async def test_a_gap_is_asked_for_and_then_filled(self, world: World) -> None:
        world.pair.stops_after = 2
        running = run(world)
        await world.until(lambda: world.scheduler.prefilled, "runs")
        world.pair.stops_after = None
        world.decode.send(update(request_id_of(world), 5, ids_of(" world"), finish=LENGTH))
        assert (await running).text == "hello world"
        assert [resume.next_index for resume in world.decode.named("resume")] == [0, 2]

    @ONE_DISPATCH
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

    async def test_bytes_that_are_no_frame_break_the_stream_and_nothing_is_lost(self, world: World) -> None:
        world.pair.stops_after = 4
        running = run(world)
        await world.until(lambda: world.scheduler.prefilled, "runs")
        await asyncio.sleep(0.05)
        world.pair.stops_after = None
        world.decode.send_garbage()
        assert (await running).text == "hello world"
        assert world.metric("malformed_frames_total") == 1
        assert world.metric("worker_connection_failures_total") == 0

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
    @ONE_DISPATCH
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
        await world.until(lambda: world.decode.named("cancel"), "the decode worker got the cancel")

    @ONE_DISPATCH
    async def test_a_worker_that_cancels_by_itself_ends_the_request(self, world: World) -> None:
        world.pair.stops_after = 4
        running = asyncio.create_task(error_of(world))
        await world.until(lambda: world.scheduler.prefilled, "runs")
        world.decode.send(update(request_id_of(world), 4, finish=types_pb2.FINISH_REASON_CANCELLED))
        error, _ = await running
        assert isinstance(error, Unavailable)
        assert "cancelled the request" in error.message
