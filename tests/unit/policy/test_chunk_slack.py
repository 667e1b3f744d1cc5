"""What the slack of decodes leaves for prompts, where the general cases say nothing."""

from weir.policy.dynamic_chunk import DynamicChunk
from weir.policy.registry import PolicySpec
from weir.policy.seams import Decode, StepShare, StepView


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
