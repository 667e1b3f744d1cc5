"""Too few pages: sequences are preempted, and their tokens are those that they would have had."""

import errno
import os
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.engine.pressure import PressedEngine, Pressure, Prompt
from tests.unit.engine.world import MAX_CONTEXT_TOKENS, VOCAB_SIZE

from weir.core.life import FinishReason
from weir.core.sampling import SamplingParams
from weir.engine.batching.admission import PauseSettings
from weir.engine.batching.batcher import BatchLimits
from weir.engine.batching.own_rules import Batching, JoinSettings
from weir.engine.memory.preemption import PreemptionSettings
from weir.engine.messages import FailureReason
from weir.kv.geometry import num_pages_for
from weir.policy.registry import policy_names
from weir.testing.runner import reference_tokens

NEVER_S = 1e6
TOKEN_IDS = st.integers(0, VOCAB_SIZE - 1)


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    num_tokens = draw(st.sampled_from([15, 16, 17, 33, 40, 1]))
    arrives_at = draw(st.integers(0, 8))
    return Prompt(
        token_ids=tuple(draw(st.lists(TOKEN_IDS, min_size=num_tokens, max_size=num_tokens))),
        max_tokens=draw(st.sampled_from([60, 70, 40, 20, 1])),
        lane_priority=draw(st.integers(0, 2)),
        arrives_at=arrives_at,
        cancelled_at=draw(st.sampled_from([None, None, None, arrives_at + 3, arrives_at + 25])),
        seed=draw(st.integers(0, 2**64 - 1)),
        prefix_seed=draw(st.sampled_from([b"", b"seed"])),
        rank=draw(st.sampled_from([0.0, 5.0, 50.0])),
        predicted_output_tokens=draw(st.sampled_from([0.0, 5.0, 50.0])),
        itl_target_ms=draw(st.sampled_from([0, 100, 1000])),
    )


def limits(max_stall_s: float, **changes: int) -> BatchLimits:
    values = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "chunk_tokens": 32} | changes
    return BatchLimits(**values, max_context_tokens=MAX_CONTEXT_TOKENS, vocab_size=VOCAB_SIZE, max_stall_s=max_stall_s)


LIMITS = st.builds(
    limits,
    st.sampled_from([20.0, 2.0, 0.4]),
    max_num_seqs=st.sampled_from([6, 4, 2]),
    max_num_batched_tokens=st.sampled_from([64, 16, 3]),
    chunk_tokens=st.sampled_from([64, 16, 7, 1]),
)
PREEMPTIONS = st.builds(
    PreemptionSettings,
    after_s=st.sampled_from([0.0, 0.1, 0.5]),
    max_preemptions=st.sampled_from([3, 5, 1, 0]),
    num_swap_slots=st.sampled_from([100, 5, 1, 0]),
)
JOINS = st.builds(JoinSettings, st.sampled_from(Batching), window_s=st.sampled_from([0.0, 0.3]))
PRESSURES = st.builds(
    Pressure,
    prompts=st.lists(prompts(), min_size=3, max_size=8).map(tuple),
    num_pages=st.sampled_from([8, 9, 11, 14]),
    limits=LIMITS,
    join=JOINS,
    preemption=PREEMPTIONS,
    refusal_rate=st.sampled_from([0.0, 0.3]),
    failure_rate=st.sampled_from([0.0, 0.0, 0.02]),
    spoil_rate=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 2**32),
    policies=st.lists(st.tuples(st.integers(0, 30), st.sampled_from(policy_names())), max_size=3).map(tuple),
    pauses=st.builds(PauseSettings, st.sampled_from([0, 1, 3]), st.sampled_from([0.0, 0.5, 10.0])),
)


def reference(prompt: Prompt) -> list[int]:
    num_tokens = min(prompt.max_tokens, MAX_CONTEXT_TOKENS - len(prompt.token_ids))
    return reference_tokens(prompt.token_ids, SamplingParams(seed=prompt.seed), num_tokens, VOCAB_SIZE)


def check(engine: PressedEngine) -> None:
    """Every request ended once, with the tokens that it has alone, and left nothing."""
    for index, prompt in enumerate(engine.pressure.prompts):
        outcome = engine.outcomes[engine.key_of(index)]
        expected = reference(prompt)
        assert len(outcome.ends) == 1
        end = outcome.ends[0]
        assert outcome.token_ids == expected[: len(outcome.token_ids)]
        if end.reason is FinishReason.LENGTH:
            assert outcome.token_ids == expected
        elif end.reason is FinishReason.CANCELLED:
            assert prompt.cancelled_at is not None
        else:
            assert end.failure is not None
            assert end.failure.reason is FailureReason.NO_CAPACITY or engine.num_failed_steps
    assert engine.free_pages == set(range(engine.pressure.num_pages))
    counters = engine.batcher.counters
    assert counters.preemptions <= engine.pressure.preemption.max_preemptions * len(engine.pressure.prompts)
    assert counters.pauses <= engine.pressure.pauses.max_pauses * len(engine.pressure.prompts)
    assert counters.policy_defects == 0


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(PRESSURES)
def test_whatever_happens_tokens_are_those_of_the_request_alone_and_nothing_leaks(pressure: Pressure) -> None:
    engine = PressedEngine(pressure)
    engine.run()
    check(engine)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(PRESSURES)
def test_nobody_fails_for_pages_while_everybody_may_be_preempted(pressure: Pressure) -> None:
    may_always_go = replace(pressure.preemption, max_preemptions=10_000)
    patient = replace(pressure.limits, max_stall_s=NEVER_S)
    unlucky = tuple(replace(prompt, cancelled_at=None) for prompt in pressure.prompts)
    engine = PressedEngine(
        replace(pressure, prompts=unlucky, preemption=may_always_go, limits=patient, failure_rate=0.0)
    )
    engine.run()
    check(engine)
    assert engine.batcher.counters.finished == len(unlucky)


def crowd(num_prompts: int, num_pages: int, **changes: int | float) -> Pressure:
    """Prompts of one page each that grow to four, all there from the start."""
    made = tuple(
        Prompt(tuple(range(index, index + 15)), 48, 0, 0, None, seed=index, prefix_seed=b"")
        for index in range(num_prompts)
    )
    preemption = PreemptionSettings(**({"after_s": 0.0, "max_preemptions": 3, "num_swap_slots": 100} | changes))  # type: ignore[arg-type]
    return Pressure(made, num_pages, limits(NEVER_S, max_num_seqs=8), JoinSettings(), preemption)


def test_a_crowd_that_fits_a_third_is_preempted_and_served_to_the_end() -> None:
    engine = PressedEngine(crowd(6, num_pages=8))
    engine.run()
    check(engine)
    counters = engine.batcher.counters
    assert counters.finished == 6
    assert counters.preemptions > 0
    assert counters.pages_swapped_out == counters.pages_swapped_in > 0
    assert counters.tokens_recomputed == counters.preemptions_dropped == counters.swap_failures == 0


@pytest.mark.parametrize("seed", [0, 5, 6, 10])
def test_decodes_go_on_while_prompts_that_are_to_go_first_lack_the_pages_that_those_hold(seed: int) -> None:
    pressed = replace(
        crowd(8, num_pages=8, max_preemptions=10_000),
        limits=limits(NEVER_S, max_num_seqs=6, max_num_batched_tokens=16, chunk_tokens=64),
        refusal_rate=0.3,
        spoil_rate=0.5,
        seed=seed,
        policies=((9, "prefill-first"),),
    )
    engine = PressedEngine(pressed)
    engine.run()
    check(engine)
    assert engine.batcher.counters.finished == 8


def test_without_a_swap_file_the_lost_tokens_are_computed_again() -> None:
    engine = PressedEngine(crowd(6, num_pages=8, num_swap_slots=0))
    engine.run()
    check(engine)
    counters = engine.batcher.counters
    assert counters.finished == 6
    assert counters.preemptions == counters.preemptions_dropped > 0
    assert counters.tokens_recomputed > 0
    assert counters.prompt_tokens_computed == 6 * 15
    assert counters.output_tokens_computed == 6 * 47


def test_pages_that_a_full_file_system_does_not_take_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    engine = PressedEngine(crowd(6, num_pages=8))
    engine.run()
    check(engine)
    counters = engine.batcher.counters
    assert counters.finished == 6
    assert counters.preemptions == counters.preemptions_dropped > 0
    assert counters.pages_swapped_out == 0
    assert counters.tokens_recomputed > 0


def test_pages_that_come_back_wrong_are_computed_again() -> None:
    engine = PressedEngine(replace(crowd(6, num_pages=8), spoil_rate=1.0))
    engine.run()
    check(engine)
    counters = engine.batcher.counters
    assert counters.finished == 6
    assert counters.swap_failures > 0
    assert counters.tokens_recomputed > 0


def test_a_request_that_needs_the_whole_arena_gets_it() -> None:
    pressure = crowd(4, num_pages=num_pages_for(15 + 48), max_preemptions=20)
    engine = PressedEngine(pressure)
    engine.run()
    check(engine)
    assert engine.batcher.counters.finished == 4


def test_held_rows_are_given_up_before_anybody_stalls_for_their_pages() -> None:
    short = Prompt(tuple(range(40)), 2, 0, 0, None, seed=1, prefix_seed=b"")
    long = Prompt(tuple(range(15)), 60, 0, 0, None, seed=2, prefix_seed=b"")
    hold, never = JoinSettings(Batching.STATIC_HOLD), PreemptionSettings(after_s=0.0, max_preemptions=0)
    engine = PressedEngine(Pressure((short, long), 6, limits(2.0, max_num_batched_tokens=64), hold, never))
    engine.run()
    check(engine)
    assert engine.batcher.counters.finished == 2
    assert engine.batcher.counters.held_rows_computed > 0


@pytest.mark.parametrize("max_preemptions", [0, 1])
def test_who_was_preempted_often_enough_stalls_and_fails_by_the_old_rule(max_preemptions: int) -> None:
    pressure = crowd(6, num_pages=8, max_preemptions=max_preemptions)
    engine = PressedEngine(replace(pressure, limits=limits(0.5, max_num_seqs=8)))
    engine.run()
    check(engine)
    assert engine.batcher.counters.failed > 0
    assert engine.batcher.counters.preemptions <= 6 * max_preemptions
