"""The random number of a draw, without a compiler."""

import numpy as np


def philox_uniform(seed: int, output_index: int) -> float:
    """In [0, 1): the first number of numpy's Philox4x64-10 keyed by both (Salmon et al., 2011).

    Any machine makes the same number for the same place; `weir.ops.sampling.cpu.uniform_of` is the same, compiled.
    """
    key = np.array([seed, output_index], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key)).random())
