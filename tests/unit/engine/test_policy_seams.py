"""The engine does what a policy decides, as far as it is possible; nothing is lost when the policy changes."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import pytest
from tests.unit.engine.test_pausing import Crowd
from tests.unit.engine.world import Records, limits, params

from weir.core.life import SchedulingParams
from weir.engine.batching.own_rules import Batching, JoinSettings
from weir.engine.batching.running import RunningBatcher, RunningSettings
from weir.engine.memory.pages import PagePool
from weir.engine.messages import Arrival, PageBundle, SetBounds
from weir.engine.plan import StepResult
from weir.policy.registry import PolicySpec
from weir.policy.seams import BatchView, GateDecision, Policy, StepShare, StepView


@dataclass
class ScriptedGate:
    """Decides what a test sets, and keeps what it saw."""

    decision: GateDecision = field(default_factory=lambda: GateDecision(()))
    seen: list[tuple[list[str], list[str]]] = field(default_factory=list)
    next_deadline_s: float | None = None

    def decide(self, view: BatchView, now_s: float) -> GateDecision:
        self.seen.append(
            ([str(int(m.request_id, 16)) for m in view.waiting], [str(int(m.request_id, 16)) for m in view.running])
        )
        return self.decision


@dataclass
class ScriptedBudget:
    """The same for a step's budget."""

    share: StepShare
    views: list[StepView] = field(default_factory=list)
    durations_s: list[float] = field(default_factory=list)

    def plan(self, view: StepView) -> StepShare:
        self.views.append(view)
        return self.share

    def stepped(self, duration_s: float, share: StepShare) -> None:
        assert share is self.share
        self.durations_s.append(duration_s)


def policy(gate: ScriptedGate | None = None, budget: ScriptedBudget | None = None) -> Policy:
    return replace(PolicySpec("fcfs").make(), name="scripted", gate=gate, step_budget=budget)


def test_a_gate_says_who_joins_in_which_order_and_who_of_the_batch_sits_the_step_out() -> None:
    gate = ScriptedGate(GateDecision((2, 0)))
    crowd = Crowd(policy=policy(gate))
    for slot in range(4):
        crowd.add(slot)
    assert crowd.steps() == [[0, 2]]
    gate.decision = GateDecision((0,), paused=(1,))
    assert crowd.steps() == [[0, 1]], "2 is paused for 1, and three are in the batch"
    assert gate.seen == [(["0", "1", "2", "3"], []), (["1", "3"], ["0", "2"])]
    gate.decision = GateDecision((), paused=(0,))
    assert crowd.steps() == [[1, 2]]
    assert crowd.batcher.counters.policy_defects == 0


def test_a_gate_may_hold_all_back_and_says_when_to_ask_again() -> None:
    gate = ScriptedGate(next_deadline_s=7.5)
    crowd = Crowd(policy=policy(gate))
    crowd.add(0)
    assert crowd.steps() == [[]]
    assert crowd.batcher.next_deadline_s == 7.5


def test_no_gate_has_more_computed_than_a_step_may_have_nor_more_than_twice_as_many_join() -> None:
    gate = ScriptedGate(GateDecision((0, 1, 2)))
    crowd = Crowd(policy=policy(gate))
    for slot in range(7):
        crowd.add(slot)
    assert crowd.steps() == [[0, 1]]
    gate.decision = GateDecision((0, 1, 2), paused=(0, 1))
    assert crowd.steps() == [[2, 3]]
    gate.decision = GateDecision((0, 1), paused=(0, 1, 2, 3))
    assert crowd.steps() == [[]], "four are in, twice as many as a step has"


@pytest.mark.parametrize("decision", [GateDecision((5,)), GateDecision((0, 0)), GateDecision((), paused=(9,))])
def test_a_gate_that_says_what_cannot_be_is_not_followed_and_counted(decision: GateDecision) -> None:
    crowd = Crowd(policy=policy(ScriptedGate(decision)))
    for slot in range(2):
        crowd.add(slot)
    assert crowd.steps() == [[0, 1]]
    assert crowd.batcher.counters.policy_defects == 1


def test_for_an_urgent_hand_off_others_are_paused_under_a_gate_too() -> None:
    gate = ScriptedGate(GateDecision((0, 1)))
    crowd = Crowd(policy=policy(gate))
    crowd.add(0)
    crowd.add(1)
    crowd.steps()
    gate.decision = GateDecision(())
    crowd.add(2, lane=1)
    assert crowd.steps() == [[0, 2]]


def local(budget: ScriptedBudget, num_decoding: int = 2, num_pages: int = 40) -> RunningBatcher:
    """`num_decoding` sequences that decode, and then a prompt of 50 tokens and one of 10."""
    pool = PagePool(watermark_pages=0, watermark_slots=0)
    pool.give(PageBundle(tuple(range(num_pages)), tuple(range(8))))
    batcher = RunningBatcher(
        limits(max_num_batched_tokens=40), pool, Records(40, 8).open, RunningSettings(num_arena_pages=80)
    )
    for index in range(num_decoding):
        batcher.add(
            Arrival(replace(params((1, 2, 3), index, max_tokens=90), scheduling=SchedulingParams(itl_target_ms=250)))
        )
    step(batcher, 1.0)
    for index, num_tokens in ((8, 50), (9, 10)):
        batcher.add(Arrival(params(tuple(range(num_tokens)), index, max_tokens=90)))
    batcher.set_policy(policy(budget=budget))
    return batcher


def step(batcher: RunningBatcher, now_s: float) -> list[tuple[int, int]]:
    """(sequence, tokens) of each chunk."""
    plan = batcher.decide(now_s)
    if plan is None:
        return []
    owners = [int(owner.key.request_id, 16) for owner in batcher._steps.owners(plan) if owner is not None]
    batcher.record(plan, StepResult({chunk.slot: 7 for chunk in plan.chunks if chunk.sample}), now_s + 0.5)
    return [(owner, len(chunk.token_ids)) for owner, chunk in zip(owners, plan.chunks, strict=True)]


@pytest.mark.parametrize(
    ("decodes", "num_prefill_tokens", "expected"),
    [
        ((0, 1), 38, [(0, 1), (1, 1), (8, 32), (9, 6)]),
        ((1,), 20, [(1, 1), (8, 20)]),
        ((), 40, [(8, 32), (9, 8)]),
        ((1, 0), 0, [(0, 1), (1, 1)]),
    ],
)
def test_a_step_budget_says_which_decodes_run_and_how_many_prompt_tokens(
    decodes: Seq[int], num_prefill_tokens: int, expected: list[tuple[int, int]]
) -> None:
    budget = ScriptedBudget(StepShare(decodes, num_prefill_tokens))
    batcher = local(budget)
    assert step(batcher, 2.0) == expected
    assert budget.durations_s == [0.5]
    (view,) = budget.views
    assert (view.now_s, view.max_tokens) == (2.0, 40)
    assert [d.num_context_tokens for d in view.decodes] == [4, 4]
    assert [(d.last_token_at_s, d.itl_target_s) for d in view.decodes] == [(1.5, 0.25)] * 2
    assert view.prefills == [50, 10]
    assert view.page_use == (1 + 1 + 4 + 1) / 80
    assert view.num_free_tokens == (80 - 7) * 16


@pytest.mark.parametrize(
    "share",
    [StepShare((2,), 10), StepShare((0, 0), 10), StepShare((0,), 40), StepShare((0,), -1), StepShare((), 0)],
    ids=["no such decode", "twice", "over the step", "below nothing", "nothing"],
)
def test_a_budget_that_says_what_cannot_be_is_not_followed_and_counted(share: StepShare) -> None:
    budget = ScriptedBudget(share)
    batcher = local(budget)
    assert step(batcher, 2.0) == [(0, 1), (1, 1), (8, 32), (9, 6)]
    assert batcher.counters.policy_defects == 1
    assert budget.durations_s == [], "its step did not run"


def test_decodes_in_place_of_prompts_that_lack_pages_keep_to_the_step_and_teach_the_budget_nothing() -> None:
    budget = ScriptedBudget(StepShare((), 40))
    batcher = local(budget, num_decoding=3, num_pages=5)
    assert step(batcher, 2.0) == [(8, 32)], "it has taken the last pages"
    batcher.set_bounds(SetBounds(8, 2))
    budget.share = StepShare((), 2)
    assert step(batcher, 3.0) == [(0, 1), (1, 1)]
    assert budget.durations_s == [0.5], "of the step that it planned"
    assert batcher.counters.policy_defects == 0


def test_a_step_that_failed_is_not_reported_to_the_budget_as_one_that_ran() -> None:
    budget = ScriptedBudget(StepShare((0, 1), 20))
    batcher = local(budget)
    assert batcher.decide(2.0) is not None
    assert step(batcher, 3.0)
    assert budget.durations_s == [0.5]


def test_the_policy_changes_between_steps_and_everybody_goes_on() -> None:
    gate = ScriptedGate(GateDecision((0, 1)))
    crowd = Crowd(policy=policy(gate))
    for slot in range(4):
        crowd.add(slot)
    crowd.steps()
    gate.decision = GateDecision((0, 1), paused=(0, 1))
    assert crowd.steps() == [[2, 3]]
    crowd.batcher.set_policy(PolicySpec("fcfs").make())
    assert crowd.steps() == [[0, 1]], "four are in a batch of two: the first ones are computed"
    crowd.end(0)
    crowd.end(1)
    assert crowd.steps() == [[2, 3]]


def test_a_policy_without_a_gate_leaves_a_static_batch_static() -> None:
    crowd = Crowd(RunningSettings(join=JoinSettings(Batching.STATIC)), policy=PolicySpec("fcfs").make())
    crowd.add(0)
    crowd.steps()
    crowd.add(1)
    assert crowd.steps() == [[0]]
