"""Decisions of the planner: on a load that does not change, on one that does, and under everything that can be seen."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.planner.planner_world import SETTINGS, TWO_EACH, FormulaCapacity, World, calm

from weir.core.roles import WORKER_ROLES
from weir.planner.decision import Decision, Reason, Switch
from weir.planner.observation import Observation, PoolCount, Pools, other_role
from weir.planner.planner import Planner
from weir.planner.settings import PlannerSettings

NO_SWITCH = replace(SETTINGS, may_switch=False)
KEEPING = replace(NO_SWITCH, keeps_orders=True)


def planner_of(settings: PlannerSettings = NO_SWITCH, capacity: FormulaCapacity | None = None) -> Planner:
    return Planner(settings, capacity or FormulaCapacity())


def decisions_of(planner: Planner, *seen: Observation) -> list[Decision]:
    return [decision for one in seen if (decision := planner.decide(one)) is not None]


def after_a_calm_minute(planner: Planner, pools: Pools = TWO_EACH, rate_a_s: float = 1.0) -> float:
    """Returns when it ends."""
    at_s = 0.0
    while at_s < SETTINGS.window_s:
        at_s += SETTINGS.tick_s
        planner.decide(calm(at_s, pools, rate_a_s))
    return at_s


def ticks(at_s: float, num: int, **values: object) -> list[Observation]:
    return [
        replace(calm(at_s + SETTINGS.tick_s * (number + 1)), **values)  # type: ignore[arg-type]
        for number in range(num)
    ]


def test_nothing_is_said_before_a_window_was_seen() -> None:
    planner = planner_of()
    assert decisions_of(planner, *(calm(5.0 * number) for number in range(1, 10))) == []
    [first] = decisions_of(planner, calm(50.0), calm(55.0))[:1]
    assert (first.number, first.prefill.delta, first.decode.delta) == (1, 0, 0)


@pytest.mark.parametrize(
    ("values", "prefill", "decode"),
    [
        ({"num_backlog_tokens": 2500.0}, Reason.BACKLOG, Reason.HOLD),
        ({"booked_share": 0.9}, Reason.HOLD, Reason.BOOKED),
        ({"num_itl_met": 3}, Reason.HOLD, Reason.ITL),
        # Prompts wait for a decode worker's pages: more prefill workers would wait as well.
        ({"num_backlog_tokens": 2500.0, "booked_share": 0.9}, Reason.HOLD, Reason.BOOKED),
        ({"num_backlog_tokens": 1900.0, "booked_share": 0.84}, Reason.HOLD, Reason.HOLD),
    ],
)
def test_pressure_of_three_ticks_asks_for_one_worker_more(
    values: dict[str, float], prefill: Reason, decode: Reason
) -> None:
    planner = planner_of()
    at_s = after_a_calm_minute(planner)
    two, third = decisions_of(planner, *ticks(at_s, 2, **values)), decisions_of(planner, *ticks(at_s + 10, 1, **values))
    assert all((one.prefill.delta, one.decode.delta) == (0, 0) for one in two)
    assert (third[0].prefill.reason, third[0].decode.reason) == (prefill, decode)
    assert third[0].prefill.delta == (prefill is not Reason.HOLD)
    assert third[0].decode.delta == (decode is not Reason.HOLD)


def test_a_quiet_tick_between_begins_the_count_anew() -> None:
    planner = planner_of()
    at_s = after_a_calm_minute(planner)
    pressed = {"num_backlog_tokens": 9999.0}
    seen = [*ticks(at_s, 2, **pressed), *ticks(at_s + 10, 1), *ticks(at_s + 15, 2, **pressed)]
    assert all(one.prefill.delta == 0 for one in decisions_of(planner, *seen))


def test_a_rate_that_rises_is_met_before_anybody_waits() -> None:
    world = World(planner_of(), lambda at_s: 1.0 + at_s / 200, Pools(1, 1))
    world.run(1200.0)
    met = [one.prefill.serving + one.prefill.starting for one in world.seen]
    assert met[-1] >= 4
    assert max(one.num_backlog_tokens for one in world.seen if one.at_s > 400) < 2000
    assert Reason.FLOOR in {one.prefill.reason for one in world.decisions}


@pytest.mark.parametrize("rate_a_s", [0.0, 1.0, 2.7, 9.0])
@pytest.mark.parametrize("settings", [NO_SWITCH, SETTINGS], ids=["no switch", "switch"])
@pytest.mark.parametrize("pools", [Pools(1, 1), Pools(2, 6), Pools(9, 3)], ids=str)
def test_a_load_that_does_not_change_ends_in_pools_that_do_not(
    rate_a_s: float, settings: PlannerSettings, pools: Pools
) -> None:
    world = World(planner_of(settings), lambda at_s: rate_a_s, pools)
    world.run(5000.0)
    late = [one for one in world.decisions if one.at_s > 4000]
    assert not any(one.is_change for one in late)
    assert world.decisions[-1].num_reversals == 0
    for role in WORKER_ROLES:
        signs = [math.copysign(1, one.of(role).delta) for one in world.decisions if one.of(role).delta]
        assert sum(a != b for a, b in pairwise(signs)) <= 1
    final = world.seen[-1].pools
    load = Pools(*(world.decisions[-1].of(role).floor for role in WORKER_ROLES))
    assert final.prefill >= load.prefill
    assert final.decode >= load.decode
    assert sum(final) <= sum(load) + 3, f"{final} for {load}"


def test_a_number_for_an_autoscaler_does_not_fall_while_what_was_ordered_may_load() -> None:
    planner = planner_of(KEEPING)
    at_s = after_a_calm_minute(planner)
    [ordered] = decisions_of(planner, *ticks(at_s, 3, num_backlog_tokens=9999.0))[2:]
    assert (ordered.prefill.wanted, ordered.prefill.reason) == (3, Reason.BACKLOG)
    calm_again = decisions_of(planner, *ticks(at_s + 15, 13))
    assert [one.prefill.wanted for one in calm_again] == [3] * 11 + [2] * 2
    assert {one.prefill.reason for one in calm_again} == {Reason.KEPT, Reason.HOLD}
    assert {one.decode.wanted for one in calm_again} == {2}


def test_a_worker_that_restarts_is_still_wanted() -> None:
    planner = planner_of(KEEPING)
    at_s = after_a_calm_minute(planner)
    gone = decisions_of(planner, *ticks(at_s, 5, decode=PoolCount(1)))
    assert {one.decode.wanted for one in gone} == {2}
    back = decisions_of(planner, *ticks(at_s + 25, 30))
    assert {(one.decode.wanted, one.decode.delta) for one in back} == {(2, 0)}


def test_a_worker_to_spare_is_not_kept() -> None:
    world = World(planner_of(KEEPING), lambda at_s: 1.0, Pools(4, 1), tells=False)
    world.run(1300.0)
    wanted = [one.prefill.wanted for one in world.decisions]
    assert sorted(set(wanted), reverse=True) == [4, 3, 2, 1]
    assert wanted == sorted(wanted, reverse=True)


@pytest.mark.parametrize("tells", [True, False], ids=["begun", "scaled by others"])
def test_one_worker_less_must_hold_the_slo_for_five_minutes(tells: bool) -> None:
    world = World(planner_of(), lambda at_s: 1.0, Pools(4, 1), tells=tells, drain_s=0.1)
    world.run(1300.0)
    downs = [one.at_s for one in world.decisions if one.prefill.delta < 0]
    assert len(downs) == 3
    assert downs[0] >= SETTINGS.down_after_s
    assert all(later - earlier >= SETTINGS.down_after_s for earlier, later in pairwise(downs))


def test_a_worker_that_idles_changes_its_role_before_another_is_started() -> None:
    planner = planner_of(SETTINGS)
    at_s = after_a_calm_minute(planner, Pools(2, 3))
    pressed = ticks(at_s, 3, num_backlog_tokens=9999.0, booked_share=0.3, decode=PoolCount(3))
    decision = decisions_of(planner, *pressed)[-1]
    assert decision.switch == Switch("decode", "prefill")
    assert (decision.prefill.delta, decision.decode.delta) == (1, -1)
    assert (decision.num_to_start("prefill"), decision.num_to_start("decode")) == (0, 0)
    busy = [replace(one, booked_share=0.5) for one in pressed]
    planner = planner_of(SETTINGS)
    after_a_calm_minute(planner, Pools(2, 3))
    assert decisions_of(planner, *busy)[-1].switch is None, "two would be busier than those that give may be"


@pytest.mark.parametrize(
    ("pools", "rate_a_s", "least"),
    [(Pools(2, 1), 0.4, Pools(1, 1)), (Pools(2, 2), 2.0, Pools(1, 1)), (Pools(2, 2), 0.4, Pools(1, 2))],
    ids=["the last", "under its floor", "under the least"],
)
def test_a_pool_does_not_give_what_it_needs(pools: Pools, rate_a_s: float, least: Pools) -> None:
    planner = planner_of(replace(SETTINGS, least=least))
    at_s = after_a_calm_minute(planner, pools, rate_a_s)
    pressed = ticks(at_s, 3, num_backlog_tokens=9999.0, booked_share=0.1, decode=PoolCount(pools.decode))
    decision = decisions_of(planner, *pressed)[-1]
    assert decision.switch is None
    assert (decision.num_to_start("prefill"), decision.decode.delta) == (1, 0)


def test_after_a_switch_the_next_one_waits() -> None:
    planner = planner_of(SETTINGS)
    at_s = after_a_calm_minute(planner, Pools(2, 4))
    pressed = {"num_backlog_tokens": 9999.0, "booked_share": 0.1, "decode": PoolCount(4)}
    first = decisions_of(planner, *ticks(at_s, 3, **pressed))[-1]
    planner.begun(first)
    planner.switched_after(20.0)
    later = {**pressed, "prefill": PoolCount(3), "decode": PoolCount(3)}
    told = decisions_of(planner, *ticks(at_s + 15, 60, **later))
    assert next(one.at_s for one in told if one.switch is not None) == first.at_s + 200.0


def test_while_something_is_pending_nothing_more_is_asked_for() -> None:
    planner = planner_of()
    at_s = after_a_calm_minute(planner)
    pressed = {"num_backlog_tokens": 9999.0}
    decision = decisions_of(planner, *ticks(at_s, 3, **pressed))[-1]
    planner.begun(decision)
    unseen = decisions_of(planner, *ticks(at_s + 15, 3, **pressed))
    starting = decisions_of(planner, *ticks(at_s + 30, 3, **pressed, prefill=PoolCount(2, starting=1)))
    assert {one.prefill.reason for one in (*unseen, *starting)} == {Reason.PENDING}
    assert all(one.prefill.delta == 0 for one in (*unseen, *starting))
    serving = decisions_of(planner, *ticks(at_s + 45, 1, **pressed, prefill=PoolCount(3)))
    assert serving[-1].prefill.delta == 1


def test_who_only_advises_waits_for_nothing() -> None:
    planner = planner_of()
    at_s = after_a_calm_minute(planner)
    told = decisions_of(planner, *ticks(at_s, 40, num_backlog_tokens=9999.0))
    assert all(one.prefill.delta == 1 for one in told[2:])


def test_what_was_begun_and_never_came_is_begun_again() -> None:
    planner = planner_of()
    at_s = after_a_calm_minute(planner)
    pressed = {"num_backlog_tokens": 9999.0}
    planner.begun(decisions_of(planner, *ticks(at_s, 3, **pressed))[-1])
    told = decisions_of(planner, *ticks(at_s + 15, 40, **pressed))
    assert told[-1].prefill.delta == 1


def test_a_model_that_is_wrong_takes_nothing_away() -> None:
    world = World(planner_of(capacity=FormulaCapacity(ttft_s=1.9)), lambda at_s: 1.0, Pools(5, 5))
    world.run(3000.0)
    assert world.decisions[-1].is_fallback
    assert {one.prefill.delta for one in world.decisions} == {0}
    told = replace(NO_SWITCH, fallback=Pools(7, 6))
    world = World(planner_of(told, FormulaCapacity(ttft_s=1.9)), lambda at_s: 1.0, Pools(5, 5))
    world.run(1500.0)
    assert world.seen[-1].pools == Pools(7, 6)
    assert Reason.STATIC in {one.prefill.reason for one in world.decisions}


def test_a_pool_that_went_up_and_down_too_often_goes_down_no_more() -> None:
    calm_settings = replace(NO_SWITCH, down_after_s=60.0, max_reversals=2)
    world = World(planner_of(calm_settings), lambda at_s: 1.0 if at_s % 400 < 280 else 4.0, Pools(1, 1))
    world.run(4000.0)
    assert Reason.OSCILLATING in {one.of(role).reason for one in world.decisions for role in WORKER_ROLES}


counts = st.builds(PoolCount, st.integers(0, 14), st.integers(0, 3), st.integers(0, 3))


@st.composite
def observations(draw: st.DrawFn, at_s: float) -> Observation:
    num = draw(st.integers(0, 60))
    met = draw(st.integers(0, num))
    return replace(
        calm(at_s, rate_a_s=num / SETTINGS.tick_s),
        num_itl_met=met,
        sum_ttft_s=draw(st.floats(0, 500)),
        cached_share=draw(st.floats(0, 1)),
        num_backlog_tokens=draw(st.floats(0, 1e6)),
        booked_share=draw(st.floats(0, 1.5)),
        prefill=draw(counts),
        decode=draw(counts),
    )


bounds = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 8), st.integers(0, 8))


@settings(max_examples=40, deadline=None)
@given(st.data(), bounds, st.booleans())
def test_whatever_is_seen_the_rules_hold(data: st.DataObject, bounds: tuple[int, int, int, int], acts: bool) -> None:
    least = Pools(*bounds[:2])
    told = replace(SETTINGS, least=least, most=Pools(least.prefill + bounds[2], least.decode + bounds[3]))
    planner = planner_of(told)
    for number in range(1, data.draw(st.integers(13, 30))):
        seen = data.draw(observations(SETTINGS.tick_s * number))
        decision = planner.decide(seen)
        if decision is None:
            continue
        for role in WORKER_ROLES:
            pool, count = decision.of(role), seen.count(role)
            assert told.least.of(role) <= pool.wanted <= told.most.of(role) or pool.delta == 0
            if count.is_changing and told.least.of(role) <= count.num_to_be <= told.most.of(role):
                assert pool.delta >= 0
                assert pool.delta == 0 or pool.reason in (Reason.FLOOR, Reason.BOUND)
                assert pool.delta == 0 or count.draining == 0
        if decision.switch is not None:
            giver = seen.count(decision.switch.from_role)
            assert giver.serving >= 2
            assert not giver.is_changing
            assert decision.of(other_role(decision.switch.from_role)).delta >= 1
        if acts and decision.is_change:
            planner.begun(decision)


@settings(max_examples=40, deadline=None)
@given(
    st.floats(0.2, 8.0),
    st.floats(0.0, 8.0),
    st.floats(0, 3e4),
    st.floats(0, 3e4),
    st.floats(0.1, 0.84),
    st.floats(0, 0.5),
)
def test_who_has_more_to_do_wants_no_fewer(
    rate: float, more_rate: float, backlog: float, more_backlog: float, booked: float, more_booked: float
) -> None:
    def wants(rate_a_s: float, tokens: float, booked_share: float) -> Pools:
        planner = planner_of()
        told = None
        for number in range(1, 20):
            seen = replace(
                calm(5.0 * number, Pools(3, 3), rate_a_s), num_backlog_tokens=tokens, booked_share=booked_share
            )
            told = planner.decide(seen)
        assert told is not None
        return Pools(told.prefill.wanted, told.decode.wanted)

    less, more = wants(rate, backlog, booked), wants(rate + more_rate, backlog + more_backlog, booked)
    assert less.prefill <= more.prefill
    assert less.decode <= more.decode
    assert wants(rate, 0.0, booked).decode <= wants(rate, 0.0, booked + more_booked).decode


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"ttft_slo_s": 0.0}, "ttft_slo_s"),
        ({"target": 1.1}, "target"),
        ({"least": Pools(0, 1)}, "least"),
        ({"most": Pools(3, 0)}, "most"),
        ({"num_ticks": 0}, "num_ticks"),
        ({"down_factor": 0.9}, "down_factor"),
        ({"margin": 1.0}, "margin"),
    ],
)
def test_a_setting_that_cannot_be_is_named(values: dict[str, object], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        replace(SETTINGS, **values)  # type: ignore[arg-type]


def test_times_are_at_another_pace_and_slos_are_not() -> None:
    fast = SETTINGS.at_pace(0.1)
    assert fast.ttft_slo_s == 2.0
    assert [fast.window_s, fast.down_after_s] == pytest.approx([6.0, 30.0])
