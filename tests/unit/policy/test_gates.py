"""Each gate's own rule, on cases small enough to work out by hand."""

import math

import pytest
from tests.contract.gate_world import GateWorld, Job
from tests.unit.policy.members import gate_of, member, view

from weir.policy.magnus import MagnusParams, RequestLengths, WmaGate, waste
from weir.policy.nested_wait import segments, token_variance
from weir.policy.seams import BatchView, Gate, GateDecision, Member
from weir.policy.wait import Flow, WaitParams, balanced_step_s, longest_step_s, shares


def test_the_balance_of_the_fluid_is_that_of_the_paper() -> None:
    """10 a second, 100 tokens in, 9 out: W = 10 * (100 + 101 + .. + 109) = 10,450; tau* = d0 / (1 - d1 W)."""
    flow = Flow(rate=10.0, num_prompt_tokens=100, num_output_tokens=9)
    assert flow.work == 10 * sum(100 + k for k in range(10))
    assert balanced_step_s([flow], 0.01, 1e-5) == pytest.approx(0.01 / (1 - 1e-5 * 10_450))
    assert balanced_step_s([flow], 0.01, 1e-4) == math.inf
    assert longest_step_s([flow], 5625.0) == pytest.approx(0.5), "with half a page more for each of its 100 sequences"


def test_a_fluid_that_runs_step_by_step_settles_at_the_balance() -> None:
    """Each step takes d0 + d1 * (tokens in pages), and brings rate * (its time) requests, which move on together."""
    rate, prompt, output, base_s, token_s = 40.0, 120, 30, 0.008, 3e-6
    stages = [0.0] * (output + 1)
    step_s = base_s
    for _ in range(2000):
        stages = [rate * step_s, *stages[:-1]]
        step_s = base_s + token_s * sum(count * (prompt + k) for k, count in enumerate(stages))
    assert step_s == pytest.approx(balanced_step_s([Flow(rate, prompt, output)], base_s, token_s), rel=1e-6)


def test_wait_gives_each_type_what_arrives_in_a_step() -> None:
    """W = 50 * 11 * (100 + 5) + 10 * 11 * 105 = 69,300; tau* = 0.1 / (1 - 1e-6 * 69,300) = 0.10745 s."""
    flows = {(1, 0): Flow(50.0, 100, 10), (2, 0): Flow(10.0, 100, 10)}
    given = shares(flows, WaitParams(base_ms=100, token_ms=0.001, safety=0), num_pool_tokens=660 * (105 + 8))
    assert [share.quota for share in given.values()] == [5, 1]
    assert [share.num_a_step for share in given.values()] == pytest.approx([50.0, 10.0])
    assert [share.max_in_batch for share in given.values()] == [550, 110]
    given = shares(flows, WaitParams(base_ms=100, token_ms=0.001, safety=0.5), num_pool_tokens=660 * (105 + 8))
    assert [share.num_a_step for share in given.values()] == pytest.approx([25.0, 5.0]), "half of the pages stay free"


def test_wait_holds_the_batch_until_a_types_share_waits_or_its_time_is_over() -> None:
    gate = gate_of("wait", base_ms=100, max_wait_s=0.5)
    arrivals = [member(f"a{n}", 10.0, since_s=n / 50) for n in range(50)]
    for now_s, count in ((0.0, 0), (0.5, 25), (0.99, 50)):
        gate.decide(view(arrivals[:count], [], 0), now_s)
    gate.decide(view([], [], 64), 1.0)  # 50 a second of one type, a step of 0.1 s: 5 at a time
    running = [member("r", 10.0, 3)]
    four, five = [member(f"b{n}", 10.0) for n in range(4)], [member(f"b{n}", 10.0) for n in range(5)]
    held = gate.decide(view(four, running, 64), 1.1)
    assert (list(held.joining), list(held.paused)) == ([], [0])
    assert gate.next_deadline_s == pytest.approx(1.6)
    started = gate.decide(view(five, running, 64), 1.2)
    assert (list(started.joining), list(started.paused)) == ([0, 1, 2, 3, 4], [])
    gate.decide(view(four, running, 64), 1.3)
    assert gate.next_deadline_s == pytest.approx(1.8)
    late = gate.decide(view(four, running, 64), 1.8)
    assert list(late.paused) == []
    assert gate.next_deadline_s is None
    gate.decide(view(four, running, 64), 1.9)
    assert gate.next_deadline_s == pytest.approx(2.4), "the next step may be held as long"


@pytest.mark.parametrize("name", ["wait", "nested-wait", "srtf"])
def test_where_there_is_no_place_nobody_joins(name: str) -> None:
    gate = gate_of(name, max_variation=1000) if name != "srtf" else gate_of(name)
    gone = [member(f"g{n}", None, 10) for n in range(30)]
    for now_s, step in ((0.0, view([], gone, 64)), (2.0, view([member("w", 10.0, since_s=1.0)], [], 0))):
        assert list(gate.decide(step, now_s).joining) == []
    assert list(gate.decide(view([member("w", 10.0, since_s=1.0)], [], 0), 9.0).joining) == []


class OpenGate:
    """Whoever finds room joins."""

    next_deadline_s = None

    def decide(self, view: BatchView, now_s: float) -> GateDecision:
        return GateDecision(range(min(len(view.waiting), view.max_running - len(view.running))))


@pytest.mark.parametrize("max_variation", [0.0, 2.0])
def test_wait_keeps_the_pages_within_the_fluid_and_an_open_gate_does_not(max_variation: float) -> None:
    """Each comes to 150 tokens and a pool holds 3,000; 40 of them would need up to 6,000."""

    def run(gate: Gate) -> GateWorld:
        jobs = [Job(f"j{n}", 0.02 * n + 0.15 * math.sin(n / 30), 100, 50, 50.0) for n in range(400)]
        world = GateWorld(gate, jobs, max_running=40, num_pool_tokens=3000)
        world.run()
        return world

    world = run(gate_of("wait", max_variation=max_variation))
    assert len(world.ended) == 400
    assert world.peak_tokens <= 3000 * 0.9 + 150
    assert run(OpenGate()).peak_tokens > 3000


def test_nested_wait_cuts_answers_at_their_quantiles() -> None:
    """Of 10, 20, .. 100 tokens: cut at 50, 80 and 100; all, half and a fifth of the requests get that far."""
    plan = segments(20.0, 100, range(10, 101, 10), WaitParams(safety=0), num_pool_tokens=10**5)
    assert [segment.ends for segment in plan.segments] == [50, 80, 100, math.inf]
    inside = [segment.max_inside for segment in plan.segments]
    means = [plan.num_a_step * share * stages for share, stages in ((1, 50), (0.5, 30), (0.2, 20))]
    deviations = math.sqrt(2 * math.log(1000))
    later = [math.ceil(mean + deviations * math.sqrt(mean)) for mean in means[1:]]
    assert inside == [math.floor(means[0]), *later, math.inf]


def test_nested_wait_leaves_pages_for_how_many_outlive_a_segment() -> None:
    """Half get 10 tokens, half 30: of 20 ages a half is there, by chance; of one length there is no chance at all."""
    variance = token_variance(100, 0.0, [10, 30])
    assert variance == pytest.approx(sum(0.25 * (100 + age) ** 2 for age in range(10, 30)), rel=0.02)
    assert token_variance(100, 0.0, [30, 30]) == 0
    assert token_variance(100, 9.0, [30]) == 9 * 30
    params = WaitParams(safety=0)
    a_step = segments(1.0, 100, [10, 30], params, 50_000).num_a_step
    fluid = a_step * (11 * 105 + 31 * 115) / 2
    assert fluid + math.sqrt(2 * math.log(1000) * a_step * variance) == pytest.approx(50_000)


def test_before_lengths_are_known_nested_wait_takes_requests_at_their_bound() -> None:
    waiting = [Member(f"w{n}", 100, 0, 0.0, max_output_tokens=400) for n in range(5)]
    assert list(gate_of("nested-wait").decide(BatchView(waiting, [], 64, 1600, 1600), 0.0).joining) == [0, 1, 2]
    assert list(gate_of("nested-wait").decide(BatchView(waiting, [], 64, 400, 400), 0.0).joining) == [0]
    running = [Member("r", 100, 50, 0.0, max_output_tokens=1000)]
    assert list(gate_of("nested-wait").decide(BatchView(waiting, running, 64, 1600, 500), 0.0).joining) == [0]


def test_nobody_enters_nested_wait_while_a_later_segment_is_full() -> None:
    gate = gate_of("nested-wait", max_variation=1000)
    gone = [member(f"g{n}", None, length - 1) for n, length in enumerate([10] * 18 + [30] * 2)]
    gate.decide(BatchView([], gone, 64, 400, 400), 0.0)
    gate.decide(BatchView([member("w", None, since_s=0.5)], [], 0, 400, 400), 0.5)
    newcomer = [member("new", None, since_s=1.9)]
    full = [member(f"m{n}", None, 10) for n in range(4)]
    assert list(gate.decide(BatchView(newcomer, full, 64, 400, 400), 2.0).joining) == []
    assert list(gate.decide(BatchView(newcomer, full[:2], 64, 400, 400), 2.1).joining) == [0]


def test_a_sequence_at_the_end_of_a_segment_rests_until_the_next_has_room() -> None:
    """Twenty answers of 10 tokens, then long ones: of four that stand at 10 tokens only two may go on at a time."""
    gate = gate_of("nested-wait", max_variation=1000)
    lengths = [10] * 18 + [30] * 2
    gone = [member(f"g{n}", None, length - 1) for n, length in enumerate(lengths)]
    gate.decide(BatchView([], gone, 64, 400, 400), 0.0)
    gate.decide(BatchView([member("w", None, since_s=0.5)], [], 0, 400, 400), 0.5)
    at_the_end = [member(f"m{n}", None, 10) for n in range(4)]
    decision = gate.decide(BatchView([], at_the_end, 64, 400, 400), 2.0)
    assert sorted(decision.paused) == [2, 3]


def test_srtf_computes_those_with_least_left_whether_they_run_or_wait() -> None:
    running = [member("long", 100.0, 10), member("short", 50.0, 30)]
    decision = gate_of("srtf").decide(view([member("new", 60.0)], running, 2), 1.0)
    assert (list(decision.joining), list(decision.paused)) == ([0], [0])


def test_srtf_counts_what_is_left_and_not_what_was_predicted() -> None:
    """Of 100 tokens 60 are there: 40 are left, fewer than the newcomer's 50."""
    decision = gate_of("srtf").decide(view([member("new", 50.0)], [member("old", 100.0, 60)], 1), 1.0)
    assert (list(decision.joining), list(decision.paused)) == ([], [])


def test_srtf_counts_a_rest_once_however_long_it_is() -> None:
    gate = gate_of("srtf", max_pauses=2, max_pause_s=100)
    old, short = member("old", 100.0, 5), member("short", 9.0, 5)
    for step in range(5):
        assert list(gate.decide(view([], [old, short], 1), step / 10).paused) == [0]
    assert list(gate.decide(view([], [old], 1), 0.6).paused) == []
    assert list(gate.decide(view([], [old, short], 1), 0.7).paused) == [0], "its second pause"
    assert list(gate.decide(view([], [old], 1), 0.8).paused) == []
    assert list(gate.decide(view([], [old, short], 1), 0.9).paused) == [1], "it had two"


def test_srtf_forgets_who_has_left_the_batch() -> None:
    gate = gate_of("srtf", max_pauses=1, max_pause_s=100)
    batch = [member("old", 100.0, 5), member("short", 9.0, 5)]
    assert list(gate.decide(view([], batch, 1), 0.1).paused) == [0]
    gate.decide(view([], [], 1), 0.2)
    assert list(gate.decide(view([], batch, 1), 0.3).paused) == [0], "another of the same name"


def test_srtf_lets_in_who_brings_its_pages_behind_one_that_lacks_some() -> None:
    """What the second holds may be what the first waits for; a third that lacks pages as well stays behind."""
    lacking = Member("lacking", 500, 0, 0.0, 5.0, 0, num_missing_tokens=500)
    bringing, small = Member("bringing", 500, 1, 0.0, 50.0), Member("small", 16, 0, 0.0, 60.0, 0, num_missing_tokens=16)
    decision = gate_of("srtf").decide(view([lacking, bringing, small], [], 4, free=499), 1.0)
    assert list(decision.joining) == [1]


def test_srtf_never_stops_a_sequence_late_in_its_life() -> None:
    """0.8 of 1,000 predicted tokens: at 800 it runs to its end, at 799 it may be stopped."""
    newcomer = [member("new", 60.0, since_s=-100.0)]
    assert list(gate_of("srtf").decide(view(newcomer, [member("old", 1000.0, 800)], 1), 1.0).paused) == []
    assert list(gate_of("srtf").decide(view(newcomer, [member("old", 1000.0, 799)], 1), 1.0).paused) == [0]


def test_srtf_stops_a_sequence_a_bounded_number_of_times_and_for_a_bounded_time() -> None:
    gate = gate_of("srtf", max_pauses=1, max_pause_s=5)
    old, other = member("old", 100.0, 5, since_s=1.0), member("other", 50.0, 5, since_s=1.0)
    assert list(gate.decide(view([], [old, other], 1), 2.0).paused) == [0]
    assert list(gate.decide(view([], [old, other], 1), 5.9).paused) == [0]
    assert list(gate.decide(view([], [old, other], 1), 6.0).paused) == [1]
    assert list(gate.decide(view([member("new", 5.0, since_s=6.0)], [old], 1), 6.1).paused) == []


def test_srtf_stops_nobody_for_a_lower_lane_or_for_one_that_finds_no_pages() -> None:
    urgent, short = member("urgent", 100.0, 5, lane=1), member("short", 5.0)
    assert list(gate_of("srtf").decide(view([short], [urgent], 1), 1.0).paused) == []
    large = Member("large", 500, 0, 0.0, 5.0, 0, num_missing_tokens=500)
    decision = gate_of("srtf").decide(view([large], [member("old", 100.0, 5)], 1, free=499), 1.0)
    assert (list(decision.joining), list(decision.paused)) == ([], [])


def test_wasted_memory_access_is_that_of_the_paper() -> None:
    """L = 20, G = 8. (10, 5): padding 5 * 10 = 50, waiting 25 + 26 + 27 = 78. (20, 8): none."""
    assert waste([RequestLengths(10, 5), RequestLengths(20, 8)]) == 128
    assert waste([RequestLengths(20, 8)] * 3) == 0


def test_a_static_batch_is_of_similar_requests_and_starts_with_the_first() -> None:
    short, long = [member(f"s{n}", 10.0) for n in range(3)], [member(f"l{n}", 900.0) for n in range(2)]
    mixed = [long[0], short[0], long[1], short[1], short[2]]
    gate = WmaGate(MagnusParams(max_waste=50_000, max_batch=8, max_hold_s=0))
    assert gate.decide(view(mixed, [], 8), 0.0).joining == [0, 2]
    assert gate.decide(view(mixed[1:], [], 8), 0.0).joining == [0, 2, 3]
    assert gate.decide(view(mixed, [member("r", 5.0)], 8), 0.0).joining == ()


def test_who_could_join_two_batches_joins_where_it_wastes_less() -> None:
    """120 tokens of answer beside 10 waste 110 * 100 + 7,095 tokens, beside 300 they waste 180 * 100 + 37,710."""
    gate = WmaGate(MagnusParams(max_waste=60_000, max_batch=8, max_hold_s=0))
    three = [member("a", 10.0), member("b", 300.0), member("c", 120.0)]
    assert gate.decide(view(three, [], 8), 0.0).joining == [0, 2]
    assert gate.decide(view([three[1], three[0], three[2]], [], 8), 0.0).joining == [0]


def test_a_static_batch_holds_no_more_than_the_pages_do() -> None:
    """Two of 100 + 900 tokens fit into 2,500, three do not."""
    gate = WmaGate(MagnusParams(max_waste=50_000, max_batch=8, max_hold_s=0))
    three = [member(f"l{n}", 900.0) for n in range(3)]
    assert gate.decide(BatchView(three, [], 8, 2500, 2500), 0.0).joining == [0, 1]


def test_a_static_batch_that_is_not_full_is_held_back_for_a_while() -> None:
    gate = WmaGate(MagnusParams(max_waste=50_000, max_batch=2, max_hold_s=1))
    one = [member("a", 10.0, since_s=3.0)]
    assert gate.decide(view(one, [], 8), 3.5).joining == ()
    assert gate.next_deadline_s == 4.0
    assert gate.decide(view(one, [], 8), 4.0).joining == [0]
    two = [*one, member("b", 10.0, since_s=3.0)]
    assert gate.decide(view(two, [], 8), 3.5).joining == [0, 1]
