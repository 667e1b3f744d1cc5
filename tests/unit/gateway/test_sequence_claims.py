"""A gateway goes on with a request of one that died: with the sequence that runs at a worker, if one has it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest
from tests.unit.gateway.fake_model import ids_of
from tests.unit.gateway.fake_workers import CANCELLED, GOING_ON, STOP, FakeWorker, Finish, update, worker_error
from tests.unit.gateway.test_adoption import another, register
from tests.unit.gateway.test_idempotency_keys import KEY, answer_to, bucket_of, generate, until_recorded
from tests.unit.gateway.world import FAST, World, open_world

from weir.bus.codec import encode
from weir.bus.keys import KeyRecord, KeyStatus, key_name
from weir.core.life import Attempt
from weir.rpc.conversions import attempt_to_pb
from weir.wire.v1 import inference_pb2, types_pb2, worker_pb2
from weir_gateway.driving.adoption import AdoptionSettings
from weir_gateway.keys.keyed_requests import KeySettings

ANSWER = "héllo wörld"
DEAD = "gateway-9-99999999"
UNKNOWN = worker_pb2.WORKER_ERROR_REASON_UNKNOWN_REQUEST


@pytest.fixture
def claim_wait_s() -> float:
    """Nobody waits for it where a worker has the sequence."""
    return 60.0


@pytest.fixture
async def world(claim_wait_s: float) -> AsyncIterator[World]:
    adoption = AdoptionSettings(wait_s=60.0, successor_wait_s=60.0, claim_wait_s=claim_wait_s)
    async with open_world(replace(FAST, keys=KeySettings(resume_s=0.3), adoption=adoption)) as world:
        world.pair.answer = ids_of(ANSWER)
        yield world


async def leave_behind(world: World, request: inference_pb2.GenerateRequest | None = None) -> KeyRecord:
    """The key's entry as a gateway that died has left it: it had computed the same before."""
    await answer_to(world, request or generate())
    record = await until_recorded(world, KeyStatus.FINISHED)
    await world.until(lambda: world.metric("keys_held") == 0, "it is kept no longer")
    dead = replace(record, status=KeyStatus.RUNNING, gateway_id=DEAD, num_output_tokens=0, finish_reason=None)
    await (await bucket_of(world)).put(key_name("default", KEY), encode(dead))
    return dead


def claimed(
    record: KeyRecord, token_ids: Sequence[int], finish: Finish = GOING_ON, *, adoption: int = 0
) -> worker_pb2.SequenceUpdate:
    sent = update(record.request_id, 0, token_ids, finish=finish)
    sent.attempt.CopyFrom(attempt_to_pb(Attempt(1001, adoption)))
    sent.claimed = True
    return sent


def claims_at(worker: FakeWorker) -> list[worker_pb2.Resume]:
    return [resume for resume in worker.named("resume") if resume.claims]


def on_claim(worker: FakeWorker, *answers: worker_pb2.SequenceUpdate) -> None:
    def on_command(command: worker_pb2.ServeRequest) -> None:
        if command.HasField("resume") and command.resume.claims:
            worker.send(*answers)

    worker.on_command = on_command


def following(record: KeyRecord, index: int, text: bytes, finish: Finish = GOING_ON) -> worker_pb2.SequenceUpdate:
    return update(record.request_id, index, list(text), finish=finish, dispatch=1001)


async def test_it_goes_on_at_the_worker_that_has_it_and_nothing_is_submitted(world: World) -> None:
    record = await leave_behind(world)
    whole = ids_of(ANSWER)
    await register(world, world.decode)
    num_before = len(world.scheduler.submits)
    on_claim(world.decode, claimed(record, whole[:6]), *(following(record, 6, bytes(whole[6:]), STOP),))

    answer = await answer_to(world, generate(resume_from=3))

    assert (answer.token_ids, answer.text, answer.first_index) == (whole[3:], ANSWER[2:], 3)
    assert answer.finish_reason == types_pb2.FINISH_REASON_STOP
    assert len(world.scheduler.submits) == num_before
    assert len(world.prefill.named("start")) == 1
    (resume,) = claims_at(world.decode)
    assert (resume.request_id, resume.attempt.dispatch, resume.next_index) == (record.request_id, 1001, 0)
    assert (world.metric("claims_total"), world.metric("claims_in_vain_total")) == (1, 0)
    assert (await until_recorded(world, KeyStatus.FINISHED)).num_output_tokens == len(whole)
    await world.until_idle()
    assert world.scheduler.finishes[-1].dispatch == 1001


async def test_while_it_runs_the_scheduler_hears_that_it_is_here_and_what_is_reserved(world: World) -> None:
    record = await leave_behind(world)
    whole = ids_of(ANSWER)
    await register(world, world.decode)
    on_claim(world.decode, claimed(record, whole[:6]))
    call = world.stub.Generate(generate(), timeout=60)

    def is_held() -> bool:
        (held,) = (world.scheduler.helds[-1].requests if world.scheduler.helds else ()) or (None,)
        return held is not None and held.placement is not None and held.num_output_tokens == 6

    await world.until(is_held, "it is listed")
    (held,) = world.scheduler.helds[-1].requests
    assert held.placement is not None
    assert (held.placement.dispatch, held.placement.decode_worker_id) == (1001, world.decode.worker_id)
    assert held.placement.decode_address == world.decode.address
    assert held.placement.num_reserved_pages == -(-(held.submit.num_prompt_tokens + 40) // 16)
    assert (held.submit.request_id, held.is_prefilled, held.submit.keep_ms) == (record.request_id, True, 300)
    world.decode.send(following(record, 6, bytes(whole[6:]), STOP))
    text = "".join([response.text async for response in call])
    assert text == ANSWER


async def test_a_text_that_ends_it_ends_it_though_more_was_drawn_meanwhile(world: World) -> None:
    request = generate()
    request.options.stop_conditions.stop.append("wö")
    record = await leave_behind(world, request)
    await register(world, world.decode)
    on_claim(world.decode, claimed(record, ids_of(ANSWER)))

    request.options.resume_from = 1
    answer = await answer_to(world, request)

    assert (answer.text, len(answer.token_ids)) == ("éllo ", len("éllo wö".encode()))
    assert answer.finish_reason == types_pb2.FINISH_REASON_STOP
    await world.until(
        lambda: [cancel.attempt.dispatch for cancel in world.decode.named("cancel")][-1:] == [1001], "it is cancelled"
    )


@pytest.mark.parametrize("claim_wait_s", [0.3])
async def test_where_no_worker_has_it_it_is_computed_under_the_dispatch_after_the_claim(world: World) -> None:
    record = await leave_behind(world)
    await register(world, world.decode)
    unknown = worker_error(record.request_id, UNKNOWN)
    unknown.attempt.dispatch = 1001
    cancelled = update(record.request_id, 0, finish=CANCELLED, dispatch=1001)
    on_claim(world.decode, unknown, cancelled)
    answer = await answer_to(world, generate(resume_from=3))

    assert answer.text == ANSWER[2:]
    _, second = world.prefill.named("start")
    assert (second.request_id, second.attempt.dispatch) == (record.request_id, 1002)
    cancel = world.decode.named("cancel")[-1]
    assert cancel.attempt.dispatch == 1001, "what comes later of the dead gateway's is freed"
    assert (world.metric("claims_total"), world.metric("claims_in_vain_total")) == (0, 1)


async def test_of_two_workers_that_have_it_the_first_goes_on_and_the_other_one_is_told(world: World) -> None:
    record = await leave_behind(world)
    whole = ids_of(ANSWER)
    async with another() as other:
        await register(world, world.decode, other)
        world.decode.on_command = other.on_command = lambda command: None
        call = world.stub.Generate(generate(), timeout=60)
        await world.until(lambda: claims_at(world.decode) and claims_at(other), "both are asked")
        world.decode.send(claimed(record, whole[:4]))
        await world.until(lambda: world.metric("claims_total") == 1, "one has it")
        async with asyncio.timeout(30):
            while not other.named("cancel"):  # it might be what the first one had, until that is missed
                other.send(claimed(record, whole[:6], adoption=2))
                await asyncio.sleep(0.1)
        world.decode.send(following(record, 4, bytes(whole[4:]), STOP))
        assert "".join([response.text async for response in call]) == ANSWER


async def test_its_worker_may_be_lost_and_another_one_adopts_it(world: World) -> None:
    record = await leave_behind(world)
    whole = ids_of(ANSWER)
    num_before = len(world.scheduler.submits)
    async with another() as adopter:
        await register(world, world.decode, adopter)
        world.decode.on_command = adopter.on_command = lambda command: None
        call = world.stub.Generate(generate(), timeout=60)
        await world.until(lambda: claims_at(world.decode) and claims_at(adopter), "both are asked")
        world.decode.send(claimed(record, whole[:4]))
        await world.until(lambda: world.metric("claims_total") == 1, "it goes on")

        rest = claimed(record, whole[4:], STOP, adoption=1)
        rest.first_index = 4
        adopter.commands.clear()
        on_claim(adopter, rest)
        await world.decode.stop()
        assert "".join([response.text async for response in call]) == ANSWER
        (resume,) = adopter.named("resume")
        assert (resume.claims, resume.attempt.dispatch, resume.next_index) == (True, 1001, 4)
    assert len(world.scheduler.submits) == num_before


async def test_prompts_log_probabilities_are_computed_again_and_nobody_is_asked(world: World) -> None:
    record = await leave_behind(world, generate(prompt_logprobs=1))
    await register(world, world.decode)
    await answer_to(world, generate(prompt_logprobs=1))
    assert claims_at(world.decode) == []
    assert world.prefill.named("start")[-1].attempt.dispatch == 1001
    assert world.prefill.named("start")[-1].request_id == record.request_id


async def test_workers_are_told_how_long_to_keep_what_has_a_key(world: World) -> None:
    await answer_to(world, generate())
    await answer_to(world, generate(""))
    assert [start.keep_ms for start in world.prefill.named("start")] == [300, 0]
    assert [submit.keep_ms for submit in world.scheduler.submits] == [300, 0]


async def test_one_that_its_client_leaves_while_it_is_looked_for_is_cancelled_where_it_was_asked_for(
    world: World,
) -> None:
    await leave_behind(world)
    await register(world, world.decode)
    world.decode.on_command = lambda command: None
    call = world.stub.Generate(generate(), timeout=60)
    await world.until(lambda: claims_at(world.decode), "it is asked for")
    call.cancel()
    await world.until(lambda: world.decode.named("cancel"), "what was asked for is cancelled")
    assert world.decode.named("cancel")[-1].attempt.dispatch == 1001
