"""Who is paused for whom in a full batch, and what it costs him."""

from dataclasses import replace

import pytest
from tests.unit.engine.test_batchers import NUM_PAGES, RECORD_SLOTS, handed_off
from tests.unit.engine.world import VOCAB_SIZE, Records, limits, params

from weir.core.life import SchedulingParams
from weir.engine.batching.admission import PauseSettings
from weir.engine.batching.own_rules import Batching, JoinSettings
from weir.engine.batching.running import RunningBatcher, RunningSettings
from weir.engine.memory.pages import PagePool
from weir.engine.messages import Arrival, PageBundle, SequenceEnded, TokenSampled
from weir.policy.registry import PolicySpec
from weir.policy.seams import Policy
from weir.testing.runner import HashRunner

STEP_S = 0.1
PREEMPTIVE: Policy = replace(PolicySpec("fcfs").make(), name="by rank", is_preemptive=True)


class Crowd:
    """A decode engine that computes two sequences a step; hand-offs of one page each."""

    def __init__(self, settings: RunningSettings | None = None, policy: Policy | None = None) -> None:
        self.records = Records(2 * NUM_PAGES, RECORD_SLOTS)
        pool = PagePool(watermark_pages=0, watermark_slots=0)
        pool.give(PageBundle(tuple(range(NUM_PAGES, 2 * NUM_PAGES))))
        self.batcher = RunningBatcher(limits(max_num_seqs=2), pool, self.records.open, settings)
        if policy is not None:
            self.batcher.set_policy(policy)
        self.runner = HashRunner(2 * NUM_PAGES, VOCAB_SIZE)
        self.now_s = 0.0

    def add(self, slot: int, lane: int = 0, rank: float = 0.0, predicted: float = 0.0, max_tokens: int = 40) -> None:
        made = replace(
            params((1, 2, 3), slot, max_tokens=max_tokens),
            scheduling=SchedulingParams(lane, rank, predicted_output_tokens=predicted),
        )
        self.batcher.add(handed_off(self.records, slot, made))

    def steps(self, number: int = 1) -> list[list[int]]:
        """The slots that were computed in each."""
        return [computed(self.batcher, self.runner, self.tick()) for _ in range(number)]

    def tick(self) -> float:
        self.now_s += STEP_S
        return self.now_s

    def end(self, slot: int) -> None:
        (sequence,) = (s for s in self.batcher._ranked() if s.slot == slot)
        self.batcher.cancel(sequence.key)


def computed(batcher: RunningBatcher, runner: HashRunner, now_s: float) -> list[int]:
    plan = batcher.decide(now_s)
    if plan is not None:
        batcher.record(plan, runner.run(plan), now_s)
    assert batcher.check_integrity() == ()
    return [] if plan is None else sorted(chunk.slot for chunk in plan.chunks)


def test_an_urgent_hand_off_is_computed_in_the_next_step_of_a_full_batch() -> None:
    crowd = Crowd()
    crowd.add(0)
    crowd.add(1)
    assert crowd.steps() == [[0, 1]]
    crowd.add(2, lane=2)
    assert crowd.steps() == [[0, 2]], "the latest of the lowest lane is paused"
    pages = [s.block_table for s in crowd.batcher._ranked() if s.slot == 1]
    assert pages == [(4,)], "its pages stay"
    assert crowd.batcher.counters.pauses == 1
    assert crowd.batcher.counters.preemptions == 0
    crowd.end(2)
    assert crowd.steps() == [[0, 1]]


def test_who_is_paused_goes_on_with_the_tokens_that_it_has_alone() -> None:
    crowd, alone = Crowd(), Crowd()
    for world in (crowd, alone):
        world.add(1, max_tokens=12)
    crowd.add(0)
    crowd.steps(3)
    crowd.add(2, lane=2)
    crowd.add(3, lane=2)
    assert crowd.steps(2) == [[2, 3], [2, 3]]
    crowd.end(2)
    crowd.end(3)
    crowd.steps(20)
    alone.steps(20)
    tokens = [
        [
            event.token_id
            for event in world.batcher.take_events()
            if isinstance(event, TokenSampled) and event.key.request_id == f"{1:032x}"
        ]
        for world in (crowd, alone)
    ]
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) >= 10


def test_how_long_one_waited_and_was_paused_is_told_at_its_end() -> None:
    crowd = Crowd()
    crowd.add(0)
    crowd.add(1, max_tokens=6)
    crowd.steps(2)
    crowd.add(2, lane=2)
    crowd.add(3)
    assert crowd.steps(3) == [[0, 2]] * 3
    crowd.end(2)
    crowd.steps(20)
    ended = {
        event.key.request_id: event.waits for event in crowd.batcher.take_events() if isinstance(event, SequenceEnded)
    }
    paused = ended[f"{1:032x}"]
    assert paused.paused_s == pytest.approx(3 * STEP_S)
    assert (paused.num_pauses, paused.waiting_s, paused.num_preemptions) == (1, 0.0, 0)
    crowd.end(3)
    crowd.steps()
    (late,) = [event.waits for event in crowd.batcher.take_events() if isinstance(event, SequenceEnded)]
    assert late.waiting_s > 3 * STEP_S
    assert (late.paused_s, late.num_pauses) == (0.0, 0)


def test_one_of_the_same_lane_waits_whatever_its_rank_unless_the_policy_preempts() -> None:
    for policy, expected in ((None, [0, 1]), (PREEMPTIVE, [0, 2])):
        crowd = Crowd(policy=policy)
        crowd.add(0, rank=3.0)
        crowd.add(1, rank=5.0)
        crowd.steps()
        crowd.add(2, rank=4.0)
        assert crowd.steps() == [expected]


def test_equal_rank_displaces_nobody() -> None:
    crowd = Crowd(policy=PREEMPTIVE)
    crowd.add(0, rank=3.0)
    crowd.add(1, rank=3.0)
    crowd.steps()
    crowd.add(2, rank=3.0)
    assert crowd.steps() == [[0, 1]]


def test_late_in_its_life_a_sequence_is_paused_for_a_higher_lane_only() -> None:
    """Ten tokens are predicted, and hand-offs come with one."""
    crowd = Crowd(policy=PREEMPTIVE)
    crowd.add(0, rank=1.0)
    crowd.add(1, rank=10.0, predicted=10.0)
    crowd.steps(6)
    crowd.add(2, rank=5.0)
    assert crowd.steps() == [[0, 2]], "seven tokens of ten"
    crowd.end(2)
    assert crowd.steps() == [[0, 1]]
    crowd.add(3, rank=5.0)
    assert crowd.steps() == [[0, 1]], "eight tokens of ten"
    crowd.add(4, lane=1)
    assert crowd.steps() == [[0, 4]]


def test_nobody_is_paused_more_often_than_the_bound() -> None:
    crowd = Crowd(RunningSettings(pauses=PauseSettings(max_pauses=2)))
    crowd.add(0, lane=3)
    crowd.add(1)
    crowd.steps()
    for urgent in (2, 3):
        crowd.add(urgent, lane=2)
        assert crowd.steps() == [[0, urgent]]
        crowd.end(urgent)
        assert crowd.steps() == [[0, 1]]
    crowd.add(4, lane=2)
    assert crowd.steps() == [[0, 1]], "it was paused twice"


def test_after_the_longest_pause_a_sequence_joins_first_and_stays() -> None:
    crowd = Crowd(RunningSettings(pauses=PauseSettings(max_pause_s=1.0)))
    crowd.add(0)
    crowd.add(1)
    crowd.steps()
    crowd.add(2, lane=2)
    crowd.add(3, lane=2)
    assert crowd.steps() == [[2, 3]]
    crowd.now_s += 1.0
    crowd.end(3)
    crowd.add(4, lane=2)
    assert crowd.steps() == [[0, 2]], "before one of a higher lane"
    crowd.add(5, lane=3)
    assert crowd.steps() == [[0, 5]], "who was paused long enough is not paused again, the other one is"


def test_static_batches_displace_nobody() -> None:
    crowd = Crowd(RunningSettings(join=JoinSettings(Batching.STATIC)))
    crowd.add(0)
    crowd.add(1)
    crowd.steps()
    crowd.add(2, lane=2)
    assert crowd.steps() == [[0, 1]]


@pytest.mark.parametrize(("num_urgent", "num_admitted"), [(1, 3), (5, 4)])
def test_urgent_prompts_have_slots_and_pages_beyond_a_full_batch_but_not_beyond_twice_as_many(
    num_urgent: int, num_admitted: int
) -> None:
    pool = PagePool(watermark_pages=0, watermark_slots=0)
    pool.give(PageBundle(tuple(range(40)), tuple(range(8))))
    batcher = RunningBatcher(limits(max_num_seqs=2), pool, Records(40, 8).open)
    runner = HashRunner(40, VOCAB_SIZE)
    for index in range(2):
        batcher.add(Arrival(params((1, 2, 3), index, max_tokens=50)))
    computed(batcher, runner, 0.1)
    for index in range(num_urgent):
        urgent = replace(params((4, 5), 10 + index, max_tokens=50), scheduling=SchedulingParams(1))
        batcher.add(Arrival(urgent))
    assert len(computed(batcher, runner, 0.2)) == min(2, num_urgent), "the others sit out for the urgent prompts"
    assert sum(sequence.slot is not None for sequence in batcher._ranked()) == num_admitted
    assert all(s.params.scheduling.lane_priority == 1 for s in batcher._ranked()[: min(2, num_urgent)])
    assert [s.stage.value for s in batcher._ranked()[: min(2, num_urgent)]] == ["running"] * min(2, num_urgent)


def test_ever_more_urgent_prompts_do_not_fill_the_arena() -> None:
    pool = PagePool(watermark_pages=0, watermark_slots=0)
    pool.give(PageBundle(tuple(range(40)), tuple(range(8))))
    batcher = RunningBatcher(limits(max_num_seqs=2), pool, Records(40, 8).open)
    runner = HashRunner(40, VOCAB_SIZE)
    for lane in range(4):
        for number in range(2):
            batcher.add(
                Arrival(replace(params((4, 5), 2 * lane + number, max_tokens=50), scheduling=SchedulingParams(lane)))
            )
        computed(batcher, runner, 0.1 * lane)
    assert sum(sequence.slot is not None for sequence in batcher._ranked()) == 4, "twice a full batch"


@pytest.mark.parametrize("changes", [{"max_pauses": -1}, {"max_pause_s": -1.0}, {"max_age": 1.5}])
def test_settings_that_make_no_sense_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be at least 0"):
        PauseSettings(**changes)  # type: ignore[arg-type]
