"""One contract over the gates of all policies that have one."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract.gate_world import GateWorld, Job
from tests.contract.opcodes import num_opcodes

from weir.policy.registry import PolicySpec, policy_names
from weir.policy.seams import BatchView, Gate, Member

MAX_IDLE_S = {"srtf": 0.0, "wait": 0.1, "nested-wait": 0.1, "magnus": 0.2}
FLUID = {"base_ms": 100.0, "max_variation": 1000.0}
"""Steps so slow that the fluid asks for several of a type a step."""
PARAMS = {"magnus": {"static_batches": 1.0, "max_hold_s": 0.2}, "wait": FLUID, "nested-wait": FLUID}
every_gate = pytest.mark.parametrize("name", MAX_IDLE_S)


def make_gate(name: str) -> Gate:
    gate = PolicySpec(name, PARAMS.get(name, {})).make().gate
    assert gate is not None
    return gate


def test_every_policy_with_a_gate_is_under_this_contract() -> None:
    with_gate = {name for name in policy_names() if PolicySpec(name, PARAMS.get(name, {})).make().gate is not None}
    assert with_gate == MAX_IDLE_S.keys()


@st.composite
def traffic(draw: st.DrawFn) -> list[Job]:
    size = draw(st.integers(1, 80))
    gap_s = draw(st.sampled_from([0.0005, 0.003, 0.05, 1.0]))
    at_s, jobs = 0.0, []
    for number in range(size):
        at_s += gap_s * draw(st.sampled_from([0.0, 1.0, 1.0, 2.0]))
        num_left = draw(st.sampled_from([1, 5, 5, 40]))
        predicted = draw(st.sampled_from([None, float(num_left), 3.0]))
        prompt = draw(st.sampled_from([16, 50, 50, 900]))
        jobs.append(Job(f"j{number}", at_s, prompt, num_left, predicted, draw(st.sampled_from([0, 0, 1]))))
    return jobs


@every_gate
@given(jobs=traffic())
@settings(max_examples=40, deadline=None)
def test_everything_ends_and_nothing_is_held_longer_than_the_longest_wait(name: str, jobs: list[Job]) -> None:
    world = GateWorld(make_gate(name), jobs)
    ids = {job.request_id for job in jobs}
    world.run()
    assert set(world.ended) == ids
    assert world.longest_idle_s <= MAX_IDLE_S[name] + 1e-9


@pytest.mark.parametrize("name", ["magnus", "wait", "nested-wait"])
def test_gates_that_may_hold_a_batch_back_do(name: str) -> None:
    jobs = [Job(f"j{n}", 0.004 * n + (n > 50), 50, 5 + 40 * (n % 2), 20.0) for n in range(80)]
    world = GateWorld(make_gate(name), jobs, max_running=64)
    world.run()
    assert 0 < world.longest_idle_s <= MAX_IDLE_S[name] + 1e-9


@every_gate
@given(jobs=traffic())
@settings(max_examples=10, deadline=None)
def test_the_same_traffic_is_let_in_in_the_same_way(name: str, jobs: list[Job]) -> None:
    one, other = GateWorld(make_gate(name), copy.deepcopy(jobs)), GateWorld(make_gate(name), jobs)
    one.run()
    other.run()
    assert one.log == other.log


@every_gate
@given(jobs=traffic())
@settings(max_examples=20, deadline=None)
def test_a_burst_is_let_in_and_ends(name: str, jobs: list[Job]) -> None:
    world = GateWorld(make_gate(name), jobs)
    for job in jobs:
        job.arrives_at_s = 0.0
    world.run()
    assert world.longest_idle_s <= MAX_IDLE_S[name] + 1e-9


@every_gate
def test_a_gate_looks_at_each_sequence_a_bounded_number_of_times(name: str) -> None:
    def cost(size: int) -> int:
        gate = make_gate(name)
        members = [Member(f"m{n}", 50 + n % 7, 3, 0.0, 20.0 + n % 5) for n in range(2 * size)]
        running = members[:size] if name != "magnus" else []
        view = BatchView(members[size:], running, size, 10**7, 10**7)
        gate.decide(view, 0.0)
        return num_opcodes(lambda: gate.decide(view, 0.5))

    assert cost(400) < (40 if name == "magnus" else 12) * cost(40)
