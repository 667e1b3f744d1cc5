"""A worker's own rules of batching: when waiting sequences join, and prefill batches; alone, and in an engine."""

import pytest
from tests.unit.engine.pressure import PressedEngine, Pressure, Prompt
from tests.unit.engine.world import MAX_CONTEXT_TOKENS, VOCAB_SIZE, Records, limits, params

from weir.core.clock import ManualClock
from weir.core.life import FinishReason
from weir.engine.batching.batcher import BatchLimits
from weir.engine.batching.own_rules import (
    Batching,
    DynamicGate,
    JoinSettings,
    PrefillBatches,
    PrefillBatchSettings,
    PrefillPhase,
    StaticGate,
    make_gate,
)
from weir.engine.batching.running import RunningBatcher, RunningSettings
from weir.engine.memory.pages import PagePool
from weir.engine.memory.preemption import PreemptionSettings
from weir.engine.messages import Arrival, PageBundle, SequenceEnded, TokenSampled
from weir.policy.registry import PolicySpec
from weir.policy.seams import BatchView, Decode, Gate, Member, StepView
from weir.testing.runner import HashRunner, reference_tokens

MEMBER = Member("a", 100, 0, 0.0)


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
    bounds = BatchLimits(max_num_seqs, 64, 64, MAX_CONTEXT_TOKENS, VOCAB_SIZE, max_stall_s=1e6)
    settings = JoinSettings(batching, window_s=0.5)
    engine = PressedEngine(Pressure(prompts, 40, bounds, settings, PreemptionSettings()))
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


def gate_view(num_waiting: int, num_running: int) -> BatchView:
    return BatchView([MEMBER] * num_waiting, [MEMBER] * num_running, 4, num_pool_tokens=999, num_free_tokens=999)


def step_view(num_decodes: int, *prompts: int, now_s: float = 0.0) -> StepView:
    decodes = [Decode(100, 0.0, 0.0)] * num_decodes
    return StepView(now_s, 512, decodes, prompts, page_use=0.5, num_free_tokens=999)


def switched(**changes: float) -> PrefillBatches:
    """Has seen 400 prompt tokens and one short answer, and prefills a batch."""
    mode = PrefillBatches(PrefillBatchSettings(**changes))  # type: ignore[arg-type]
    mode.decide(gate_view(1, 0), 0.0)
    mode.plan(step_view(0, 400))
    mode.ended(5)
    mode.decide(gate_view(1, 0), 0.1)
    assert mode.phase is PrefillPhase.PREFILL
    return mode


def test_it_begins_only_with_many_prompt_tokens_and_short_answers() -> None:
    for num_decodes, num_output, phase in (
        (10, 5, PrefillPhase.PREFILL),
        (60, 5, PrefillPhase.MIXED),
        (10, 40, PrefillPhase.MIXED),
    ):
        mode = PrefillBatches(PrefillBatchSettings())
        mode.decide(gate_view(1, 0), 0.0)
        share = mode.plan(step_view(num_decodes, 400))
        assert (len(share.decodes), share.num_prefill_tokens) == (num_decodes, 400), "mixed at first"
        mode.ended(num_output)
        mode.decide(gate_view(1, 0), 0.1)
        assert mode.phase is phase


def test_a_prefill_phase_computes_prompts_alone_and_a_decode_phase_lets_nobody_join() -> None:
    mode = switched()
    assert list(mode.decide(gate_view(2, 1), 0.2).joining) == [0, 1]
    share = mode.plan(step_view(3, 100))
    assert (len(share.decodes), share.num_prefill_tokens) == (0, 100)
    share = mode.plan(step_view(3))
    assert (len(share.decodes), share.num_prefill_tokens) == (3, 0)
    assert list(mode.decide(gate_view(2, 3), 0.3).joining) == []
    assert list(mode.decide(gate_view(2, 0), 0.4).joining) == [0, 1], "the batch has ended"
    assert mode.phase is PrefillPhase.PREFILL


def test_a_batch_of_prompts_is_bounded() -> None:
    mode = switched(max_batch_tokens=300)
    mode.plan(step_view(0, 200))
    assert list(mode.decide(gate_view(1, 1), 0.2).joining) == [0]
    mode.plan(step_view(1, 200))
    assert list(mode.decide(gate_view(1, 2), 0.3).joining) == []


def test_it_ends_below_the_lower_share_and_not_before() -> None:
    mode = switched()
    mode.plan(step_view(0))
    for now_s, num_decodes, phase in ((0.2, 60, PrefillPhase.DECODE), (0.3, 50, PrefillPhase.MIXED)):
        mode.plan(step_view(num_decodes, now_s=now_s))
        mode.decide(gate_view(0, 60), now_s)
        assert mode.phase is phase, "0.87, then 0.78 of the tokens are prompts'"


def test_what_is_older_than_the_window_does_not_count() -> None:
    mode = switched(window_s=1.0)
    mode.plan(step_view(9, now_s=2.0))
    mode.decide(gate_view(0, 9), 2.0)
    assert mode.phase is PrefillPhase.MIXED


@pytest.mark.parametrize("changes", [{"leave_share": 0.95}, {"enter_share": 1.1}, {"window_s": 0.0}])
def test_settings_that_make_no_sense_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        PrefillBatchSettings(**changes)  # type: ignore[arg-type]


def local(settings: RunningSettings) -> RunningBatcher:
    pool = PagePool(watermark_pages=0, watermark_slots=0)
    pool.give(PageBundle(tuple(range(80)), tuple(range(20))))
    return RunningBatcher(limits(max_num_seqs=4), pool, Records(80, 20).open, settings)


def shapes(batcher: RunningBatcher, number: int) -> tuple[list[tuple[int, int]], dict[str, list[int]]]:
    """(decodes, prompt tokens) of each step that serves so many prompts, and the tokens of each sequence."""
    runner, steps = HashRunner(80, VOCAB_SIZE), []
    tokens: dict[str, list[int]] = {}
    for index in range(number):
        batcher.add(Arrival(params(tuple(range(index, index + 60)), index, max_tokens=3)))
    now_s, num_ended = 0.0, 0
    while num_ended < number:
        now_s += 0.1
        assert now_s < 60, "a sequence never ends"
        plan = batcher.decide(now_s)
        if plan is not None:
            load = plan.load
            steps.append((load.num_decodes, load.num_prefill_tokens))
            batcher.record(plan, runner.run(plan), now_s)
        for event in batcher.take_events():
            if isinstance(event, SequenceEnded):
                assert event.reason is FinishReason.LENGTH
                num_ended += 1
            elif isinstance(event, TokenSampled):
                tokens.setdefault(event.key.request_id, []).append(event.token_id)
        assert batcher.check_integrity() == ()
        bundle = batcher.pool.take_all_free()
        batcher.pool.give(PageBundle(bundle.all_page_ids, bundle.slots))
    return steps, tokens


def test_an_engine_goes_over_to_prefill_batches_and_samples_the_same_tokens() -> None:
    mixed, as_usual = shapes(local(RunningSettings()), 6)
    steps, tokens = shapes(local(RunningSettings(prefill_batches=PrefillBatchSettings(enter_share=0.8))), 6)
    assert tokens == as_usual
    for index in range(6):
        made = params((1,), index)
        prompt = tuple(range(index, index + 60))
        assert tokens[f"{index:032x}"] == reference_tokens(prompt, made.sampling, 3, VOCAB_SIZE)
    assert sum(decodes > 0 and prefill > 0 for decodes, prefill in steps) < sum(
        decodes > 0 and prefill > 0 for decodes, prefill in mixed
    )


def test_answers_are_not_collected_while_a_policy_decides() -> None:
    batcher = local(RunningSettings(prefill_batches=PrefillBatchSettings()))
    batcher.set_policy(PolicySpec("wait").make())
    shapes(batcher, 6)
    assert batcher._prefill_batches is not None
    assert len(batcher._prefill_batches._outputs) == 0


def has_prefill_batches(batcher: RunningBatcher) -> bool:
    return isinstance(batcher._policy.gate, PrefillBatches) and batcher._policy.step_budget is not None


def test_a_policy_that_decides_and_a_static_batch_have_no_prefill_batches() -> None:
    settings = RunningSettings(prefill_batches=PrefillBatchSettings())
    batcher = local(settings)
    assert has_prefill_batches(batcher)
    found = []
    for name in ("slai", "wait", "fcfs"):
        batcher.set_policy(PolicySpec(name).make())
        found.append(has_prefill_batches(batcher))
    assert found == [False, False, True]
    assert not has_prefill_batches(
        local(RunningSettings(join=JoinSettings(Batching.STATIC), prefill_batches=PrefillBatchSettings()))
    )
