"""Draws tokens from logits. A row's draw depends on its own logits, its parameters and its output index only."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from weir.core.errors import InternalError
from weir.core.sampling import SamplingParams
from weir.engine.plan import SampleSpec

_FEW = 1024  # a nucleus is nearly always smaller; ordering only so many spares a sort of the vocabulary


def sample_rows(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[int]:
    """`logits` fp32 [rows, vocabulary], one spec a row.

    Raises:
        InternalError: a logit is NaN or infinite; no token of the step may be used then.
    """
    finite = torch.isfinite(logits).all(dim=-1)
    if not bool(finite.all()):
        rows = torch.nonzero(~finite).flatten().tolist()
        raise InternalError(
            f"the model computed NaN or infinite logits in {len(rows)} of {len(specs)} rows: {rows[:8]}"
        )
    token_ids: list[int] = logits.argmax(dim=-1).tolist()
    for row, spec in enumerate(specs):
        if not spec.params.is_greedy:
            token_ids[row] = draw(logits[row].numpy(), spec.params, spec.output_index)
    return token_ids


def uniform(seed: int, output_index: int) -> float:
    """In [0, 1), from Philox keyed by both numbers: any worker can make the number of any position."""
    key = np.array([seed, output_index], dtype=np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key)).random())


def draw(logits: npt.NDArray[np.float32], params: SamplingParams, output_index: int) -> int:
    """One token of one row, by inverting the cumulative distribution at `uniform(seed, output_index)`.

    Temperature first, then the `top_k` most likely, then the fewest of those whose probability is at least `top_p`.
    Among equal logits the lower token id is the likelier.
    """
    token_ids, weights = _candidates(logits, params)
    cumulative = np.cumsum(weights)
    total = cumulative[-1]
    place = int(np.searchsorted(cumulative, uniform(params.seed, output_index) * total, side="right"))
    # rounding can carry the product up to the total: take the last token that has any weight
    place = min(place, int(np.searchsorted(cumulative, total, side="left")))
    return int(token_ids[place])


def _candidates(
    logits: npt.NDArray[np.float32], params: SamplingParams
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Token ids and their unnormalised probabilities; in order of likelihood if anything was left out."""
    weights = _weights(logits, params.temperature)
    top_k = params.top_k if 0 < params.top_k < len(weights) else 0
    if top_k:
        order = _most_likely(logits, top_k)
    elif params.top_p < 1.0:
        order = _most_likely(logits, min(_FEW, len(weights)))
        if weights[order].sum() < params.top_p * weights.sum():
            order = _most_likely(logits, len(weights))
    else:
        return np.arange(len(weights)), weights
    if params.top_p < 1.0:
        cumulative = np.cumsum(weights[order])
        total = cumulative[-1] if top_k else weights.sum()
        order = order[: int(np.searchsorted(cumulative, params.top_p * total, side="left")) + 1]
    return order, weights[order]


def _weights(logits: npt.NDArray[np.float32], temperature: float) -> npt.NDArray[np.float64]:
    """exp((x - max) / temperature): the most likely token weighs 1, so nothing overflows however cold it is."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max()
    with np.errstate(over="ignore", under="ignore"):
        return np.exp(shifted / temperature)


def _most_likely(logits: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.int64]:
    """Token ids of the `count` greatest logits, greatest first, equal ones by id."""
    if count < len(logits):
        least = np.partition(logits, -count)[-count]
        kept = np.flatnonzero(logits >= least)
    else:
        kept = np.arange(len(logits))
    return kept[np.argsort(-logits[kept], kind="stable")][:count]
