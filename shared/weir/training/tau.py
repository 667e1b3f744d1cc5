"""How well one order agrees with another."""

import numpy as np
import numpy.typing as npt
from scipy.stats import kendalltau


def tau(one: npt.NDArray[np.generic], other: npt.NDArray[np.generic]) -> float:
    """Kendall's tau-b; 0 where all of one side are equal, so that nothing can be ranked."""
    value = float(kendalltau(one, other).statistic)
    return 0.0 if np.isnan(value) else value
