"""The search for the cheapest pools, against trying all of them."""

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from weir.sim.planning import Plan, PlanLimits, PoolSizes, Prices, search
from weir.sim.results.metrics import Estimate


class Modelled:
    """Attainment from how much of the work each pool can take; counts how often it is asked."""

    def __init__(self, prefill_need: float, decode_need: float, local_need: float) -> None:
        self._prefill_need = prefill_need
        self._decode_need = decode_need
        self._local_need = local_need
        self.asked: Counter[PoolSizes] = Counter()

    def share(self, pools: PoolSizes) -> float:
        if pools.num_local:
            return 0.99 * min(1.0, pools.num_local / self._local_need)
        return 0.99 * min(1.0, pools.num_prefill / self._prefill_need) * min(1.0, pools.num_decode / self._decode_need)

    def __call__(self, pools: PoolSizes) -> Estimate:
        self.asked[pools] += 1
        share = self.share(pools)
        return Estimate(share, share - 0.01, share + 0.01, 3)


def splits(most: int) -> Iterator[PoolSizes]:
    return (PoolSizes(p, n - p) for n in range(2, most + 1) for p in range(1, n))


NEEDS = st.floats(0.1, 14.0)
PRICES = st.sampled_from([0.5, 1.0, 1.5, 2.0])


@given(NEEDS, NEEDS, NEEDS, st.floats(0, 1))
@example(1.0, 1.0, 1.1, 0.5)
def test_with_equal_prices_the_fewest_workers_are_found(
    prefill: float, decode: float, local: float, share: float
) -> None:
    judge = Modelled(prefill, decode, local)
    plan = search(judge, PlanLimits(max_workers=20, prefill_share=share))
    fewest = min((pools.num_workers for pools in splits(20) if judge.share(pools) >= 0.9), default=None)
    assert (plan.best_split.pools.num_workers if plan.best_split else None) == fewest
    assert plan.best_local is not None
    # Asked of the judge itself: local * 0.9 / 0.99 rounds to the other side where the need is a multiple of 1.1.
    assert plan.best_local.pools.num_local == min(n for n in range(1, 21) if judge.share(PoolSizes(num_local=n)) >= 0.9)


@given(NEEDS, NEEDS, PRICES, PRICES)
def test_with_unequal_prices_nothing_near_is_cheaper(
    prefill: float, decode: float, prefill_price: float, decode_price: float
) -> None:
    judge = Modelled(prefill, decode, 1.0)
    prices = Prices(prefill_price, decode_price)
    plan = search(judge, PlanLimits(max_workers=30, prices=prices))
    if plan.best_split is None:
        assert all(judge.share(pools) < 0.9 for pools in splits(30))
        return
    cheapest = min(prices.cost(pools) for pools in splits(30) if judge.share(pools) >= 0.9)
    assert judge.share(plan.best_split.pools) >= 0.9
    assert plan.best_split.cost <= cheapest + max(prefill_price, decode_price)


def tried(plan: Plan) -> set[PoolSizes]:
    return {candidate.pools for candidate in plan.candidates}


def test_nothing_is_judged_twice_and_few_are_judged_at_all() -> None:
    judge = Modelled(9.0, 14.0, 20.0)
    plan = search(judge, PlanLimits(max_workers=64))
    assert set(judge.asked.values()) == {1}
    assert tried(plan) == set(judge.asked)
    assert len(judge.asked) < 45


def test_what_no_number_of_workers_can_do_is_said_so() -> None:
    plan = search(lambda pools: Estimate(0.5, 0.4, 0.6, 3), PlanLimits(max_workers=12))
    assert (plan.best, plan.best_split, plan.best_local) == (None, None, None)
    assert max(pools.num_workers for pools in tried(plan)) == 12


def test_the_cheaper_of_split_and_colocated_is_named_and_colocated_on_a_tie() -> None:
    assert (
        search(Modelled(2.0, 2.0, 3.0), PlanLimits()).best == search(Modelled(2.0, 2.0, 3.0), PlanLimits()).best_local
    )
    best = search(Modelled(2.0, 2.0, 4.0), PlanLimits(prices=Prices(local=1.01))).best
    assert best is not None
    assert str(best.pools) == "2 prefill + 2 decode"
    tie = search(Modelled(2.0, 2.0, 4.0), PlanLimits()).best
    assert tie is not None
    assert str(tie.pools) == "4 colocated"


def test_an_interval_below_the_target_does_not_spoil_a_mean_above_it() -> None:
    plan = search(lambda pools: Estimate(0.91, 0.80, 1.0, 3), PlanLimits())
    assert plan.best is not None
    assert plan.best.pools == PoolSizes(num_local=1)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: PlanLimits(target=0), "target 0"),
        (lambda: PlanLimits(max_workers=0), "max_workers 0"),
        (lambda: PlanLimits(prefill_share=2), "prefill_share 2"),
        (lambda: Prices(decode=0), "price of decode 0"),
    ],
)
def test_what_cannot_be_planned_is_named(make: object, named: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=named):
        make()
