"""Held-out predictions from features that are given as views, with everything chosen on the training folds alone.

A view is one candidate, such as the last token's state after 15 layers. Ridge regression on the logarithm of the length
picks view and penalty by the mean tau of inner folds; the ListMLE network then takes the picked view as it is. Every
prompt is predicted once a seed, by what was trained on other prompts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from benchmarks.predictors.agreement import Doubles
from weir.policy.predictors.features import Floats
from weir.training.ranking import RankingSettings, train_ranker
from weir.training.samples import Samples, tau

PENALTIES = tuple(float(value) for value in 10.0 ** np.arange(-2.0, 2.01, 0.5))
"""Times the mean square of a row of features, so that they mean the same for any number of features."""
_LARGEST = 5.0

Ints = npt.NDArray[np.int64]
Views = Mapping[str, Sequence[Floats]]
"""By name: blocks of features [samples, some], each of them scaled alone and then put side by side."""


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    num_folds: int = 5
    num_inner_folds: int = 4
    penalties: tuple[float, ...] = PENALTIES


@dataclass(frozen=True)
class HeldOut:
    """`scores` [samples]: predicted log lengths, comparable within a fold and nearly so between them; `chosen`: view
    and penalty of each fold."""

    scores: Doubles
    chosen: tuple[tuple[str, float], ...]


def fold_of(groups: Ints, num_folds: int, seed: int) -> Ints:
    """[samples]: the fold in which each is held out. A group is held out as one."""
    names, group_of = np.unique(groups, return_inverse=True)
    folds = np.random.default_rng(seed).permutation(len(names)) % num_folds
    of_samples: Ints = folds[group_of].astype(np.int64)
    return of_samples


def ridge_held_out(views: Views, lengths: Ints, groups: Ints, seed: int, settings: ProbeSettings) -> HeldOut:
    """Raises ValueError without views."""
    if not views:
        raise ValueError("views: there is none to choose from")
    folds = fold_of(groups, settings.num_folds, seed)
    scores = np.zeros(len(lengths))
    chosen: list[tuple[str, float]] = []
    for fold in range(settings.num_folds):
        kept, left_out = np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)
        name, penalty = choose(views, lengths, groups, kept, seed, settings)
        found = _ridge(views[name], _targets(lengths), kept, left_out, (penalty,))[:, 0]
        scores[left_out] = found
        chosen.append((name, penalty))
    return HeldOut(scores, tuple(chosen))


def choose(
    views: Views, lengths: Ints, groups: Ints, kept: Ints, seed: int, settings: ProbeSettings
) -> tuple[str, float]:
    """The view and penalty with the highest mean tau over inner folds of the samples `kept`."""
    inner = fold_of(groups[kept], settings.num_inner_folds, seed + 1)
    targets = _targets(lengths)
    best: tuple[float, str, float] | None = None
    for name, blocks in views.items():
        taus = np.zeros(len(settings.penalties))
        for fold in range(settings.num_inner_folds):
            rows, shown = kept[inner != fold], kept[inner == fold]
            found = _ridge(blocks, targets, rows, shown, settings.penalties)
            taus += [tau(column, lengths[shown]) for column in found.T]
        place = int(taus.argmax())
        if best is None or taus[place] > best[0]:
            best = (float(taus[place]), name, settings.penalties[place])
    assert best is not None
    return best[1], best[2]


def network_held_out(
    pick: Callable[[int], Floats], lengths: Ints, groups: Ints, seed: int, num_folds: int, settings: RankingSettings
) -> Doubles:
    """Scores [samples] of ListMLE networks, longer is higher, as deviations within each fold; `pick(fold)` gives the
    features [samples, some] to take for a fold."""
    folds = fold_of(groups, num_folds, seed)
    scores = np.zeros(len(lengths))
    for fold in range(num_folds):
        kept, left_out = np.flatnonzero(folds != fold), np.flatnonzero(folds == fold)
        features = np.ascontiguousarray(pick(fold), np.float32)
        ranker = train_ranker(Samples(features[kept], lengths[kept]), replace(settings, seed=seed * 10 + fold)).ranker
        found = -ranker.score(features[left_out]).astype(np.float64)
        scores[left_out] = (found - found.mean()) / max(1e-9, float(found.std()))
    return scores


def _targets(lengths: Ints) -> Doubles:
    return np.log(lengths.astype(np.float64))


def _ridge(blocks: Sequence[Floats], targets: Doubles, kept: Ints, shown: Ints, penalties: Sequence[float]) -> Doubles:
    """Predictions [shown, penalties]. In the dual form: there are more features than samples."""
    gram, cross = np.zeros((len(kept), len(kept))), np.zeros((len(shown), len(kept)))
    for block in blocks:
        mean, deviation = block[kept].mean(axis=0), block[kept].std(axis=0)
        deviation = np.where(deviation > 1e-6, deviation, 1.0)
        known = np.clip((block[kept] - mean) / deviation, -_LARGEST, _LARGEST)
        asked = np.clip((block[shown] - mean) / deviation, -_LARGEST, _LARGEST)
        gram += known @ known.T
        cross += asked @ known.T
    sizes, vectors = np.linalg.eigh(gram)
    sizes = np.maximum(sizes, 0.0)
    offset = targets[kept].mean()
    along = vectors.T @ (targets[kept] - offset)
    scale = max(float(sizes.mean()), 1e-12)
    weights = along[:, None] / (sizes[:, None] + np.array(penalties) * scale)
    predicted: Doubles = offset + cross @ (vectors @ weights)
    return predicted
