"""What a link is believed to do, by what fetches over it have done."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.bus.prefix_news import PrefixFetched
from weir.scheduling.routing.links import LinkCost, LinkRates

PRIOR = LinkCost.of_rate(1000, 10.0)
MEGABYTE = 1_000_000


def fetched(num_bytes: int, busy_s: float, round_trip_s: float = 0.01) -> PrefixFetched:
    return PrefixFetched("a:7000", num_bytes, busy_s, round_trip_s)


def rate(rates: LinkRates, now_s: float = 0.0, arena_id: str = "b") -> float:
    """In megabytes a second."""
    return 1 / rates.cost("a:7000", arena_id, now_s).byte_ms / 1000


def test_a_link_that_nobody_measured_has_the_rate_that_was_given() -> None:
    assert rate(LinkRates(PRIOR)) == pytest.approx(125)
    assert PRIOR.transfer_ms(125 * MEGABYTE) == pytest.approx(1010)


def test_a_measured_link_comes_to_its_rate_and_others_keep_theirs() -> None:
    rates = LinkRates(PRIOR)
    for _ in range(20):
        rates.learn("b", [fetched(8 * MEGABYTE, 0.8, round_trip_s=0.002)], 0.0)
    assert rate(rates) == pytest.approx(10, rel=0.15)
    assert rates.cost("a:7000", "b", 0.0).round_trip_ms < 4
    assert rate(rates, arena_id="c") == pytest.approx(125)
    assert rates.metrics(0.0)["links_measured"] == 1


def test_a_link_that_fails_is_slow_for_a_while_and_then_tried_again() -> None:
    rates = LinkRates(PRIOR)
    rates.learn("b", [fetched(0, 10.0)], 0.0)
    assert rate(rates) < 1
    assert rate(rates, now_s=900.0) > 60


def test_a_change_of_a_links_rate_is_followed() -> None:
    rates = LinkRates(PRIOR)
    for busy_s in (0.01,) * 30 + (1.0,) * 6:
        rates.learn("b", [fetched(8 * MEGABYTE, busy_s)], 0.0)
    assert rate(rates) < 15


@given(
    num_bytes=st.floats(0, 1e10),
    last_part=st.floats(0, 1),
    later_ms=st.floats(0, 1e5),
)
def test_what_crosses_while_it_is_computed_is_exposed_by_its_last_chunk_at_least_and_never_more_than_alone(
    num_bytes: float, last_part: float, later_ms: float
) -> None:
    exposed_ms = PRIOR.exposed_ms(num_bytes, last_part * num_bytes, later_ms)
    assert PRIOR.transfer_ms(last_part * num_bytes) <= exposed_ms + 1e-6
    assert exposed_ms <= PRIOR.transfer_ms(num_bytes) + 1e-6


def test_links_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weir.scheduling.routing.links._MAX_LINKS", 3)
    rates = LinkRates(PRIOR)
    for number in range(9):
        rates.learn(f"b{number}", [fetched(MEGABYTE, 1.0)], 0.0)
    assert len(rates) == 3
    assert rate(rates, arena_id="b8") < rate(rates, arena_id="b0")
