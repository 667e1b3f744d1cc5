"""Guaranteed shares of pages, and slots of a decode worker."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.scheduling.limits import CoreLimits, LaneLimits
from weir.scheduling.memory_fit import LaneShares
from weir.scheduling.pools import slot_bound
from weir.scheduling.request import PriorityKey


def make_limits(*shares: float, lent_share: float = 1.0) -> CoreLimits:
    names = ("high", "middle", "low")
    lanes = tuple(LaneLimits(name, 9, 9.0, guaranteed_share=share) for name, share in zip(names, shares, strict=False))
    return CoreLimits(lanes=lanes, default_lane="high", lent_share=lent_share)


@pytest.mark.parametrize(
    ("used", "opened"),
    [
        ({}, {"high": 100, "middle": 100, "low": 100}),
        ({"low": 90}, {"high": 30, "middle": 10, "low": 10}),
        ({"low": 100}, {"high": 30, "middle": 10, "low": 0}),
        ({"high": 100}, {"high": 0, "middle": 0, "low": 0}),
        ({"high": 30, "low": 70}, {"high": 0, "middle": 10, "low": 0}),
        ({"high": 25, "low": 75}, {"high": 5, "middle": 10, "low": 0}),
        ({"middle": 40, "low": 60}, {"high": 30, "middle": 0, "low": 0}),
        ({"low": 95, "gone": 10}, {"high": 30, "middle": 10, "low": 0}),
    ],
)
def test_idle_guarantees_are_lent_and_taken_back_from_the_less_urgent(
    used: dict[str, int], opened: dict[str, int]
) -> None:
    limits = make_limits(0.3, 0.1, 0.0)
    assert {lane: LaneShares(limits).open_to(lane, used, 100) for lane in opened} == opened


def test_what_is_not_lent_stays_idle() -> None:
    limits = make_limits(0.3, 0.1, 0.0, lent_share=0.0)
    assert [LaneShares(limits).open_to(lane, {}, 100) for lane in ("high", "middle", "low")] == [90, 70, 60]
    assert LaneShares(limits).open_to("low", {"high": 20}, 100) == 60
    assert LaneShares(make_limits(0.3, 0.1, 0.0)).open_to("low", {"high": 20}, 100, wanting=("high", "low")) == 70
    half = make_limits(0.3, 0.1, 0.0, lent_share=0.5)
    assert LaneShares(half).open_to("low", {}, 100) == 80


def test_guarantees_are_parts_of_each_arena() -> None:
    shares = LaneShares(make_limits(0.3, 0.1, 0.0))
    for num_pages in (100, 1000, 100):
        assert shares.guaranteed(num_pages) == {"high": 0.3 * num_pages, "middle": 0.1 * num_pages, "low": 0}


def test_what_is_lent_does_not_depend_on_the_order_of_lanes() -> None:
    opened = set()
    for shares in itertools.permutations((0.126, 0.188, 0.157, 0.079)):
        lanes = tuple(LaneLimits(f"lane{n}", 9, 9.0, guaranteed_share=share) for n, share in enumerate((0.0, *shares)))
        limits = CoreLimits(lanes=lanes, default_lane="lane0", lent_share=0.26)
        opened.add(LaneShares(limits).open_to("lane0", {}, 1000))
    assert opened == {593}


@given(
    st.lists(st.floats(0, 1 / 3), min_size=3, max_size=3),
    st.lists(st.integers(0, 60), min_size=3, max_size=3),
    st.floats(0, 1),
)
def test_an_owner_inside_its_guarantee_gets_it_unless_the_more_urgent_have_it(
    shares: list[float], used: list[int], lent_share: float
) -> None:
    limits = make_limits(*shares, lent_share=lent_share)
    names = [lane.name for lane in limits.lanes]
    used_by_lane = dict(zip(names, used, strict=True))
    for index, name in enumerate(names):
        opened = LaneShares(limits).open_to(name, used_by_lane, 100)
        owed = LaneShares(limits).guaranteed(100)[name] - used_by_lane[name]
        used_above = sum(max(used_by_lane[n], LaneShares(limits).guaranteed(100)[n]) for n in names[:index])
        used_below = sum(min(used_by_lane[n], LaneShares(limits).guaranteed(100)[n]) for n in names[index + 1 :])
        assert opened >= min(owed, 100 - used_above - used_below - used_by_lane[name])
        num_free = 100 - sum(used)
        assert opened <= max(num_free, owed, 0)


def has_slot(priority: PriorityKey, priorities: list[PriorityKey], max_num_seqs: int, slot_overcommit: float) -> bool:
    return priority < slot_bound(priorities, max_num_seqs, slot_overcommit)


def test_all_slots_reserved_a_more_urgent_request_still_gets_one() -> None:
    batch, standard, urgent = (0, 0.0), (-1, 0.0), (-2, 0.0)
    assert has_slot(batch, [batch], 2, 1.0)
    assert not has_slot(batch, [batch, batch], 2, 1.0)
    assert has_slot(urgent, [batch, batch], 2, 1.0)
    assert has_slot(urgent, [urgent, batch, batch], 2, 1.0)
    assert not has_slot(urgent, [urgent, urgent, batch], 2, 1.0), "two more urgent ones are computed there already"
    assert not has_slot(urgent, [standard, batch, batch, batch], 2, 1.0), "as many are paused as may"
    assert not has_slot(urgent, [batch, batch], 2, 0.0)
    assert has_slot(urgent, [batch], 1, 0.5), "a part of a slot is one"


def test_inside_a_lane_only_a_better_rank_gets_a_slot_over_the_number() -> None:
    assert has_slot((0, 1.0), [(0, 0.5), (0, 2.0)], 2, 0.5)
    assert not has_slot((0, 2.0), [(0, 0.5), (0, 2.0)], 2, 0.5)
