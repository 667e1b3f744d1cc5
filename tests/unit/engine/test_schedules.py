"""Random schedules through both engines: whatever happens, tokens are those of the request alone."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.engine.world import MAX_CONTEXT_TOKENS, VOCAB_SIZE, Outcome, Request, Schedule, World, limits

from weir.core.life import Attempt, FinishReason
from weir.core.sampling import SamplingParams
from weir.engine.messages import SequenceKey
from weir.kv.geometry import num_pages_for
from weir.testing.runner import reference_tokens

TOKEN_IDS = st.integers(0, VOCAB_SIZE - 1)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    num_prompt_tokens = draw(st.integers(1, 100))
    max_tokens = draw(st.integers(1, 40))
    arrives_at = draw(st.integers(0, 30))
    needed = num_pages_for(min(num_prompt_tokens + max_tokens, MAX_CONTEXT_TOKENS))
    return Request(
        prompt_token_ids=tuple(draw(st.lists(TOKEN_IDS, min_size=num_prompt_tokens, max_size=num_prompt_tokens))),
        max_tokens=max_tokens,
        stop_token_ids=tuple(draw(st.lists(TOKEN_IDS, max_size=2))),
        seed=draw(st.integers(0, 2**64 - 1)),
        arrives_at=arrives_at,
        cancelled_at=draw(st.none() | st.integers(arrives_at, arrives_at + 60)),
        num_reserved_pages=draw(st.just(needed) | st.integers(num_pages_for(num_prompt_tokens), needed)),
    )


SCHEDULES = st.builds(
    Schedule,
    requests=st.lists(requests(), min_size=1, max_size=10).map(tuple),
    num_pages=st.integers(4, 60),
    num_slots=st.integers(1, 12),
    prefill_limits=st.builds(
        limits,
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.integers(1, 128),
        chunk_tokens=st.sampled_from([1, 7, 16, 64]),
        max_kept_ends=st.integers(0, 3),
    ),
    decode_limits=st.builds(
        limits,
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.integers(1, 8),
        max_kept_ends=st.integers(0, 3),
    ),
    watermark_pages=st.integers(0, 4),
    seed=st.integers(0, 2**32),
)


def reference(request: Request) -> tuple[list[int], FinishReason]:
    """Tokens and end of a request that runs alone and without bounds."""
    num_tokens = min(request.max_tokens, MAX_CONTEXT_TOKENS - len(request.prompt_token_ids))
    params = SamplingParams(temperature=0.0, seed=request.seed)
    token_ids = reference_tokens(request.prompt_token_ids, params, num_tokens, VOCAB_SIZE)
    stops = [index for index, token_id in enumerate(token_ids) if token_id in request.stop_token_ids]
    return (token_ids[: stops[0] + 1], FinishReason.STOP) if stops else (token_ids, FinishReason.LENGTH)


def check(request: Request, outcome: Outcome) -> None:
    token_ids, reason = reference(request)
    assert len(outcome.ends) == 1
    end = outcome.ends[0]
    assert outcome.token_ids == token_ids[: len(outcome.token_ids)]
    if end.failure is None and end.reason is not FinishReason.CANCELLED:
        assert (outcome.token_ids, end.reason) == (token_ids, reason)
    if end.reason is FinishReason.CANCELLED:
        assert request.cancelled_at is not None


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(SCHEDULES, st.booleans())
def test_tokens_do_not_depend_on_the_schedule_and_nothing_leaks(schedule: Schedule, async_scheduling: bool) -> None:
    world = World(schedule, async_scheduling=async_scheduling)
    world.run()
    for index, request in enumerate(schedule.requests):
        check(request, world.outcomes[SequenceKey(f"{index:032x}", Attempt())])
    assert world.free_pages == set(range(schedule.num_pages))
    assert world.free_slots == set(range(schedule.num_slots))
    prefill, decode = world.prefill.counters, world.decode.counters
    assert decode.prompt_tokens_computed == decode.prefill_steps == 0
    assert prefill.output_tokens_computed == prefill.decode_steps == 0
    assert prefill.handed_off == decode.taken_over
    assert prefill.page_fingerprint == decode.page_fingerprint


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_an_ample_arena_serves_every_request_to_its_end(async_scheduling: bool) -> None:
    """The property above would hold for an engine that fails everything."""
    made = tuple(
        Request(
            tuple(range(length)), max_tokens, (), seed=length, arrives_at=0, cancelled_at=None, num_reserved_pages=10
        )
        for length, max_tokens in [(1, 1), (5, 20), (16, 17), (17, 1), (48, 30), (33, 16)]
    )
    schedule = Schedule(made, 200, 12, limits(), limits(), watermark_pages=2, seed=3)
    world = World(schedule, async_scheduling=async_scheduling)
    world.run()
    refused = world.prefill.counters.failed
    assert bool(world.decode_runner.num_launched_ahead) == async_scheduling
    assert world.prefill.counters.finished == 2
    assert world.decode.counters.finished == 4 - refused
    assert refused <= 1
