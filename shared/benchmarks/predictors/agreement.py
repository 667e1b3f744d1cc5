"""Kendall's tau with an interval that is honest about the prompts that happened to be asked.

The spread over splits of one set of prompts says nothing about other prompts. The jackknife does: tau is computed
without each group of samples in turn (a group is what is drawn together, such as the answers to one prompt), and what
that changes gives the standard error (Efron, Tibshirani: "An Introduction to the Bootstrap", chapter 11). Differences
of taus over the same samples have an interval of their own, which is much narrower than that of either.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_NORMAL_95 = 1.959964

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Agreement:
    """`value`, and `left_out` [groups]: what it would be without each group."""

    value: float
    left_out: Doubles

    @property
    def half_width(self) -> float:
        """Of the 95 % interval."""
        num = len(self.left_out)
        squares = float(np.square(self.left_out - self.left_out.mean()).sum())
        return _NORMAL_95 * math.sqrt((num - 1) / num * squares)

    def minus(self, other: "Agreement") -> "Agreement":
        """Of the same samples and groups."""
        return Agreement(self.value - other.value, self.left_out - other.left_out)


def mean_of(agreements: Sequence[Agreement]) -> Agreement:
    """Of the same samples and groups, with scores of other trainings."""
    return Agreement(
        float(np.mean([one.value for one in agreements])), np.mean([one.left_out for one in agreements], axis=0)
    )


def agreement(
    scores: npt.NDArray[np.generic], truth: npt.NDArray[np.generic], groups: npt.NDArray[np.int64]
) -> Agreement:
    """Kendall's tau-b of `scores` with `truth`, all [samples]; `groups` says what belongs together."""
    of_scores, of_truth = _signs(scores), _signs(truth)
    pairs = [_without_each(matrix, groups) for matrix in (of_scores * of_truth, of_scores**2, of_truth**2)]
    (both, both_left), (one, one_left), (other, other_left) = pairs
    return Agreement(float(_ratio(np.array(both), np.array(one * other))), _ratio(both_left, one_left * other_left))


def _ratio(both: Doubles, product: Doubles) -> Doubles:
    """0 where one side is all equal."""
    ratio: Doubles = np.where(product > 0, both / np.sqrt(np.where(product > 0, product, 1.0)), 0.0)
    return ratio


def _signs(values: npt.NDArray[np.generic]) -> npt.NDArray[np.float32]:
    numbers = values.astype(np.float64)
    signs: npt.NDArray[np.float32] = np.sign(numbers[:, None] - numbers[None, :]).astype(np.float32)
    return signs


def _without_each(matrix: npt.NDArray[np.float32], groups: npt.NDArray[np.int64]) -> tuple[float, Doubles]:
    """Sum of a symmetric matrix, and without the rows and columns of each group."""
    _, group_of = np.unique(groups, return_inverse=True)
    num_groups = int(group_of.max()) + 1
    row_sums = matrix.sum(axis=1, dtype=np.float64)
    total = float(row_sums.sum())
    of_group = np.bincount(group_of, weights=row_sums, minlength=num_groups)
    within = np.zeros(num_groups)
    for group in np.flatnonzero(np.bincount(group_of) > 1):
        members = np.flatnonzero(group_of == group)
        within[group] = matrix[np.ix_(members, members)].sum(dtype=np.float64)
    return total, total - 2 * of_group + within
