"""Prompts are read one by one on so many cores before the scheduler sees them, and clients wait for it."""

import pytest

from benchmarks.sim.experiments.ltr_states import reading_waits_s, seen_by_client, seen_by_scheduler
from benchmarks.sim.experiments.ltr_trained import LtrArm, simulated
from weir.sim.workloads.workload import SimRequest, Workload

# all at once, read on two cores at 0.01 s a token but for 20 tokens of each
LONG_SHORT_LAST = Workload(
    "three",
    tuple(SimRequest(name, 1.0, tokens, 5, 5) for name, tokens in (("long", 120), ("short", 50), ("last", 30))),
)
WAITS_S = [1.0, 0.3, 0.4]


def test_whichever_core_is_free_first_reads_the_next_prompt() -> None:
    assert reading_waits_s(LONG_SHORT_LAST, 2, 20, 0.01) == pytest.approx(WAITS_S)


def test_one_core_reads_them_one_after_the_other() -> None:
    assert reading_waits_s(LONG_SHORT_LAST, 1, 20, 0.01) == pytest.approx([1.0, 1.3, 1.4])


def test_a_core_that_is_free_begins_when_a_request_comes_and_reads_at_least_a_token() -> None:
    late = Workload("late", (SimRequest("a", 0.0, 30, 5, 5), SimRequest("b", 7.0, 20, 5, 5)))
    assert reading_waits_s(late, 1, 20, 0.01) == pytest.approx([0.1, 0.01])


def test_the_scheduler_sees_requests_in_the_order_in_which_they_have_been_read() -> None:
    seen = seen_by_scheduler(LONG_SHORT_LAST, WAITS_S).requests
    assert [(one.request_id, one.arrival_s) for one in seen] == [("short", 1.3), ("last", 1.4), ("long", 2.0)]
    assert [one.num_prompt_tokens for one in seen] == [50, 30, 120]


def test_clients_count_from_when_they_sent_a_request() -> None:
    simulated_result = simulated(seen_by_scheduler(LONG_SHORT_LAST, WAITS_S), LtrArm(None))
    result = seen_by_client(simulated_result, LONG_SHORT_LAST, WAITS_S)
    assert {one.request_id: one.arrival_s for one in result.outcomes} == pytest.approx(
        {"long": 1.0, "short": 1.0, "last": 1.0}
    )
    assert [one.ended_s for one in result.outcomes] == [one.ended_s for one in simulated_result.outcomes]
