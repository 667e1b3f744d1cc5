"""A trained network's projection, moved into the token table: few dimensions in the file, the same scores.

Pooling is a mean, and the first layer is linear: projecting every token's vector first and then pooling is the same.
The directions kept are those in which the first layer looks at the pooled vector, so they are learned, unlike those of
a principal component analysis, which at the same size loses a part of what training has found.
"""

from dataclasses import replace

import numpy as np

from weir.policy.predictors.features import PromptFeatures
from weir.policy.predictors.ranker import Ranker
from weir.policy.predictors.token_table import TokenTable


def compress(table: TokenTable, ranker: Ranker, num_dims: int) -> tuple[TokenTable, Ranker]:
    """Both over `num_dims` learned directions. A table that is no wider already is returned as it is."""
    if table.num_dims <= num_dims:
        return table, ranker
    start = ranker.num_features - table.num_dims
    if start != PromptFeatures(table).num_features - table.num_dims:
        raise ValueError("the network was not trained on this table")
    scaled_table = table.vectors.astype(np.float32) * (table.scales / ranker.deviations[start:])
    left, sizes, right = np.linalg.svd(ranker.w1[start:].astype(np.float64), full_matrices=False)
    basis = left[:, :num_dims].astype(np.float32)
    vectors = scaled_table @ basis
    scales = np.maximum(np.abs(vectors).max(axis=0), 1e-12).astype(np.float32) / 127
    # in units in which the old input was clipped at 5 deviations: the new one is a sum of so many of them
    reach = np.float32(np.sqrt(table.num_dims))
    w1 = (sizes[:num_dims, None] * right[:num_dims]).astype(np.float32) * reach
    means = (ranker.means[start:] / ranker.deviations[start:]) @ basis
    smaller = replace(
        ranker,
        means=np.concatenate([ranker.means[:start], means]).astype(np.float32),
        deviations=np.concatenate([ranker.deviations[:start], np.full(num_dims, reach)]).astype(np.float32),
        w1=np.concatenate([ranker.w1[:start], w1]).astype(np.float32),
    )
    return replace(table, vectors=np.rint(vectors / scales).astype(np.int8), scales=scales), smaller
