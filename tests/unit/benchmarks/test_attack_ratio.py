"""How far a ratio of two rows of `benchmarks.overload.attack` can be trusted."""

import random

import pytest

from benchmarks.overload.attack import ratio_interval


def rounds_of(seed: int, factor: float = 1.0) -> list[list[float]]:
    draw = random.Random(seed)
    return [[factor * draw.expovariate(20) for _ in range(50)] for _ in range(30)]


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_the_interval_has_the_true_ratio_in_it(factor: float) -> None:
    held = [
        least <= factor <= most
        for least, most in (ratio_interval(rounds_of(seed, factor), rounds_of(seed + 100)) for seed in range(8))
    ]
    assert sum(held) >= 6


def test_one_bad_round_of_many_widens_it_and_does_not_move_it_whole() -> None:
    usual = rounds_of(1)
    struck = [[10.0] * 50, *rounds_of(2)[1:]]
    least, most = ratio_interval(struck, usual)
    assert least < 2 < most
