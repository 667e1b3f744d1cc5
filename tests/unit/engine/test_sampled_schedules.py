"""P1 with every sampling parameter: a request's tokens are those of the request alone, through both engines."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.engine.world import VOCAB_SIZE, Outcome, Request, Schedule, World, limits, params

from weir.core.life import Attempt
from weir.core.sampling import SamplingParams
from weir.engine.messages import Arrival, SequenceKey
from weir.engine.plan import StepPlan, StepResult
from weir.engine.recording import StepDefect, check_result
from weir.engine.sequence import Sequence
from weir.testing.runner import reference_tokens

TOKEN_IDS = st.integers(0, VOCAB_SIZE - 1)
SAMPLINGS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 1.0]),
    logit_bias=st.sampled_from([(), ((3, 4.0), (7, -100.0))]),
    logprobs=st.none() | st.integers(0, 3),
    prompt_logprobs=st.none() | st.integers(0, 2),
)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    num_prompt_tokens = draw(st.integers(1, 50))
    max_tokens = draw(st.integers(1, 25))
    return Request(
        prompt_token_ids=tuple(draw(st.lists(TOKEN_IDS, min_size=num_prompt_tokens, max_size=num_prompt_tokens))),
        max_tokens=max_tokens,
        stop_token_ids=tuple(draw(st.lists(TOKEN_IDS, max_size=5, unique=True))),
        seed=draw(st.integers(0, 2**64 - 1)),
        arrives_at=draw(st.integers(0, 10)),
        cancelled_at=None,
        num_reserved_pages=5,
        sampling=draw(SAMPLINGS),
        min_tokens=draw(st.integers(0, max_tokens)),
    )


def reference(request: Request) -> list[int]:
    sampling = params((1,), sampling=request.sampling, seed=request.seed).sampling
    token_ids = reference_tokens(
        request.prompt_token_ids,
        sampling,
        request.max_tokens,
        VOCAB_SIZE,
        stop_token_ids=request.stop_token_ids,
        min_tokens=request.min_tokens,
    )
    stops = [index for index, token_id in enumerate(token_ids) if token_id in request.stop_token_ids]
    assert not stops or stops[0] >= request.min_tokens
    return token_ids[: stops[0] + 1] if stops else token_ids


def check(request: Request, outcome: Outcome) -> None:
    (end,) = outcome.ends
    expected = reference(request)
    if end.failure is None:
        assert outcome.token_ids == expected
        check_prompt(request, outcome)
    assert outcome.token_ids == expected[: len(outcome.token_ids)]
    if request.sampling.logprobs is not None:
        assert [entry.token_id for entry in outcome.logprobs] == outcome.token_ids
        assert {len(entry.top) for entry in outcome.logprobs} <= {request.sampling.logprobs}


def check_prompt(request: Request, outcome: Outcome) -> None:
    if request.sampling.prompt_logprobs is None:
        assert outcome.prompt_logprobs == []
        return
    assert tuple(entry.token_id for entry in outcome.prompt_logprobs) == request.prompt_token_ids[1:]
    assert {len(entry.top) for entry in outcome.prompt_logprobs} <= {request.sampling.prompt_logprobs}


SCHEDULES = st.builds(
    Schedule,
    requests=st.lists(requests(), min_size=1, max_size=8).map(tuple),
    num_pages=st.integers(8, 60),
    num_slots=st.integers(2, 12),
    prefill_limits=st.builds(
        limits,
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.integers(1, 128),
        chunk_tokens=st.sampled_from([1, 7, 64]),
    ),
    decode_limits=st.builds(limits, max_num_seqs=st.integers(1, 6), max_num_batched_tokens=st.integers(1, 8)),
    watermark_pages=st.integers(0, 4),
    seed=st.integers(0, 2**32),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(SCHEDULES, st.booleans())
def test_tokens_do_not_depend_on_the_schedule(schedule: Schedule, async_scheduling: bool) -> None:
    world = World(schedule, async_scheduling=async_scheduling)
    world.run()
    for index, request in enumerate(schedule.requests):
        check(request, world.outcomes[SequenceKey(f"{index:032x}", Attempt())])


def test_a_penalised_request_draws_the_same_alone_and_among_32_others() -> None:
    sampling = SamplingParams(
        0.8, top_p=0.9, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5, logit_bias=((9, 2.0),)
    )
    others = [SamplingParams(1.0, top_k=5), SamplingParams(0.0, frequency_penalty=1.0), SamplingParams(1.5, min_p=0.05)]
    made = tuple(
        Request(
            tuple((number * 7 + place) % VOCAB_SIZE for place in range(20 + number)),
            max_tokens=30,
            stop_token_ids=(),
            seed=number,
            arrives_at=number % 4,
            cancelled_at=None,
            num_reserved_pages=10,
            sampling=sampling if number == 16 else others[number % 3],
        )
        for number in range(33)
    )
    wide = {"max_num_seqs": 33, "max_num_batched_tokens": 64, "chunk_tokens": 16}
    among, alone = (
        World(Schedule(chosen, 400, 40, limits(**wide), limits(**wide), watermark_pages=2, seed=5))
        for chosen in (made, made[16:17])
    )
    among.run()
    alone.run()
    (tokens,) = (outcome.token_ids for outcome in alone.outcomes.values())
    assert tokens == among.outcomes[SequenceKey(f"{16:032x}", Attempt())].token_ids
    assert len(tokens) == 30
    assert tokens == reference(made[16])
    for number, request in enumerate(made):
        check(request, among.outcomes[SequenceKey(f"{number:032x}", Attempt())])


def sequence_of(sampling: SamplingParams, num_prompt_tokens: int = 5) -> Sequence:
    return Sequence.of_arrival(
        Arrival(params(tuple(range(num_prompt_tokens)), sampling=sampling), slot=3, block_table=(1,))
    )


@pytest.mark.parametrize(
    ("sampling", "result", "problem"),
    [
        (SamplingParams(logprobs=0), StepResult({3: 1}), "the sampled token has no log-probability"),
        (SamplingParams(prompt_logprobs=0), StepResult({3: 1}), "0 of 4 tokens of the prompt were scored"),
        (SamplingParams(), StepResult({3: VOCAB_SIZE}), "sampled 50, the vocabulary has 50"),
        (SamplingParams(), StepResult({}), "sampled None"),
    ],
    ids=["no logprobs", "no scores", "no token of the vocabulary", "no token"],
)
def test_a_result_that_lacks_what_was_planned_is_a_defect(
    sampling: SamplingParams, result: StepResult, problem: str
) -> None:
    sequence = sequence_of(sampling)
    chunk = sequence.plan_chunk(64)
    step = StepPlan(1, (chunk,))
    with pytest.raises(StepDefect, match=f"slot 3: {problem}"):
        check_result(step, result, VOCAB_SIZE)
