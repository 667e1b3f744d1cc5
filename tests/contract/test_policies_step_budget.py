"""One contract over the step budgets of all policies that have one."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract.opcodes import num_opcodes

from weir.policy.registry import PolicySpec, policy_names
from weir.policy.seams import Decode, StepBudget, StepShare, StepView

BUDGETS = ("hybrid", "slai", "prefill-first", "unchunked")
every_budget = pytest.mark.parametrize("name", BUDGETS)


def make_budget(name: str) -> StepBudget:
    budget = PolicySpec(name).make().step_budget
    assert budget is not None
    return budget


def test_every_policy_with_a_step_budget_is_under_this_contract() -> None:
    assert {name for name in policy_names() if PolicySpec(name).make().step_budget is not None} == set(BUDGETS)


@st.composite
def views(draw: st.DrawFn) -> StepView:
    decodes = draw(
        st.lists(
            st.builds(
                Decode,
                num_context_tokens=st.integers(1, 5000),
                last_token_at_s=st.floats(90, 100),
                itl_target_s=st.sampled_from([0.0, 0.02, 1.0]),
            ),
            max_size=20,
        )
    )
    prefills = draw(st.lists(st.integers(2, 4000), max_size=5))
    max_tokens = draw(st.sampled_from([1, 7, 64, 512, 2048]))
    page_use, num_free_tokens = draw(st.sampled_from([(0.1, 100_000), (0.99, 100), (0.5, 20_000)]))
    return StepView(100.0, max_tokens, decodes, prefills, page_use, num_free_tokens)


def check(share: StepShare, view: StepView) -> None:
    decodes = list(share.decodes)
    assert len(set(decodes)) == len(decodes)
    assert set(decodes) <= set(range(len(view.decodes)))
    assert 0 <= share.num_prefill_tokens <= sum(view.prefills)
    assert len(decodes) + share.num_prefill_tokens <= view.max_tokens
    if view.decodes or view.prefills:
        assert len(decodes) + share.num_prefill_tokens > 0


@every_budget
@given(seen=st.lists(views(), max_size=6), view=views(), durations_s=st.lists(st.floats(0.001, 2), min_size=6))
@settings(max_examples=60, deadline=None)
def test_a_step_is_within_its_budget_and_never_empty(
    name: str, seen: list[StepView], view: StepView, durations_s: list[float]
) -> None:
    one, other = make_budget(name), make_budget(name)
    for budget in (one, other):
        for earlier, duration_s in zip(seen, durations_s, strict=False):
            share = budget.plan(earlier)
            check(share, earlier)
            budget.stepped(duration_s, share)
    share = one.plan(view)
    check(share, view)
    assert share == other.plan(view)


@dataclass(slots=True)
class Run:
    """Prompts and answers of one batch, computed as a budget decides, until all have ended."""

    prompts: list[int]
    answers: list[int]
    now_s: float = 0.0
    last_token_at_s: list[float] = field(default_factory=list)
    num_steps: int = 0

    def finish(self, budget: StepBudget, max_tokens: int) -> None:
        self.last_token_at_s = [0.0] * len(self.prompts)
        while any(self.answers):
            decoding = [i for i, left in enumerate(self.prompts) if left == 0 and self.answers[i] > 0]
            prefilling = [i for i, left in enumerate(self.prompts) if left > 0]
            view = StepView(
                self.now_s,
                max_tokens,
                [Decode(100, self.last_token_at_s[i], 0.05) for i in decoding],
                [self.prompts[i] for i in prefilling],
                0.5,
                100_000,
            )
            share = budget.plan(view)
            check(share, view)
            self._compute(share, decoding, prefilling)
            budget.stepped(0.02, share)
            assert self.num_steps < 5000, "somebody starves"

    def _compute(self, share: StepShare, decoding: list[int], prefilling: list[int]) -> None:
        self.now_s += 0.02
        self.num_steps += 1
        for index in share.decodes:
            self.answers[decoding[index]] -= 1
            self.last_token_at_s[decoding[index]] = self.now_s
        num_left = share.num_prefill_tokens
        for index in prefilling:
            num_tokens = min(num_left, self.prompts[index])
            self.prompts[index] -= num_tokens
            num_left -= num_tokens
            if self.prompts[index] == 0:
                self.last_token_at_s[index] = self.now_s


@every_budget
@given(
    sizes=st.lists(st.tuples(st.integers(2, 3000), st.integers(1, 60)), min_size=1, max_size=20),
    max_tokens=st.sampled_from([8, 64, 512]),
)
@settings(max_examples=15, deadline=None)
def test_every_prompt_is_prefilled_and_every_answer_decoded(
    name: str, sizes: list[tuple[int, int]], max_tokens: int
) -> None:
    prompts, answers = (list(column) for column in zip(*sizes, strict=True))
    num_tokens = sum(prompts) + sum(answers)
    run = Run(prompts, answers)
    run.finish(make_budget(name), max_tokens)
    assert run.num_steps <= num_tokens


@every_budget
def test_a_plan_looks_at_each_sequence_a_bounded_number_of_times(name: str) -> None:
    def cost(size: int) -> int:
        budget = make_budget(name)
        decodes = [Decode(100 + n, 9.0 + n % 10 / 10, 0.05) for n in range(size)]
        view = StepView(10.0, 10 * size, decodes, [300] * (size // 10), 0.5, 100_000)
        return num_opcodes(lambda: budget.plan(view))

    assert cost(1000) < 12 * cost(100)
