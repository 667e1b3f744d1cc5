"""Requests that go on at another host: no token is lost or comes twice, and whatever fails costs nothing."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from tests.unit.gateway.failing import request_id_of, run
from tests.unit.gateway.fake_workers import LENGTH, FakeWorker, update
from tests.unit.gateway.world import FAST, World, open_world

from weir.bus.messages import Outcome, Placement
from weir.client import AsyncWeirClient, GenerateOptions
from weir.testing.load import StreamRecord
from weir.wire.v1 import types_pb2, worker_pb2
from weir_gateway.requests.migration import MigrationSettings

PATIENT = MigrationSettings(near_tokens=3, far_tokens=40, first_answer_s=60, patience_s=60, longest_s=60, answer_s=60)
"""On a busy machine too nothing is late but what a test wants to be."""


class There(FakeWorker):
    """The decode worker of another host, which computes whole requests."""

    def __init__(self) -> None:
        super().__init__("decode-1-cccccccc")
        self.on_command = self._on_command
        self.answer = list(b"hello world")
        self.answers = True

    def placement(self) -> Placement:
        here = self.worker_id, self.address
        return Placement(0, *here, *here, num_reserved_pages=4)

    def stage(self, request_id: str, num_tokens: int, problem: str = "", dispatch: int = 2) -> None:
        attempt = types_pb2.Attempt(dispatch=dispatch)
        told = worker_pb2.StagedPages(request_id=request_id, attempt=attempt, num_tokens=num_tokens, problem=problem)
        self.send_raw(worker_pb2.ServeResponse(step_frame=worker_pb2.StepFrame(staged=[told])))

    def _on_command(self, command: worker_pb2.ServeRequest) -> None:
        if not (command.HasField("start") and self.answers):
            return
        start = command.start
        first, dispatch = len(start.output_token_ids), start.attempt.dispatch
        self.send(update(start.request_id, first, self.answer[first:], finish=LENGTH, dispatch=dispatch))


@pytest.fixture
def waits() -> MigrationSettings:
    return PATIENT


@pytest.fixture
async def world(waits: MigrationSettings) -> AsyncIterator[World]:
    async with open_world(replace(FAST, migration=waits)) as world:
        yield world


@pytest.fixture
async def there(world: World) -> AsyncIterator[There]:
    worker = There()
    await worker.start()
    yield worker
    await worker.stop()


async def begin(world: World, there: There) -> "asyncio.Task[StreamRecord]":
    """A request with four tokens, whose worker falls silent then, and that is about to go on there."""
    world.pair.stops_after = 4
    running = run(world)
    await world.until(lambda: world.pair.starts, "started")
    held = world.scheduler.helds
    await world.until(lambda: held and [one.num_output_tokens for one in held[-1].requests] == [4], "has its tokens")
    reply = await world.scheduler.migrate(world.scheduler.submits[0], there.placement())
    assert reply.accepted, reply.refusal
    await world.until(lambda: there.named("stage"), "asked for its pages")
    return running


async def go_on(world: World) -> None:
    """Its worker has the rest of the answer."""
    world.pair.stops_after = None
    request_id = request_id_of(world)
    world.decode.send(update(request_id, 4, world.pair.answer[4:], finish=LENGTH))


async def test_it_goes_on_there_once_its_pages_are_there(world: World, there: There) -> None:
    running = await begin(world, there)
    await world.until(lambda: world.scheduler.helds[-1].requests[0].is_migrating, "the scheduler knows")
    [stage] = there.named("stage")
    assert (stage.attempt.dispatch, stage.pages_address) == (2, "there:1")
    there.stage(stage.request_id, 0)
    there.stage(stage.request_id, 4, dispatch=9)
    await asyncio.sleep(0.05)
    assert there.named("start") == [], "too little is there"
    there.stage(stage.request_id, 4)
    record = await running
    assert (record.text, record.num_index_errors) == ("hello world", 0)
    [start] = there.named("start")
    assert (start.attempt.dispatch, bytes(start.output_token_ids)) == (2, b"hell")
    await world.until(lambda: world.decode.named("cancel"), "cancelled where it was")
    assert world.decode.named("cancel")[0].attempt.dispatch == 1
    await world.until_idle()
    [finish] = world.scheduler.finishes
    assert (finish.dispatch, finish.outcome, finish.num_output_tokens) == (2, Outcome.FINISHED, 11)
    assert len(world.scheduler.submits) == 1, "its place is reserved already"
    assert world.metric("migrations_moved_total") == 1
    assert world.metric("interruptions_total") == 0


async def test_the_scheduler_hears_at_once_that_it_has_moved(world: World, there: There) -> None:
    there.answer = list(b"hello world" * 3)
    running = await begin(world, there)
    there.on_command = lambda command: (
        there.send(update(command.start.request_id, 4, [ord("o")], dispatch=2)) if command.HasField("start") else None
    )
    there.stage(request_id_of(world), 4)
    await world.until(lambda: world.metric("migrations_moved_total") == 1, "moved")

    def is_known() -> bool:
        [held] = world.scheduler.helds[-1].requests
        return held.placement == replace(there.placement(), dispatch=2) and not held.is_migrating

    await world.until(is_known, "the scheduler knows")
    there.send(update(request_id_of(world), 5, list(b" world"), finish=LENGTH, dispatch=2))
    assert (await running).text == "hello world"


@pytest.mark.parametrize(
    ("how", "waits"),
    [("problem", PATIENT), ("gone", PATIENT), ("silent", replace(PATIENT, first_answer_s=0.5))],
    ids=["problem", "gone", "silent"],
)
async def test_what_fails_before_costs_nothing(world: World, there: There, how: str) -> None:
    running = await begin(world, there)
    if how == "problem":
        there.stage(request_id_of(world), 0, "no room for its pages")
    elif how == "gone":
        await there.stop()
    await world.until(lambda: world.metric("migrations_abandoned_total") == 1, "given up")
    if how != "gone":
        await world.until(lambda: there.named("cancel"), "cancelled there")
        assert there.named("cancel")[0].attempt.dispatch == 2
    assert not running.done()
    await go_on(world)
    assert (await running).text == "hello world"
    assert there.named("start") == []
    assert len(world.scheduler.submits) == 1


async def test_no_more_pages_and_little_left_is_a_move_too(world: World, there: There) -> None:
    """Short answers have no full page: what there is of them is computed there."""
    running = await begin(world, there)
    there.stage(request_id_of(world), 0)
    there.stage(request_id_of(world), 0, "no more of its pages come")
    assert (await running).text == "hello world"
    assert world.metric("migrations_moved_total") == 1


async def test_its_own_worker_dies_meanwhile(world: World, there: There) -> None:
    running = await begin(world, there)
    world.pair.stops_after = None
    world.scheduler.placement = replace(there.placement(), dispatch=1)
    world.scheduler.grants_at_once = False
    await world.decode.stop()
    await world.until(lambda: len(world.scheduler.submits) == 2, "placed again")
    there.stage(request_id_of(world), 4)  # too late: of the dispatch before
    await asyncio.sleep(0.05)
    await world.scheduler.grant(world.scheduler.submits[-1])
    record = await running
    assert (record.text, record.num_index_errors) == ("hello world", 0)
    assert [start.attempt.dispatch for start in there.named("start")] == [3], "it never falls"
    assert [submit.dispatch for submit in world.scheduler.submits] == [1, 3], "2 was taken"
    assert world.metric("migrations_abandoned_total") == 1


async def test_its_client_goes_meanwhile(world: World, there: There) -> None:
    async with AsyncWeirClient(world.grpc_address) as client:
        world.pair.stops_after = 4
        stream = client.generate("x", GenerateOptions(max_tokens=11))
        num_tokens = 0
        while num_tokens < 4:
            num_tokens += len((await anext(stream)).token_ids)
        reply = await world.scheduler.migrate(world.scheduler.submits[0], there.placement())
        assert reply.accepted, reply.refusal
        await world.until(lambda: there.named("stage"), "asked for its pages")
        await stream.aclose()  # type: ignore[attr-defined]
    await world.until(lambda: there.named("cancel"), "cancelled there")
    await world.until_idle()
    assert world.metric("migrations_under_way") == 0


@pytest.mark.parametrize("waits", [replace(PATIENT, answer_s=0.5)])
async def test_no_token_comes_of_there(world: World, there: There) -> None:
    running = await begin(world, there)
    there.answers, world.pair.stops_after = False, None
    there.stage(request_id_of(world), 4)
    record = await running
    assert (record.text, record.num_index_errors) == ("hello world", 0)
    assert world.scheduler.submits[-1].dispatch == 3
    await world.until(lambda: there.named("cancel"), "cancelled there")
    assert world.metric("migrations_unanswered_total") == 1


async def test_only_what_decodes_migrates_and_to_one_place(world: World, there: There) -> None:
    world.pair.stops_after = 0
    running = run(world)
    await world.until(lambda: world.pair.starts, "started")
    submit = world.scheduler.submits[0]
    assert not (await world.scheduler.migrate(submit, there.placement())).accepted
    unknown = replace(submit, request_id="0" * 32)
    assert "ended" in (await world.scheduler.migrate(unknown, there.placement())).refusal
    request_id = request_id_of(world)
    world.prefill.send(update(request_id, 0, world.pair.answer[:4]), update(request_id, 4, handed_off=True))
    await world.until(lambda: world.scheduler.prefilled, "decodes")
    await world.until(lambda: world.metric("requests_in_flight") == 1, "runs")
    assert (await world.scheduler.migrate(submit, there.placement())).accepted
    assert (await world.scheduler.migrate(submit, there.placement())).accepted, "a repeated one changes nothing"
    elsewhere = replace(there.placement(), decode_worker_id="decode-9-dddddddd")
    assert "another worker" in (await world.scheduler.migrate(submit, elsewhere)).refusal
    await world.until(lambda: len(there.named("stage")) == 1, "asked once")
    await go_on(world)
    assert (await running).text == "hello world"
