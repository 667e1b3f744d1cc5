"""Trains a ranking network with ListMLE, as an ensemble in which each member leaves out another part of the samples.

So every sample is scored once by a member that has not seen it: that gives an honest tau, and an honest map from
scores to tokens, without keeping samples away from the training. The method is that of Fu et al., arXiv 2408.15792, the
loss that of Xia et al., ICML 2008.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from weir.policy.predictors.features import Floats, PromptFeatures
from weir.policy.predictors.predictor import Ranker
from weir.policy.predictors.token_table import TokenTable
from weir.training.samples import Samples, tau

MIN_SAMPLES = 100
LABEL_CEILING = 8192
LABEL_BUCKET = 10
"""Tokens; lengths of one bucket count as equal."""
_UNSEEN = 1e9
"""The deviation of a feature that is the same in all samples."""


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


@dataclass(frozen=True, slots=True)
class RankingSettings:
    """Found on alpaca_eval outputs of three models (see `benchmarks.predictors`); lists of 32 as in the paper."""

    num_members: int = 5
    num_hidden: int = 32
    num_epochs: int = 15
    least_steps: int = 200
    list_size: int = 32
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    input_dropout: float = 0.1
    hidden_dropout: float = 0.3
    num_knots: int = 12
    seed: int = 0


@dataclass(frozen=True)
class TrainedRanker:
    """`held_out_tau`: over samples scored by the member that had not seen them."""

    ranker: Ranker
    held_out_tau: float


def train_ranker(samples: Samples, settings: RankingSettings | None = None) -> TrainedRanker:
    """The same samples and settings give the same network. Raises ValueError for fewer than MIN_SAMPLES samples."""
    settings = settings or RankingSettings()
    if len(samples) < MIN_SAMPLES:
        raise ValueError(f"{len(samples)} samples; a ranking network needs {MIN_SAMPLES} at least")
    means = samples.features.mean(axis=0)
    deviations = samples.features.std(axis=0)
    # what never varied has weights that nothing has trained: whatever it is later, it must count for nothing
    deviations = np.where(deviations > 1e-6, deviations, _UNSEEN).astype(np.float32)
    inputs = torch.from_numpy(np.clip((samples.features - means) / deviations, -5, 5).astype(np.float32))
    lengths = torch.from_numpy(samples.num_output_tokens)
    member_of = np.random.default_rng(settings.seed).permutation(len(samples)) % settings.num_members
    networks: list[_Member] = []
    held_out = np.zeros(len(samples), np.float32)
    for member in range(settings.num_members):
        kept = torch.from_numpy(np.flatnonzero(member_of != member))
        network = _train_member(inputs[kept], lengths[kept], settings, settings.seed * 1000 + member)
        left_out = np.flatnonzero(member_of == member)
        with torch.no_grad():
            held_out[left_out] = network(inputs[torch.from_numpy(left_out)]).numpy()
        networks.append(network)
    score_knots, token_knots = knots_of(held_out, samples.num_output_tokens, settings.num_knots)
    ranker = Ranker(
        means=means.astype(np.float32),
        deviations=deviations,
        **_side_by_side(networks),
        score_knots=score_knots,
        token_knots=token_knots,
    )
    return TrainedRanker(ranker, tau(-held_out, samples.num_output_tokens))


def knots_of(scores: Floats, num_output_tokens: npt.NDArray[np.int64], num_knots: int) -> tuple[Floats, Floats]:
    """Mean length in groups of equal size by score, made to fall; scores rise."""
    order = np.argsort(scores, kind="stable")
    groups = np.array_split(order, min(num_knots, len(order)))
    centres = np.array([scores[group].mean() for group in groups], np.float64)
    means = [float(num_output_tokens[group].mean()) for group in groups]
    fallen = np.maximum(1.0, _falling(means, [len(group) for group in groups]))
    apart = np.concatenate([[True], np.diff(centres.astype(np.float32)) > 0])
    score_knots, token_knots = centres[apart].astype(np.float32), fallen[apart].astype(np.float32)
    if len(score_knots) == 1:
        score_knots = np.concatenate([score_knots, np.nextafter(score_knots, np.float32(np.inf))])
        token_knots = np.repeat(token_knots, 2)
    return score_knots, token_knots


def _falling(means: list[float], weights: list[int]) -> npt.NDArray[np.float64]:
    """The nearest sequence that does not rise: neighbours that do are pooled."""
    pools: list[tuple[float, int, int]] = []  # mean, weight, members
    for mean, weight in zip(means, weights, strict=True):
        pools.append((mean, weight, 1))
        while len(pools) > 1 and pools[-1][0] > pools[-2][0]:
            (late, late_weight, late_members), (early, early_weight, early_members) = pools.pop(), pools.pop()
            total = early_weight + late_weight
            mixed = (early * early_weight + late * late_weight) / total
            pools.append((mixed, total, early_members + late_members))
    return np.concatenate([np.full(members, mean) for mean, _, members in pools])


class _Member(torch.nn.Module):
    """One network of the ensemble."""

    def __init__(self, num_inputs: int, settings: RankingSettings) -> None:
        super().__init__()
        self._drop_input = torch.nn.Dropout(settings.input_dropout)
        self._drop_hidden = torch.nn.Dropout(settings.hidden_dropout)
        self.hidden = torch.nn.Linear(num_inputs, settings.num_hidden)
        self.last = torch.nn.Linear(settings.num_hidden, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.hidden(self._drop_input(inputs)))
        scores: torch.Tensor = self.last(self._drop_hidden(hidden)).squeeze(1)
        return scores


def _train_member(inputs: torch.Tensor, lengths: torch.Tensor, settings: RankingSettings, seed: int) -> "_Member":
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = _Member(inputs.shape[1], settings)
        optimizer = torch.optim.AdamW(
            network.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay
        )
        labels = labels_of(lengths)
        size = min(settings.list_size, len(labels))
        lists_an_epoch = len(labels) // size
        num_steps = max(settings.least_steps, settings.num_epochs * lists_an_epoch)
        step = 0
        while step < num_steps:
            order = torch.randperm(len(labels))
            for start in range(0, lists_an_epoch * size, size):
                chosen = order[start : start + size]
                loss = listmle_loss(network(inputs[chosen]), labels[chosen])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                for group in optimizer.param_groups:
                    group["lr"] = settings.learning_rate * max(0.0, 1 - step / num_steps)
                optimizer.step()
                step += 1
    return network.eval()


def _side_by_side(networks: list["_Member"]) -> dict[str, Floats]:
    """One network whose score is the mean of theirs."""
    hidden = [network.hidden for network in networks]
    last = [network.last for network in networks]
    w1 = np.concatenate([layer.weight.detach().numpy().T for layer in hidden], axis=1)
    b1 = np.concatenate([layer.bias.detach().numpy() for layer in hidden])
    w2 = np.concatenate([layer.weight.detach().numpy()[0] for layer in last]) / len(networks)
    offset = float(np.mean([layer.bias.item() for layer in last]))
    # a unit that is always 1 holds the mean of the members' offsets, so that scores mean what the knots say
    return {
        "w1": np.concatenate([w1, np.zeros((len(w1), 1), np.float32)], axis=1).astype(np.float32),
        "b1": np.append(b1, np.float32(1)).astype(np.float32),
        "w2": np.append(w2, np.float32(offset)).astype(np.float32),
    }


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
