"""Models whose layers all see a window only: what no query sees any more is given back, and no token is another one."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.engine.pressure import PressedEngine, Pressure, Prompt
from tests.unit.engine.world import VOCAB_SIZE, Outcome, Request, Schedule, World, limits

from weir.core.life import Attempt, FinishReason
from weir.core.sampling import SamplingParams
from weir.engine.batching.batcher import Batcher, BatchLimits
from weir.engine.batching.own_rules import Batching, JoinSettings
from weir.engine.memory.preemption import PreemptionSettings
from weir.engine.messages import FailureReason, HandOffReady, SequenceKey
from weir.engine.plan import StepPlan
from weir.engine.sequence import LOOKAHEAD_TOKENS, Sequence
from weir.kv.geometry import ATTENTION_BLOCK_TOKENS, first_page_read, num_pages_for
from weir.testing.runner import reference_tokens

CONTEXT_TOKENS = 640
WINDOWS = st.sampled_from([1, 15, 16, 17, 100, 128, 129, 160, 300])
PATIENT_S = 1e6


def bounds(window: int | None, **changes: int) -> BatchLimits:
    return replace(limits(**({"max_context_tokens": CONTEXT_TOKENS} | changes)), window=window, max_stall_s=20.0)


def most_pages(window: int, chunk_tokens: int) -> int:
    """What a sequence may hold between two steps: the window, the block that it begins in, and what comes next."""
    return num_pages_for(window + ATTENTION_BLOCK_TOKENS + chunk_tokens + LOOKAHEAD_TOKENS) + 1


def check_bound(batcher: Batcher) -> None:
    """Of those that never gave way: who did takes all that it lacks at once, to be computed again."""
    window, chunk_tokens = batcher.limits.window, batcher.limits.chunk_tokens
    if window is None:
        return
    for sequence in batcher._sequences.values():
        if sequence.num_preemptions == 0:
            assert len(sequence.held_pages) <= most_pages(window, chunk_tokens)
            assert sequence.first_page <= first_page_read(sequence.num_computed, window)


def tokens_of(seed: int, num_tokens: int) -> tuple[int, ...]:
    return tuple((seed * 7 + place * (place + seed) // 3) % VOCAB_SIZE for place in range(num_tokens))


@st.composite
def requests(draw: st.DrawFn) -> Request:
    num_prompt_tokens, max_tokens = draw(st.integers(1, 420)), draw(st.integers(1, 160))
    arrives_at, seed = draw(st.integers(0, 30)), draw(st.integers(0, 1000))
    return Request(
        prompt_token_ids=tokens_of(seed, num_prompt_tokens),
        max_tokens=max_tokens,
        stop_token_ids=tuple(draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=1))),
        seed=seed,
        arrives_at=arrives_at,
        cancelled_at=draw(st.none() | st.integers(arrives_at, arrives_at + 100)),
        num_reserved_pages=num_pages_for(num_prompt_tokens + max_tokens),
    )


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    window = draw(WINDOWS)
    return Schedule(
        requests=tuple(draw(st.lists(requests(), min_size=1, max_size=6))),
        num_pages=draw(st.integers(40, 160)),
        num_slots=draw(st.integers(1, 8)),
        prefill_limits=bounds(
            window,
            max_num_seqs=draw(st.integers(1, 4)),
            max_num_batched_tokens=draw(st.integers(16, 256)),
            chunk_tokens=draw(st.sampled_from([7, 64, 200])),
            max_kept_ends=draw(st.integers(0, 3)),
        ),
        decode_limits=bounds(window, max_num_batched_tokens=draw(st.integers(2, 8))),
        watermark_pages=draw(st.integers(0, 4)),
        seed=draw(st.integers(0, 2**32)),
    )


class BoundedWorld(World):
    def _check(self, batcher: Batcher) -> None:
        super()._check(batcher)
        check_bound(batcher)


def reference(request: Request, window: int | None) -> tuple[list[int], FinishReason]:
    params = SamplingParams(temperature=0.0, seed=request.seed)
    token_ids = reference_tokens(request.prompt_token_ids, params, request.max_tokens, VOCAB_SIZE, window=window)
    stops = [index for index, token_id in enumerate(token_ids) if token_id in request.stop_token_ids]
    return (token_ids[: stops[0] + 1], FinishReason.STOP) if stops else (token_ids, FinishReason.LENGTH)


def check(request: Request, outcome: Outcome, window: int | None) -> None:
    token_ids, reason = reference(request, window)
    (end,) = outcome.ends
    assert outcome.token_ids == token_ids[: len(outcome.token_ids)]
    if end.failure is None and end.reason is not FinishReason.CANCELLED:
        assert (outcome.token_ids, end.reason) == (token_ids, reason)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(schedules(), st.booleans())
def test_tokens_do_not_depend_on_the_schedule_and_nothing_leaks(schedule: Schedule, async_scheduling: bool) -> None:
    world = BoundedWorld(schedule, async_scheduling=async_scheduling)
    world.run()
    for index, request in enumerate(schedule.requests):
        check(request, world.outcomes[SequenceKey(f"{index:032x}", Attempt())], schedule.decode_limits.window)
    assert world.free_pages == set(range(schedule.num_pages))
    assert world.free_slots == set(range(schedule.num_slots))
    assert world.prefill.counters.page_fingerprint == world.decode.counters.page_fingerprint
    assert world.decode.counters.failed_steps == world.prefill.counters.failed_steps == 0


def one_long(window: int | None, **changes: int) -> Schedule:
    """A prompt of 420 tokens and 200 tokens of output, and four short ones, in an arena with room for all."""
    made = [Request(tokens_of(3, 420), 200, (), 3, 0, None, num_pages_for(620))]
    made += [Request(tokens_of(seed, 20 * seed), 150, (), seed, seed, None, 20) for seed in (1, 2, 4, 5)]
    return Schedule(tuple(made), 200, 8, bounds(window), bounds(window, **changes), watermark_pages=2, seed=8)


def most_held_by_first(world: World) -> int:
    """Runs it. The most pages that the first request held in a decode step."""
    held = [0]

    def look(plan: StepPlan) -> None:
        sequence = world.decode._sequences.get(SequenceKey(f"{0:032x}", Attempt()))
        held.append(0 if sequence is None else len(sequence.held_pages))

    world.decode_runner._on_run = look
    world.run()
    return max(held)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("window", [16, 160])
def test_a_long_context_takes_as_many_pages_as_its_window(window: int, async_scheduling: bool) -> None:
    """The property above would hold for an engine that fails everything, or gives nothing back."""
    windowed, whole = (BoundedWorld(one_long(limit), async_scheduling=async_scheduling) for limit in (window, None))
    most = [most_held_by_first(world) for world in (windowed, whole)]
    for world in (windowed, whole):
        assert world.decode.counters.finished + world.prefill.counters.failed == 5
    assert bool(windowed.decode_runner.num_launched_ahead) == async_scheduling
    assert windowed.prefill.counters.pages_behind_window > 0
    assert windowed.decode.counters.pages_behind_window > 0
    assert whole.prefill.counters.pages_behind_window == whole.decode.counters.pages_behind_window == 0
    assert most == [num_pages_for(window + ATTENTION_BLOCK_TOKENS), num_pages_for(620)]


PROMPTS = st.builds(
    Prompt,
    token_ids=st.builds(tokens_of, st.integers(0, 1000), st.sampled_from([1, 15, 130, 200, 300])),
    max_tokens=st.sampled_from([1, 40, 170, 250]),
    lane_priority=st.integers(0, 2),
    arrives_at=st.integers(0, 8),
    cancelled_at=st.sampled_from([None, None, None, 30, 150]),
    seed=st.integers(0, 2**64 - 1),
    prefix_seed=st.sampled_from([b"", b"seed"]),
)


@st.composite
def pressures(draw: st.DrawFn) -> Pressure:
    preemption = PreemptionSettings(
        after_s=draw(st.sampled_from([0.0, 0.1, 0.5])),
        max_preemptions=draw(st.sampled_from([3, 5, 1, 0])),
        num_swap_slots=draw(st.sampled_from([200, 20, 1, 0])),
    )
    return Pressure(
        prompts=tuple(draw(st.lists(PROMPTS, min_size=2, max_size=6))),
        num_pages=draw(st.sampled_from([35, 40, 60])),
        limits=bounds(
            draw(WINDOWS),
            max_num_seqs=draw(st.sampled_from([6, 4, 2])),
            max_num_batched_tokens=draw(st.sampled_from([200, 64])),
            chunk_tokens=draw(st.sampled_from([200, 64, 7])),
        ),
        join=draw(st.builds(JoinSettings, st.sampled_from(Batching), window_s=st.sampled_from([0.0, 0.3]))),
        preemption=preemption,
        refusal_rate=draw(st.sampled_from([0.0, 0.3])),
        failure_rate=draw(st.sampled_from([0.0, 0.0, 0.01])),
        spoil_rate=draw(st.sampled_from([0.0, 0.5])),
        seed=draw(st.integers(0, 2**32)),
    )


def check_pressed(engine: PressedEngine) -> None:
    for index, prompt in enumerate(engine.pressure.prompts):
        outcome = engine.outcomes[engine.key_of(index)]
        expected = reference_tokens(
            prompt.token_ids,
            SamplingParams(seed=prompt.seed),
            prompt.max_tokens,
            VOCAB_SIZE,
            window=engine.pressure.limits.window,
        )
        (end,) = outcome.ends
        assert outcome.token_ids == expected[: len(outcome.token_ids)]
        if end.reason is FinishReason.LENGTH:
            assert outcome.token_ids == expected
        elif end.failure is not None:
            assert end.failure.reason is FailureReason.NO_CAPACITY or engine.num_failed_steps
    assert engine.free_pages == set(range(engine.pressure.num_pages))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(pressures())
def test_whoever_gives_way_goes_on_with_the_tokens_of_the_request_alone(pressure: Pressure) -> None:
    engine = PressedEngine(pressure)
    engine.run()
    check_pressed(engine)


def crowd(num_swap_slots: int, spoil_rate: float = 0.0) -> Pressure:
    """Six that hold 9 pages each at the most, where 35 are."""
    made = tuple(
        Prompt(tokens_of(seed, 150), 250, 0, 0, None, seed=seed, prefix_seed=b"seed" if seed % 2 else b"")
        for seed in range(6)
    )
    preemption = PreemptionSettings(after_s=0.0, max_preemptions=1000, num_swap_slots=num_swap_slots)
    patient = replace(bounds(16, max_num_seqs=6), max_stall_s=PATIENT_S)
    return Pressure(made, 35, patient, JoinSettings(), preemption, spoil_rate=spoil_rate)


@pytest.mark.parametrize("spoil_rate", [0.0, 0.5], ids=["kept", "spoiled"])
@pytest.mark.parametrize("num_swap_slots", [9, 0], ids=["swapped", "dropped"])
def test_a_sequence_that_has_given_pages_back_is_preempted_and_served_to_the_end(
    num_swap_slots: int, spoil_rate: float
) -> None:
    engine = PressedEngine(crowd(num_swap_slots, spoil_rate if num_swap_slots else 0.0))
    preempted_late: list[int] = []
    plan_out = engine.batcher._preemption._plan_out

    def note(sequence: Sequence) -> None:
        plan_out(sequence)
        if sequence.first_page:
            preempted_late.append(sequence.first_page)
            swapped = engine.batcher._preemption._leaving[-1].copies
            assert swapped is None or len(swapped) == num_pages_for(sequence.num_computed) - sequence.first_page

    engine.batcher._preemption._plan_out = note  # type: ignore[method-assign]
    engine.run()
    check_pressed(engine)
    counters = engine.batcher.counters
    assert counters.finished == 6
    assert len(preempted_late) > 1
    assert counters.pages_behind_window > 0
    assert bool(counters.pages_swapped_in) == bool(num_swap_slots)
    assert bool(counters.swap_failures) == bool(num_swap_slots and spoil_rate)


@pytest.mark.parametrize("num_swap_slots", [9, 0], ids=["swapped", "dropped"])
def test_what_is_to_be_handed_over_is_what_its_record_says(num_swap_slots: int) -> None:
    """Also of one that gave way: whoever takes it over has none of its pages, and begins anew."""
    engine, first_pages = PressedEngine(crowd(num_swap_slots)), set[tuple[bool, bool]]()
    step = engine._step

    def hand_over_and_take_back() -> None:
        step()
        if engine._tick % 10:  # else nobody would ever have waited long enough
            return
        engine.batcher.hand_over(with_preempted=True)
        for ready in engine.batcher.take_events():
            assert isinstance(ready, HandOffReady)
            snapshot = engine.records.open(ready.slot).read()
            assert snapshot is not None
            assert (ready.page_ids, ready.first_page) == (snapshot.held_pages, snapshot.first_page)
            first_pages.add((engine.batcher._sequences[ready.key].is_preempted, ready.first_page > 0))
            engine.batcher.take_back(ready.key)

    engine._step = hand_over_and_take_back  # type: ignore[method-assign]
    engine.run()
    check_pressed(engine)
    assert first_pages == {(False, False), (False, True), (True, False)}


def test_the_row_of_a_static_batch_reads_for_ever_what_it_read_last() -> None:
    """It ends with the token after which it would have given a block back."""
    window = 40
    num_computed = window - 1 + ATTENTION_BLOCK_TOKENS
    short = Prompt(tokens_of(1, 100), num_computed + 1 - 100, 0, 0, None, seed=1, prefix_seed=b"")
    long = Prompt(tokens_of(2, 100), 250, 0, 0, None, seed=2, prefix_seed=b"")
    hold, never = JoinSettings(Batching.STATIC_HOLD), PreemptionSettings(after_s=0.0, max_preemptions=0)
    engine = PressedEngine(Pressure((short, long), 60, bounds(window), hold, never))
    engine.run()
    check_pressed(engine)
    counters = engine.batcher.counters
    assert (counters.finished, counters.pages_behind_window) == (2, 2 * 8)
    assert counters.held_rows_computed > 100
