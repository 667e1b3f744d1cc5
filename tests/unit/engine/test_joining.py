"""When waiting sequences may join: each rule by itself, and in an engine."""

import pytest
from tests.unit.engine.pressure import PressedEngine, Pressure, Prompt
from tests.unit.engine.world import MAX_CONTEXT_TOKENS, VOCAB_SIZE

from weir.core.clock import ManualClock
from weir.engine.batching.batcher import BatchLimits
from weir.engine.batching.joining import Batching, DynamicGate, JoinSettings, StaticGate, make_gate
from weir.engine.memory.preemption import PreemptionSettings
from weir.policy.seams import BatchView, Gate, Member


def num_joining(gate: Gate, now_s: float, num_waiting: int, num_in_batch: int, max_running: int = 4) -> int:
    members = [Member(f"{number:032x}", 4, 0, 0.0) for number in range(num_waiting + num_in_batch)]
    view = BatchView(members[:num_waiting], members[num_waiting:], max_running, num_pool_tokens=64, num_free_tokens=64)
    joining = gate.decide(view, now_s).joining
    assert list(joining) == list(range(len(joining))), "in order"
    return len(joining)


def test_continuously_there_is_no_gate() -> None:
    assert make_gate(JoinSettings()) is None


def test_into_a_static_batch_nobody_joins_before_all_of_it_has_ended() -> None:
    gate = StaticGate()
    assert [num_joining(gate, 0.0, 9, in_batch) for in_batch in (4, 1, 0)] == [0, 0, 4]


def test_a_dynamic_batch_starts_at_the_end_of_the_window() -> None:
    gate, clock = DynamicGate(window_s=0.1), ManualClock(5.0)
    assert num_joining(gate, clock.now_s(), 0, 0) == 0
    assert gate.next_deadline_s is None
    assert num_joining(gate, clock.now_s(), 1, 0) == 0
    assert gate.next_deadline_s == pytest.approx(5.1)
    clock.advance(0.09)
    assert num_joining(gate, clock.now_s(), 2, 0) == 0, "the first one's window counts"
    clock.advance(0.02)
    assert num_joining(gate, clock.now_s(), 2, 0) == 2


def test_a_full_dynamic_batch_does_not_wait() -> None:
    gate = DynamicGate(window_s=0.1)
    assert num_joining(gate, 0.0, 4, 0) == 4


def test_the_window_runs_while_a_dynamic_batch_does() -> None:
    gate, clock = DynamicGate(window_s=0.1), ManualClock()
    assert num_joining(gate, clock.now_s(), 1, 3) == 0
    assert gate.next_deadline_s is None, "the batch's end is what it waits for"
    clock.advance(0.2)
    assert num_joining(gate, clock.now_s(), 1, 3) == 0
    assert num_joining(gate, clock.now_s(), 1, 0) == 1


def test_those_left_over_by_a_full_dynamic_batch_have_a_window_of_their_own() -> None:
    gate, clock = DynamicGate(window_s=0.1), ManualClock()
    assert num_joining(gate, clock.now_s(), 5, 0) == 4
    clock.advance(0.05)
    assert num_joining(gate, clock.now_s(), 1, 0) == 0
    clock.advance(0.06)
    assert num_joining(gate, clock.now_s(), 1, 0) == 1


def test_who_waited_once_leaves_no_window_behind() -> None:
    gate, clock = DynamicGate(window_s=0.1), ManualClock()
    num_joining(gate, clock.now_s(), 1, 0)
    clock.advance(1.0)
    num_joining(gate, clock.now_s(), 0, 0)  # it was cancelled
    assert num_joining(gate, clock.now_s(), 1, 0) == 0


def batch_sizes(batching: Batching, max_num_seqs: int = 3) -> list[int]:
    """Rows of each step for five prompts of one page that want 2 to 10 tokens, all there from the start."""
    prompts = tuple(
        Prompt((index,) * 4, max_tokens, 0, 0, None, seed=index, prefix_seed=b"")
        for index, max_tokens in enumerate([2, 4, 6, 8, 10])
    )
    limits = BatchLimits(max_num_seqs, 64, 64, MAX_CONTEXT_TOKENS, VOCAB_SIZE, max_stall_s=1e6)
    settings = JoinSettings(batching, window_s=0.5)
    engine = PressedEngine(Pressure(prompts, 40, limits, settings, PreemptionSettings()))
    engine.run()
    assert engine.batcher.counters.finished == len(prompts)
    return engine.step_sizes


@pytest.mark.parametrize(
    ("batching", "sizes"),
    [
        (Batching.CONTINUOUS, [*[3] * 6, *[2] * 4, *[1] * 4]),
        (Batching.STATIC, [3, 3, 2, 2, 1, 1, *[2] * 8, 1, 1]),
        (Batching.STATIC_HOLD, [*[3] * 6, *[2] * 10]),
        (Batching.DYNAMIC, [3, 3, 2, 2, 1, 1, *[2] * 8, 1, 1]),
    ],
)
def test_who_waits_joins_at_once_or_when_the_batch_has_ended_and_rows_are_held_or_dropped(
    batching: Batching, sizes: list[int]
) -> None:
    assert batch_sizes(batching) == sizes
