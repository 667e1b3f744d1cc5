"""The gap in service between tenants that both wait, against a check of every pair of moments."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.sim.results.fairness import backlogged, common, delivered_service, jain_index, widest_gap
from weir.sim.results.metrics import RequestOutcome, SimResult


def waited(tenant: str, arrival_s: float, granted_s: float | None, ended_s: float = 99.0) -> RequestOutcome:
    return RequestOutcome(f"{tenant}{arrival_s}", arrival_s, "", tenant, 1, granted_s=granted_s, ended_s=ended_s)


def test_the_gap_counts_only_while_both_wait() -> None:
    service = {"a": [(0.0, 0.0), (5.0, 100.0), (9.0, 900.0)], "b": [(0.0, 0.0), (6.0, 10.0)]}
    both = [waited("a", 0.0, 8.0), waited("b", 4.0, 10.0)]
    gap = widest_gap(SimResult(both, 10.0, tenant_service=service))
    assert (gap.service, gap.tenants, gap.began_s, gap.ended_s) == (100.0, ("a", "b"), 4.0, 8.0)


def test_service_that_both_get_in_turn_leaves_a_small_gap() -> None:
    service = {
        "a": [(float(t), 10.0 * (t - t % 2)) for t in range(20)],
        "b": [(float(t), 10.0 * (t - (t + 1) % 2)) for t in range(20)],
    }
    both = [waited("a", 0.0, 20.0), waited("b", 0.0, 20.0)]
    assert widest_gap(SimResult(both, 20.0, tenant_service=service)).service <= 20.0


def test_who_is_never_granted_waits_until_the_end() -> None:
    assert backlogged([waited("a", 1.0, None, 4.0), waited("a", 3.0, 6.0), waited("a", 8.0, 9.0)]) == {
        "a": [(1.0, 6.0), (8.0, 9.0)]
    }


def test_nobody_waiting_together_is_no_gap() -> None:
    result = SimResult([waited("a", 0.0, 1.0), waited("b", 2.0, 3.0)], 3.0, tenant_service={"a": [], "b": []})
    assert widest_gap(result).service == 0.0


SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5)), max_size=8)


@given(one=SPANS, other=SPANS)
def test_common_time_is_that_of_every_moment(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    def waits(spans: list[tuple[int, int]]) -> list[tuple[float, float]]:
        outcomes = [waited("t", float(began), float(began + length)) for began, length in spans]
        return backlogged(outcomes).get("t", [])

    shared = common(waits(one), waits(other))
    for tick in range(80):
        moment = tick / 2 + 0.25
        expected = all(any(b < moment < b + n for b, n in spans) for spans in (one, other))
        assert any(b < moment < e for b, e in shared) == expected


@given(
    one=st.lists(st.floats(0, 50), min_size=1, max_size=12),
    other=st.lists(st.floats(0, 50), min_size=1, max_size=12),
)
def test_the_widest_gap_is_the_largest_over_all_pairs_of_moments(one: list[float], other: list[float]) -> None:
    def totals(amounts: list[float]) -> list[tuple[float, float]]:
        return [(float(t), sum(amounts[: t + 1])) for t in range(len(amounts))]

    def at(amounts: list[float], moment: float) -> float:
        return sum(amounts[: int(moment) + 1])

    end = float(max(len(one), len(other)))
    both = [waited("a", 0.0, end), waited("b", 0.0, end)]
    result = SimResult(both, end, tenant_service={"a": totals(one), "b": totals(other)})
    moments = [t / 2 for t in range(int(end) * 2 + 1)]
    differences = [at(one, moment) - at(other, moment) for moment in moments]
    expected = max(abs(x - y) for x in differences for y in differences)
    assert widest_gap(result).service == pytest.approx(expected)


def test_jains_index_of_equal_shares_is_1_and_of_one_taking_all_its_share() -> None:
    assert jain_index([5.0, 5.0, 5.0]) == pytest.approx(1.0)
    assert jain_index([9.0, 0.0, 0.0]) == pytest.approx(1 / 3)
    assert jain_index([0.0, 0.0]) == 1.0


def test_service_is_the_prompt_at_its_grant_and_then_two_a_token() -> None:
    one = RequestOutcome("a", 0.0, "", "a", 100, 11, 40, 2.0, 3.0, 8.0, 8.0)
    never = RequestOutcome("b", 0.0, "", "b", 100, ended_s=9.0, refusal="full")
    service = delivered_service([one, never], sample_s=1.0)
    assert [amount for _, amount in service["a"]] == pytest.approx(
        [0, 0, 60, 60, 60 + 4.4, 60 + 8.8, 60 + 13.2, 60 + 17.6, 60 + 22, 60 + 22]
    )
    assert [amount for _, amount in service["b"]] == [0.0] * 10


def test_a_request_of_one_token_has_its_service_at_once() -> None:
    (samples,) = delivered_service([RequestOutcome("a", 0.0, "", "a", 5, 1, 0, 0.0, 1.5, 1.5, 1.5)]).values()
    assert samples == [(0.0, 5.0), (1.0, 5.0), (2.0, 7.0)]
    with pytest.raises(ValueError, match="sample_s 0"):
        delivered_service([], sample_s=0)
