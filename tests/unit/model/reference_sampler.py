"""The sampler's definition, token by token in plain Python floats."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from weir.core.sampling import SamplingParams

Logits = npt.NDArray[np.float32]


def adjusted_logits(
    logits: Logits, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], masked: Sequence[int] = ()
) -> list[float]:
    """Bias, penalties and mask. A masked token has -inf."""
    values = [float(value) for value in logits]
    for token_id, bias in params.logit_bias:
        values[token_id] += bias
    for token_id in {*prompt, *output}:
        value = values[token_id]
        values[token_id] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token_id, count in Counter(output).items():
        values[token_id] -= params.frequency_penalty * count + params.presence_penalty
    for token_id in masked:
        values[token_id] = -math.inf
    return values


def kept_tokens(values: Sequence[float], params: SamplingParams) -> dict[int, float]:
    """The probability of each token that may be sampled, most likely first."""
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    if params.is_greedy:
        return {order[0]: 1.0}
    if params.top_k:
        order = order[: params.top_k]
    weights = [math.exp((values[token] - values[order[0]]) / params.temperature) for token in order]
    total = sum(weights)
    kept: dict[int, float] = {}
    for token, weight in zip(order, weights, strict=True):
        if kept and sum(kept.values()) >= params.top_p * total:
            break
        kept[token] = weight
    kept = {token: weight for token, weight in kept.items() if weight >= params.min_p}
    mass = sum(kept.values())
    return {token: weight / mass for token, weight in kept.items()}


def log_softmax(logits: Logits) -> list[float]:
    values = [float(value) for value in logits]
    highest = max(values)
    log_total = highest + math.log(sum(math.exp(value - highest) for value in values))
    return [value - log_total for value in values]
