"""Prompts are read one by one on so many cores before the scheduler sees them, and clients wait for it."""

import pytest

from benchmarks.sim.experiments.ltr_states import reading_waits_s, simulated_behind_readers
from benchmarks.sim.experiments.ltr_trained import LtrArm
from weir.sim.workloads.workload import SimRequest, Workload

# read on two cores at 0.01 s a token but for 20 tokens of each
ALL_AT_ONCE = Workload(
    "three",
    tuple(SimRequest(name, 1.0, tokens, 5, 5) for name, tokens in (("long", 120), ("short", 50), ("last", 30))),
)
WAITS_S = [1.0, 0.3, 0.4]


def test_whichever_core_is_free_first_reads_the_next_prompt() -> None:
    assert reading_waits_s(ALL_AT_ONCE, 2, 20, 0.01) == pytest.approx(WAITS_S)


def test_one_core_reads_them_one_after_the_other() -> None:
    assert reading_waits_s(ALL_AT_ONCE, 1, 20, 0.01) == pytest.approx([1.0, 1.3, 1.4])


def test_a_core_that_is_free_begins_when_a_request_comes_and_reads_at_least_a_token() -> None:
    late = Workload("late", (SimRequest("a", 0.0, 30, 5, 5), SimRequest("b", 7.0, 20, 5, 5)))
    assert reading_waits_s(late, 1, 20, 0.01) == pytest.approx([0.1, 0.01])


def test_requests_start_in_the_order_in_which_they_have_been_read_and_none_before() -> None:
    outcomes = {one.request_id: one for one in simulated_behind_readers(ALL_AT_ONCE, WAITS_S, LtrArm(None)).outcomes}
    granted_s = {name: one.granted_s for name, one in outcomes.items() if one.granted_s is not None}
    assert sorted(granted_s, key=granted_s.__getitem__) == ["short", "last", "long"]
    assert granted_s == pytest.approx({"long": 2.0, "short": 1.3, "last": 1.4}, abs=0.02)


def test_clients_count_from_when_they_sent_a_request() -> None:
    result = simulated_behind_readers(ALL_AT_ONCE, WAITS_S, LtrArm(None))
    assert {one.request_id: one.arrival_s for one in result.outcomes} == pytest.approx(
        {"long": 1.0, "short": 1.0, "last": 1.0}
    )
