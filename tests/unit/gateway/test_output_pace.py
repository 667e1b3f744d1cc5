"""Streams wait for more tokens while sending takes much of the loop's time, and only then."""

import asyncio

import pytest

from weir.core.clock import ManualClock
from weir_gateway.driving.output_pace import FIRST_HOLD_S, MAX_HOLD_S, WINDOW_S, OutputPace


def run_window(pace: OutputPace, clock: ManualClock, share: float, num_passes: int = 10) -> None:
    for _ in range(num_passes):
        clock.advance(WINDOW_S / num_passes)
        pace.note_pass(share * WINDOW_S / num_passes)


def test_the_hold_grows_to_its_bound_while_passes_take_most_of_the_time_and_shrinks_to_nothing_after() -> None:
    clock = ManualClock()
    pace, holds = OutputPace(clock), []
    for share in (0.9,) * 5 + (0.3,) * 2 + (0.05,) * 4:
        run_window(pace, clock, share, num_passes=16)
        holds.append(pace.hold_s)
    assert holds[:5] == pytest.approx([0.01, 0.02, 0.03, 0.03, 0.03])
    assert holds[5:7] == [MAX_HOLD_S, MAX_HOLD_S]
    assert holds[7:] == pytest.approx([0.015, 0.0075, 0.0, 0.0])


def test_one_long_pass_among_short_ones_holds_nothing_up() -> None:
    clock = ManualClock()
    pace = OutputPace(clock)
    clock.advance(WINDOW_S / 2)
    pace.note_pass(WINDOW_S / 3)
    clock.advance(WINDOW_S / 2)
    pace.note_pass(0.0)
    assert pace.hold_s == 0.0


def test_after_a_silence_the_hold_is_over() -> None:
    clock = ManualClock()
    pace = OutputPace(clock)
    for _ in range(5):
        run_window(pace, clock, 0.9)
    assert pace.hold_s > FIRST_HOLD_S
    clock.advance(60)
    pace.note_pass(0.001)
    assert pace.hold_s == 0.0


async def test_a_pass_lasts_until_all_that_was_ready_has_run_and_is_counted_once() -> None:
    clock = ManualClock()
    pace = OutputPace(clock)
    loop = asyncio.get_running_loop()
    pace.on_wake()
    for _ in range(3):
        loop.call_soon(clock.advance, WINDOW_S)
        loop.call_soon(pace.on_wake)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert pace.hold_s == FIRST_HOLD_S


async def test_streams_that_gather_are_let_go_together_and_others_have_the_loop_between_many() -> None:
    pace = OutputPace(ManualClock())
    pace.hold_s = 0.01
    waits = [pace.gather() for _ in range(600)]
    waits[0].cancel()
    waits[1].set_result(None)
    let_go: list[int] = []
    while len(let_go) < 3:
        await asyncio.sleep(0)
        num_done = sum(one.done() for one in waits)
        if num_done > (let_go[-1] if let_go else 2):
            let_go.append(num_done)
    assert let_go == [256, 512, 600]
    late = pace.gather()
    assert not late.done()
    await late
