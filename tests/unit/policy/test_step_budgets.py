"""Each step budget's own rule, on cases small enough to work out by hand."""

from dataclasses import replace

import pytest

from weir.core.cost import StepCost
from weir.policy.hybrid import DynamicChunk
from weir.policy.registry import PolicySpec
from weir.policy.seams import Decode, StepBudget, StepShare, StepView
from weir.policy.step_budgets import LastSchedulableTime, SlaiParams


def view(
    decodes: list[Decode], prompts: list[int], max_tokens: int = 512, *, page_use: float = 0.5, free: int = 10**6
) -> StepView:
    return StepView(100.0, max_tokens, decodes, prompts, page_use, free)


def token_at(last_token_at_s: float, itl_target_s: float = 0.0) -> Decode:
    return Decode(1000, last_token_at_s, itl_target_s)


def after_steps(budget: StepBudget, duration_s: float) -> StepBudget:
    for _ in range(4):
        budget.stepped(duration_s, StepShare((), 0))
    return budget


def test_slai_runs_decodes_at_their_last_schedulable_time_and_not_before_prompts() -> None:
    """Steps of 20 ms, offset 5: due 0.2 - 5 * 0.02 = 0.1 s after the last token. 99.89 was due, 99.91 is not yet."""
    budget = after_steps(LastSchedulableTime(SlaiParams()), 0.02)
    share = budget.plan(view([token_at(99.91), token_at(99.89)], [9000]))
    assert (list(share.decodes), share.num_prefill_tokens) == ([1], 511)


def test_slai_gives_what_prompts_leave_to_the_most_urgent_decodes() -> None:
    """Room for two beside 510 prompt tokens; a target of its own makes the last the most urgent."""
    budget = after_steps(LastSchedulableTime(SlaiParams()), 0.02)
    decodes = [token_at(99.95), token_at(99.96), token_at(99.99, itl_target_s=0.115)]
    share = budget.plan(view(decodes, [510]))
    assert (list(share.decodes), share.num_prefill_tokens) == ([0, 2], 510)


def test_slai_runs_decodes_earlier_when_pages_are_short() -> None:
    """At 96 % the offset is 10 steps: 0.2 - 10 * 0.02 = 0, so all are due."""
    budget = after_steps(LastSchedulableTime(SlaiParams()), 0.02)
    decodes = [token_at(100.0), token_at(99.95)]
    assert list(budget.plan(view(decodes, [9000], page_use=0.96)).decodes) == [0, 1]
    assert list(budget.plan(view(decodes, [9000], page_use=0.95)).decodes) == []


def test_slai_never_runs_more_decodes_than_a_step_has_tokens() -> None:
    """Three are due, two fit: the most urgent ones, and nothing is left for prompts."""
    budget = LastSchedulableTime(SlaiParams())
    share = budget.plan(view([token_at(99.5), token_at(99.7), token_at(99.6)], [9000], max_tokens=2))
    assert (list(share.decodes), share.num_prefill_tokens) == ([0, 2], 0)


def learned(default_itl_s: float = 0.2) -> DynamicChunk:
    """Has seen that a step takes 5 ms and 0.1 ms a prompt token."""
    budget = DynamicChunk(default_itl_s)
    for number in range(4000):
        share = StepShare((), 128 * (number % 16))
        budget.stepped(0.005 + 0.0001 * share.num_prefill_tokens, share)
    return budget


def test_chunks_are_as_large_as_the_slack_allows() -> None:
    """Slack 60 ms: 1.2 * (5 + 0.1 * tokens) <= 60 up to 450 tokens, of which the grid has 384."""
    decodes = [Decode(0, 99.86, 0.0), Decode(0, 99.96, 0.0)]
    share = learned().plan(view(decodes, [9000], 4096))
    assert (list(share.decodes), share.num_prefill_tokens) == ([0, 1], 384 - 2)


def test_without_decodes_beside_it_a_chunk_is_as_large_as_they_get() -> None:
    assert learned().plan(view([], [9000], 4096)).num_prefill_tokens == 2552
    assert learned().plan(view([], [9000], 1000)).num_prefill_tokens == 1000


def test_chunks_are_small_while_pages_are_short_and_never_nothing() -> None:
    assert learned().plan(view([], [9000], 4096, free=31_999)).num_prefill_tokens == 512
    assert learned().plan(view([token_at(90.0)], [9000], 4096)).num_prefill_tokens == 127


def test_the_first_chunks_are_not_those_of_a_faster_machine() -> None:
    """Slack 100 ms: by the worker's 8 ms and 1 ms a token too little for 256, by an A100's enough for 768."""
    decodes = [Decode(0, 99.9, 0.0)]
    cost = StepCost(8.0, 0.9, 0.1 / 256, 0.5, 0.0)
    assert DynamicChunk(0.2).plan(view(decodes, [9000], 4096)).num_prefill_tokens == 768 - 1
    assert DynamicChunk(0.2).plan(replace(view(decodes, [9000], 4096), cost=cost)).num_prefill_tokens == 128 - 1
    slower = learned()
    slower.plan(replace(view([], [9000], 4096), cost=cost))
    assert slower.plan(replace(view(decodes, [9000], 4096), cost=cost)).num_prefill_tokens == 128 - 1, (
        "once it is known"
    )


@pytest.mark.parametrize(
    ("name", "num_prefill_tokens", "num_decodes"), [("prefill-first", 510, 2), ("unchunked", 300, 3)]
)
def test_baselines_put_prompts_before_decodes(name: str, num_prefill_tokens: int, num_decodes: int) -> None:
    """Of prompts with 300 and 210 tokens beside three decodes in 512, the second does not fit whole."""
    budget = PolicySpec(name).make().step_budget
    assert budget is not None
    share = budget.plan(view([token_at(99.0)] * 3, [300, 210]))
    assert (share.num_prefill_tokens, len(share.decodes)) == (num_prefill_tokens, num_decodes)


def test_unchunked_computes_a_long_prompt_at_once_and_decodes_wait() -> None:
    budget = PolicySpec("unchunked").make().step_budget
    assert budget is not None
    share = budget.plan(view([token_at(99.0)] * 3, [512]))
    assert (share.num_prefill_tokens, len(share.decodes)) == (512, 0)


def chunk_beside(decodes: list[Decode]) -> int:
    """By a budget that has seen that a step takes 5 ms and 0.1 ms a prompt token."""
    budget = DynamicChunk(0.2)
    for number in range(4000):
        share = StepShare((), 128 * (number % 16))
        budget.stepped(0.005 + 0.0001 * share.num_prefill_tokens, share)
    return budget.plan(StepView(100.0, 4096, decodes, [9000], 0.5, 10**6)).num_prefill_tokens


def test_the_most_urgent_decode_says_how_large_a_chunk_is_wherever_it_stands() -> None:
    urgent, patient = Decode(0, 99.86, 0.0), Decode(0, 99.99, 0.0)
    assert chunk_beside([urgent, patient]) == chunk_beside([patient, urgent]) == 384 - 2


def test_a_target_of_its_own_goes_before_the_default() -> None:
    """Due in 60 ms by a target of 200 ms, in 260 ms by one of 400 ms: 1.2 * (5 + 0.1 * 2,048) are within that."""
    assert chunk_beside([Decode(0, 99.86, 0.0)]) == 384 - 1
    assert chunk_beside([Decode(0, 99.86, 0.4)]) == 2048 - 1


def test_prompts_do_not_starve_beside_more_decodes_than_the_smallest_step_has() -> None:
    assert chunk_beside([Decode(0, 90.0, 0.0)] * 200) == 1


def test_the_hybrid_without_dynamic_chunks_leaves_the_step_to_the_batcher() -> None:
    assert PolicySpec("hybrid", {"dynamic_chunk": 0}).make().step_budget is None
