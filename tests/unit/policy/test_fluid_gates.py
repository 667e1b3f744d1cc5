"""WAIT and Nested WAIT: what they see of their traffic, and what they let a step take."""

import math
from dataclasses import replace

import pytest
from tests.unit.policy.members import gate_of, member, view

from weir.policy.nested_wait import segments
from weir.policy.seams import BatchView, Gate, Member
from weir.policy.traffic import Departures, Traffic
from weir.policy.wait import WaitParams


def view_of(waiting: list[str], running: dict[str, int], since_s: float = 0.0) -> BatchView:
    batch = [member(request_id, 10.0, emitted) for request_id, emitted in running.items()]
    return view([member(request_id, 10.0, since_s=since_s) for request_id in waiting], batch, 64)


def test_arrivals_are_told_apart_from_those_that_were_there_before() -> None:
    """b is preempted and waits again: it has arrived once, and has not ended. c has ended with its fourth token."""
    traffic, departures = Traffic(60.0), Departures()
    steps = [view_of(["a", "b", "c"], {}), view_of(["a"], {"b": 1, "c": 3}), view_of(["a", "b"], {})]
    for now_s, step in enumerate([*steps, view_of([], {"a": 1, "b": 2}), view_of([], {})]):
        traffic.observe(step, float(now_s))
        departures.observe(step)
    assert len(traffic.arrivals) == 3
    assert list(departures.lengths) == [4, 2, 3]


@pytest.mark.parametrize("began_at_s", [0.0, 500.0])
def test_a_rate_is_over_the_time_that_was_seen(began_at_s: float) -> None:
    """Whatever the clock said when it began."""
    traffic = Traffic(60.0)
    for second, span_s in ((0, 1), (1, 1), (30, 30), (61, 60)):
        traffic.observe(view_of([f"a{second}"], {}, began_at_s + second), began_at_s + second)
        assert traffic.span_s(began_at_s + second) == span_s
    assert [seen.at_s - began_at_s for seen in traffic.arrivals] == [1, 30, 61], "the first is out of the window"


def test_variation_is_that_of_gaps_and_one_for_poisson_arrivals() -> None:
    """Evenly spaced arrivals have none; four seconds of nine arrivals among 32 empty ones: the variance of counts is
    8, the mean 1, the square root of their ratio 2.83."""
    even, clumped = Traffic(60.0), Traffic(60.0)
    even.observe(view([member(f"e{n}", 1.0, since_s=n / 4) for n in range(80)], [], 64), 20.0)
    assert even.variation == 0.0
    at_s = [9.0 * (n // 9) for n in range(36)]
    clumped.observe(view([member(f"c{n}", 1.0, since_s=at) for n, at in enumerate([*at_s, 36.0])], [], 64), 36.0)
    assert clumped.variation == pytest.approx(math.sqrt(8))


def test_wait_waits_for_no_share_while_arrivals_vary_much() -> None:
    """Thirty a second on average, three a step, but all of them in every fifth second."""
    for max_variation, is_held in ((2.0, False), (1000.0, True)):
        gate = gate_of("wait", base_ms=100, max_wait_s=0.5, max_variation=max_variation)
        for second in range(0, 30, 5):
            gate.decide(view([member(f"a{second}-{n}", 10.0, since_s=second) for n in range(150)], [], 0), second)
        gate.decide(view([], [], 64), 30.0)
        decision = gate.decide(view([member("b", 10.0, since_s=30)], [member("r", 10.0, 3)], 64), 30.1)
        assert bool(list(decision.paused)) == is_held


def joined_a_step(pool: int, num_steps: int, silent: int = 0) -> list[int]:
    """By WAIT, ten a second of 9 tokens of answer having come for a minute; `silent` steps before anybody waits."""
    gate = gate_of("wait", base_ms=1, token_ms=0, max_wait_s=0, safety=0)
    arrivals = [member(f"a{n}", 9.0, since_s=n / 10) for n in range(600)]
    for number in range(60):
        gate.decide(BatchView(arrivals[10 * number : 10 * number + 10], [], 0, pool, pool), float(number + 1))
    newcomers = [member(f"b{n}", 9.0, since_s=60.1) for n in range(80)]
    joined = []
    for step in range(-silent, num_steps):
        waiting = newcomers if step >= 0 else []
        decision = gate.decide(BatchView(waiting, [member("r", 9.0, 1)], 64, pool, pool), 60.5 + step / 1000)
        joined.append(len(list(decision.joining)))
    return joined[silent:]


def test_wait_lets_a_step_take_no_more_than_its_share_and_saves_up_for_one_at_the_most() -> None:
    """Ten a second in ten stages of 104.5 tokens and half a page on average: half of one a step fills 562.5 tokens."""
    assert joined_a_step(565, 8, silent=20) == [1, 1, 0, 1, 0, 1, 0, 1]


def test_what_a_step_leaves_of_its_share_is_not_lost() -> None:
    """1.9 a step: one and two in turn, not one each time."""
    assert sum(joined_a_step(2138, 30)) == pytest.approx(57, abs=1)


def test_wait_waits_for_no_more_than_there_is_room_for() -> None:
    """Fifty a second, five a step; pages for 57 with 10 tokens after 100: beside 54 there is room for three."""
    gate = gate_of("wait", base_ms=100, token_ms=0, max_wait_s=0.5, safety=0)
    arrivals = [member(f"a{n}", 10.0, since_s=n / 50) for n in range(150)]
    for second in range(3):
        gate.decide(BatchView(arrivals[50 * second : 50 * second + 50], [], 0, 6450, 6450), second + 1.0)
    three = [member(f"b{n}", 10.0, since_s=3.0) for n in range(3)]
    for num_running, num_paused in ((54, 0), (40, 40)):
        batch = [member(f"r{n}", 10.0, 1) for n in range(num_running)]
        assert len(list(gate.decide(BatchView(three, batch, 64, 6450, 6450), 3.1).paused)) == num_paused


def test_wait_lets_no_more_into_the_batch_than_fill_the_pages() -> None:
    gate = gate_of("wait", base_ms=1, token_ms=0, max_wait_s=0, safety=0)
    for number in range(60):
        arrivals = [member(f"a{number}-{n}", 9.0, since_s=number + n / 10) for n in range(10)]
        gate.decide(BatchView(arrivals, [], 0, 565, 565), float(number + 1))
    newcomers = [member(f"b{n}", 9.0, since_s=60.1) for n in range(20)]
    for num_running, num_joining in ((4, 1), (5, 0)):
        batch = [member(f"r{n}", 9.0, 1) for n in range(num_running)]
        assert len(list(gate.decide(BatchView(newcomers, batch, 64, 565, 565), 60.3).joining)) == num_joining


def test_types_are_told_apart_by_prompt_and_each_has_a_share_of_its_own() -> None:
    """Twenty a second of each, a step of 0.1 s: two of each; six of one do not stand for the other."""
    gate = gate_of("wait", base_ms=100, max_wait_s=0.5)
    kinds = [Member(f"{size}-{n}", size, 0, n / 20, 10.0) for n in range(100) for size in (100, 900)]
    for second in range(5):
        gate.decide(view(kinds[40 * second : 40 * second + 40], [], 0), second + 1.0)
    running = [member("r", 10.0, 3)]
    gate.decide(view([], running, 64), 6.0)
    short, long = ([Member(f"new{size}-{n}", size, 0, 6.0, 10.0) for n in range(6)] for size in (100, 900))
    assert list(gate.decide(view(short, running, 64), 6.1).paused) == [0]
    assert list(gate.decide(view([*short, *long], running, 64), 6.2).paused) == []


def test_without_predictions_wait_reckons_with_the_answers_that_have_ended() -> None:
    """Fifty a second of 100 tokens: pages of 1,000 tokens hold 8 with answers of 10 at once, 6 with answers of 100."""

    def most_in_batch(length: int) -> int:
        gate = gate_of("wait", base_ms=1, max_wait_s=0, safety=0)
        arrivals = [member(f"a{n}", None, since_s=n / 50) for n in range(500)]
        gate.decide(view([], [member(f"e{n}", None, length - 1) for n in range(10)], 64), 0.0)
        for second in range(10):
            gate.decide(BatchView(arrivals[50 * second : 50 * second + 50], [], 0, 1000, 1000), second + 1.0)
        newcomers = [member(f"b{n}", None, since_s=11.0) for n in range(64)]
        batch: list[Member] = []
        for step in range(200):
            joining = gate.decide(BatchView(newcomers[len(batch) :], batch, 64, 1000, 1000), 11.0 + step / 1000).joining
            batch = [member(f"b{n}", None, 1) for n in range(len(batch) + len(list(joining)))]
        return len(batch)

    assert most_in_batch(10) == math.floor(1000 / (100 + 10 / 2 + 8))
    assert most_in_batch(100) == math.floor(1000 / (100 + 100 / 2 + 8))


def test_nested_wait_waits_in_each_segment_for_what_reaches_it_in_a_step() -> None:
    """Twenty a second and a step of 0.5 s: ten begin, five reach the second segment, two the third, none the last."""
    params = WaitParams(base_ms=500, token_ms=0, safety=0)
    plan = segments(20.0, 100, range(10, 101, 10), params, num_pool_tokens=10**6)
    assert [segment.quota for segment in plan.segments] == [10, 5, 2, 0]
    spared = segments(20.0, 100, range(10, 101, 10), replace(params, safety=0.5), num_pool_tokens=2 * 10**6)
    assert spared.num_a_step == pytest.approx(plan.num_a_step), "half of the pages stay free"


def nested_gate(num_ended: int, **params: float) -> Gate:
    """Fifteen a second come in 3 s, steps of 0.2 s; answers that ended were of 10 and 30 tokens, half of each."""
    gate = gate_of("nested-wait", base_ms=200, token_ms=0, max_wait_s=0.5, **params)
    gone = [member(f"g{n}", None, 9 if n % 2 else 29) for n in range(num_ended)]
    gate.decide(view([], gone, 64), 0.0)
    for second in range(3):
        arrivals = [member(f"a{second}-{n}", None, since_s=second + n / 15) for n in range(15)]
        gate.decide(view(arrivals, [], 0), second + 0.99)
    gate.decide(view([], [], 64), 3.0)
    return gate


def test_nested_wait_stands_open_until_it_knows_answers_and_waits_for_its_share_then() -> None:
    """A share of three a step."""
    one = view([member("b", None, since_s=3.0)], [], 64)
    assert list(nested_gate(19).decide(one, 3.1).joining) == [0]
    gate = nested_gate(20)
    assert list(gate.decide(one, 3.1).joining) == []
    assert gate.next_deadline_s == pytest.approx(3.6)
    three = view([member(f"b{n}", None, since_s=3.0) for n in range(3)], [], 64)
    assert list(gate.decide(three, 3.2).joining) == [0, 1, 2]


def test_a_segment_runs_only_if_the_one_before_it_does() -> None:
    """While the first one waits for entrants those within the second are paused, and who stands before it, of whom it
    needs no more."""
    batch = [member(f"m{n}", None, num_emitted) for n, num_emitted in enumerate((15, 15, 10))]
    held = nested_gate(20).decide(view([member("b", None, since_s=3.0)], batch, 64), 3.1)
    assert (list(held.joining), sorted(held.paused)) == ([], [0, 1, 2])


def test_nested_wait_waits_for_nobody_while_arrivals_vary_much() -> None:
    gate = gate_of("nested-wait", base_ms=200, token_ms=0, max_wait_s=0.5)
    gate.decide(view([], [member(f"g{n}", None, 9 if n % 2 else 29) for n in range(20)], 64), 0.0)
    for second in range(0, 30, 5):
        gate.decide(view([member(f"a{second}-{n}", None, since_s=second) for n in range(75)], [], 0), float(second))
    gate.decide(view([], [], 64), 30.0)
    assert list(gate.decide(view([member("b", None, since_s=30.0)], [], 64), 30.1).joining) == [0]


def nested_joined_a_step(pool: int, num_steps: int, silent: int = 0) -> list[int]:
    """By Nested WAIT, fifty a second having come for 10 s, after answers of 10 and 30 tokens, half of each; `silent`
    steps before anybody waits."""
    gate = gate_of("nested-wait", base_ms=1, token_ms=0, max_wait_s=0, safety=0)
    gone = [member(f"g{n}", None, 9 if n % 2 else 29) for n in range(20)]
    gate.decide(BatchView([], gone, 64, pool, pool), 0.0)
    for second in range(10):
        arrivals = [member(f"a{second}-{n}", None, since_s=second + n / 50) for n in range(50)]
        gate.decide(BatchView(arrivals, [], 0, pool, pool), second + 1.0)
    newcomers = [member(f"b{n}", None, since_s=11.0) for n in range(40)]
    joined = []
    for step in range(-silent, num_steps):
        waiting = newcomers if step >= 0 else []
        decision = gate.decide(BatchView(waiting, [member("r", None, 1)], 64, pool, pool), 11.1 + step / 1000)
        joined.append(len(list(decision.joining)))
    return joined[silent:]


def nested_share(pool: int) -> float:
    return segments(50.0, 100, [10, 30] * 10, WaitParams(safety=0), pool).num_a_step


@pytest.mark.parametrize("silent", [0, 20])
def test_nested_wait_lets_a_step_take_no_more_than_its_share_and_what_is_left_of_it_is_not_lost(silent: int) -> None:
    """Pages for two and a half a step, and for nine in ten steps; nobody having waited, one more at the most."""
    assert nested_share(7480) == pytest.approx(2.5, rel=0.01)
    assert nested_joined_a_step(7480, 9, silent) == [3, 3, 2, 3, 2, 3, 2, 3, 2]
    assert nested_share(3080) == pytest.approx(0.9, rel=0.01)
    assert sum(nested_joined_a_step(3080, 20, silent)) == pytest.approx(18 + 1, abs=1)


def test_a_share_under_one_lets_somebody_in_every_other_step() -> None:
    """Pages for half of one a step."""
    assert nested_share(1890) == pytest.approx(0.5, rel=0.01)
    assert nested_joined_a_step(1890, 8) == [1, 1, 0, 1, 0, 1, 0, 1]
