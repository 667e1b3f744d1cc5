"""Greedy and temperature sampling in plain torch."""

import torch

NOT_A_NUMBER = -1


def sample(logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """One token id a row, int32; NOT_A_NUMBER for a row with a NaN or infinite logit.

    `logits` fp32 [rows, vocabulary]; `temperatures` fp32 [rows], 0 is greedy (of equal logits the lowest id);
    `uniforms` fp64 [rows] in [0, 1): the token at which the cumulative distribution passes it, in order of ids, as
    `weir.model.sampler` does without top-k, top-p and min-p.
    """
    token_ids = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    for row in range(logits.shape[0]):
        token_ids[row] = _sample_row(logits[row], temperatures[row].item(), uniforms[row].item())
    return token_ids


def _sample_row(logits: torch.Tensor, temperature: float, uniform: float) -> int:
    if not bool(torch.isfinite(logits).all()):
        return NOT_A_NUMBER
    if temperature == 0.0:
        return int((logits == logits.max()).nonzero()[0])
    shifted = logits.double() - logits.double().max()
    cumulative = (shifted / temperature).exp().cumsum(0)
    place = int((cumulative <= uniform * cumulative[-1]).sum())
    # rounding can carry the product up to the total: take the last token that has any weight
    return min(place, int((cumulative < cumulative[-1]).sum()))
