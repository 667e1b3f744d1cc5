"""ListMLE: the loss of a ranking, as in Fu et al., arXiv 2408.15792 (the loss: Xia et al., ICML 2008)."""

import torch

LABEL_CEILING = 8192
LABEL_BUCKET = 10
"""Tokens; lengths of one bucket count as equal."""


def labels_of(num_output_tokens: torch.Tensor) -> torch.Tensor:
    """Higher is shorter: lengths bucketed and inverted."""
    clipped = num_output_tokens.clamp(max=LABEL_CEILING)
    return torch.div(LABEL_CEILING - clipped, LABEL_BUCKET, rounding_mode="floor")


def listmle_loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Minus the mean log-likelihood, a position, of the order by falling label under a Plackett-Luce model.

    Both are [list]. Items of one label come in the order in which they stand: shuffle lists.
    """
    ordered = scores[torch.argsort(labels, descending=True, stable=True)]
    still_to_place = torch.logcumsumexp(ordered.flip(0), dim=0).flip(0)
    return (still_to_place - ordered).mean()
