"""The steps that a worker remembers while somebody looks at them."""

from weir.core.clock import ManualClock
from weir.core.life import Attempt
from weir.engine.messages import ChunkComputed, EngineReport, Event, SequenceKey, StepTiming, TokenSampled
from weir.telemetry.internals import MAX_STEP_SEQUENCES, MAX_STEPS, SequenceShare
from weir.worker.engine.step_ring import WATCH_S, StepRing


def key(name: str) -> SequenceKey:
    return SequenceKey(name, Attempt(1, 0))


def report(step: int, *, num_decoded: int = 1) -> EngineReport:
    """A chunk that ends its prompt, and others that are decoded."""
    events: tuple[Event, ...] = (
        ChunkComputed(key("prompt"), 0, 30),
        TokenSampled(key("prompt"), 0, 5),
        *(TokenSampled(key(f"decoded-{index}"), 3, 5) for index in range(num_decoded)),
    )
    return EngineReport(events=events, timing=StepTiming(step, 2_000_000_000, 2_005_000_000, num_decoded + 1, 31))


def test_nothing_is_remembered_while_nobody_asks() -> None:
    clock = ManualClock()
    ring = StepRing(clock)
    ring.observe(report(1))
    assert ring.newest(10) == []
    ring.observe(report(2))
    assert [one.step for one in ring.newest(10)] == [2]
    clock.advance(WATCH_S + 1)
    ring.observe(report(3))
    assert ring.newest(10) == []
    ring.observe(report(4))
    assert [one.step for one in ring.newest(10)] == [4]


def test_a_step_says_who_was_in_it_and_what_each_got() -> None:
    ring = StepRing(ManualClock())
    ring.newest(1)
    ring.observe(EngineReport())
    ring.observe(report(7))
    (step,) = ring.newest(10)
    assert (step.started_at_s, step.duration_ms, step.num_sequences, step.num_tokens) == (2.0, 5.0, 2, 31)
    assert step.num_prefill_tokens == 30
    assert step.sequences == (SequenceShare("prompt", 30), SequenceShare("decoded-0", 0))


def test_steps_and_their_sequences_are_bounded() -> None:
    ring = StepRing(ManualClock())
    ring.newest(1)
    for step in range(MAX_STEPS + 10):
        ring.observe(report(step, num_decoded=MAX_STEP_SEQUENCES + 5 if step == MAX_STEPS else 1))
    found = ring.newest(MAX_STEPS + 10)
    assert [one.step for one in found] == list(range(10, MAX_STEPS + 10))
    assert len(found[MAX_STEPS - 10].sequences) == MAX_STEP_SEQUENCES
    assert [one.step for one in ring.newest(2)] == [MAX_STEPS + 8, MAX_STEPS + 9]
