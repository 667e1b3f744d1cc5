"""A worker or its stream is lost: the request ends, is reported as ended, and the gateway serves again."""

import asyncio

import pytest
from tests.unit.gateway.failing import ONE_DISPATCH, assert_serves, error_of, request_id_of, run
from tests.unit.gateway.fake_model import ids_of
from tests.unit.gateway.fake_workers import LENGTH, update
from tests.unit.gateway.test_interruptions import begin
from tests.unit.gateway.world import FAST, World

from weir.bus.messages import Outcome
from weir.core.errors import Unavailable


class TestStreams:
    @pytest.mark.parametrize("side", ["prefill", "decode"])
    @pytest.mark.parametrize("held_after", [0, 4])
    async def test_a_broken_stream_is_resumed_and_no_token_is_lost_or_doubled(
        self, world: World, side: str, held_after: int
    ) -> None:
        world.pair.stops_after = held_after
        running = run(world)
        await begin(world, held_after)
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
        await begin(world, 4)
        world.decode.break_streams()
        await world.until(lambda: world.decode.num_streams == 2, "connected again")
        await world.until(lambda: len(world.decode.named("resume")) >= 2, "resumed")
        assert world.decode.named("resume")[-1].next_index == 4
        world.pair.stops_after = None
        assert (await running).text == "hello world"

    @pytest.mark.parametrize("side", ["prefill", "decode"])
    @ONE_DISPATCH
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
        await world.until(lambda: other.named("cancel"), "the other worker got the cancel")
        await world.until_idle()
        assert world.scheduler.finishes[0].outcome is Outcome.FAILED
        await getattr(world, side).start()
        await assert_serves(world)

    @ONE_DISPATCH
    async def test_a_worker_lost_after_tokens_says_how_many_were_sent_and_gives_no_hint(self, world: World) -> None:
        world.pair.stops_after = 4
        running = asyncio.create_task(error_of(world))
        await begin(world, 4)
        await world.decode.stop()
        error, text = await running
        assert isinstance(error, Unavailable)
        assert "4 tokens were sent" in error.message
        assert (error.retry_after_s, text) == (None, "hell")

    async def test_a_prefill_worker_that_has_handed_off_is_not_missed(self, world: World) -> None:
        world.pair.stops_after = 4
        running = run(world)
        await begin(world, 4)
        await world.prefill.stop()
        await asyncio.sleep(0.8)  # longer than a worker may be unreachable
        world.decode.send(update(request_id_of(world), 4, ids_of("o world"), finish=LENGTH))
        assert (await running).text == "hello world"

    @ONE_DISPATCH
    async def test_another_worker_at_the_address_means_that_everything_there_is_lost(self, world: World) -> None:
        world.pair.stops_after = 4
        running = asyncio.create_task(error_of(world))
        await begin(world, 4)
        world.decode.worker_id = "decode-0-cccccccc"
        world.decode.break_streams()
        error, _ = await running
        assert isinstance(error, Unavailable)
        assert "decode-0-bbbbbbbb is gone: decode-0-cccccccc answers" in error.message

    @ONE_DISPATCH
    async def test_a_worker_that_never_answers_ends_the_request(
        self, world: World, caplog: pytest.LogCaptureFixture
    ) -> None:
        world.decode.refuses_streams = True
        error, _ = await error_of(world)
        assert isinstance(error, Unavailable)
        assert error.retry_after_s is not None
        await world.until_idle()
        assert world.metric("worker_connections") == 1
        assert "1 requests end" in caplog.text

    @ONE_DISPATCH
    async def test_a_worker_that_breaks_every_stream_at_once_is_given_up(self, world: World) -> None:
        world.pair.stops_after = 0
        world.decode.ends_streams_on = "resume"
        error, _ = await error_of(world)
        assert isinstance(error, Unavailable)
        assert "decode-0-bbbbbbbb is lost" in error.message
        assert world.decode.num_streams == FAST.connections.max_short_streams + 1

    @ONE_DISPATCH
    async def test_why_the_last_stream_broke_is_reported_when_a_worker_is_given_up(self, world: World) -> None:
        world.pair.stops_after = 0
        world.decode.on_command = lambda command: world.decode.send_garbage() if command.HasField("resume") else None
        error, _ = await error_of(world)
        assert isinstance(error, Unavailable)
        assert "decode-0-bbbbbbbb is lost: the worker sent bytes that are no ServeResponse" in error.message

    async def test_the_idle_connection_to_a_worker_that_went_away_is_closed(
        self, world: World, caplog: pytest.LogCaptureFixture
    ) -> None:
        await run(world)
        assert world.metric("worker_connections") == 2
        world.decode.break_streams()
        await world.until(lambda: world.metric("worker_connections") == 1, "the connection is closed")
        assert world.decode.num_streams == 1
        assert "requests end" not in caplog.text, "an operator is warned of losses alone"
