"""A request that one worker serves whole: it is asked once, and nothing is taken for a hand-off."""

from dataclasses import replace

from tests.unit.gateway.failing import run
from tests.unit.gateway.fake_workers import LENGTH, update
from tests.unit.gateway.test_request_state import ANSWER, REQUEST_ID, make_state, read_all
from tests.unit.gateway.world import World

from weir.bus.messages import Placement
from weir.core.clock import ManualClock
from weir.core.life import Phase
from weir.wire.v1 import worker_pb2

LOCAL = Placement(1, "d", "d:1", "d", "d:1", 4)


def serve_locally(world: World) -> None:
    """The scheduler names one worker for both; it answers whatever is started there."""
    placement = world.scheduler.placement
    world.scheduler.placement = replace(
        placement, prefill_worker_id=placement.decode_worker_id, prefill_address=placement.decode_address
    )

    def answer(command: worker_pb2.ServeRequest) -> None:
        if command.HasField("start"):
            start = command.start
            world.decode.send(update(start.request_id, 0, ANSWER[:4]))
            world.decode.send(update(start.request_id, 4, ANSWER[4:], finish=LENGTH))

    world.decode.on_command = answer


async def test_a_request_is_started_at_one_worker_and_resumed_at_none(world: World) -> None:
    serve_locally(world)
    record = await run(world)
    assert record.text == "hello world"
    assert record.num_index_errors == 0
    assert len(world.decode.named("start")) == 1
    assert world.decode.named("resume") == world.prefill.commands == []
    assert len(world.scheduler.prefilled) == 1


async def test_a_broken_stream_before_the_first_token_starts_the_request_again(world: World) -> None:
    serve_locally(world)
    answers_all = world.decode.on_command
    world.decode.on_command = lambda command: None
    running = run(world)
    await world.until(lambda: world.decode.named("start"), "started")
    world.decode.on_command = answers_all
    world.decode.break_streams()
    assert (await running).text == "hello world"
    assert len(world.decode.named("start")) == 2


async def test_an_update_about_the_prompt_is_no_sign_that_it_is_prefilled() -> None:
    phases: list[Phase] = []
    state = make_state(phases, ManualClock())
    state.grant(LOCAL)
    state.start()
    state.on_update("d", update(REQUEST_ID, 0, prompt_logprobs=()))
    assert phases[-1:] == [Phase.PREFILLING]
    assert [command.WhichOneof("command") for command in state.commands_to_resume("d")] == ["start", "resume"]
    state.on_update("d", update(REQUEST_ID, 0, ANSWER[:2]))
    assert phases[-1:] == [Phase.DECODING]
    assert [command.WhichOneof("command") for command in state.commands_to_resume("d")] == ["resume"]
    state.on_update("d", update(REQUEST_ID, 2, ANSWER[2:], finish=LENGTH))
    assert await read_all(state) == "hello world"
    assert phases[-1:] == [Phase.FINISHED]


async def test_the_loss_of_its_only_worker_interrupts_it() -> None:
    phases: list[Phase] = []
    state = make_state(phases, ManualClock())
    state.grant(LOCAL)
    state.start()
    state.on_update("d", update(REQUEST_ID, 0, ANSWER[:2]))
    state.on_connection_lost("d", "gone")
    assert state.interrupted.result().message == "gone"
    state.requeue()
    state.grant(replace(LOCAL, dispatch=2))
    assert list(state.start().start.output_token_ids) == ANSWER[:2]
    assert not state.commands_to_resume("d")[-1].resume.awaits_hand_off
