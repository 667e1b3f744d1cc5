"""What hidden states of the built-in model say of output lengths, beside what predictors see today.

at the start    from the prompt alone: states of its last token, and their mean over its tokens
along the way   after some tokens of the answer: what is left of it (TRAIL: Shahout et al., arXiv 2410.01035)
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.predictors.agreement import Agreement, Doubles, agreement, mean_of
from benchmarks.predictors.hidden_states import AGES, LAYERS, StateTable
from benchmarks.predictors.measure import NUM_SIGNS
from benchmarks.predictors.probes import ProbeSettings, Views, network_held_out, ridge_held_out
from weir.policy.predictors.features import LENGTH_FEATURE, Floats
from weir.training.ranking import RankingSettings

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class AnsweredPrompts:
    """`features` [prompts, …] as predictors have them; `states` of the same prompts, of which ages but 0 are not looked
    at; `again` None: they were answered once."""

    name: str
    features: Floats
    last: Floats
    mean: Floats
    lengths: Ints
    again: Ints | None = None


@dataclass(frozen=True)
class StartResult:
    """Kendall's tau of held-out predictions, mean over the seeds. `chosen`: how often ridge took each view."""

    name: str
    num_prompts: int
    taus: Mapping[str, Agreement]
    chosen: Mapping[str, int]

    def gain(self, arm: str, base: str) -> Agreement:
        return self.taus[arm].minus(self.taus[base])


@dataclass(frozen=True)
class AgeResult:
    """Of the answers that were still going on after `age` tokens, what is left of them. `age` None: a queue of answers
    of all ages, each at one of them."""

    age: int | None
    num_answers: int
    taus: Mapping[str, Agreement]

    def gain(self, arm: str, base: str) -> Agreement:
        return self.taus[arm].minus(self.taus[base])


def measure_start(
    asked: AnsweredPrompts,
    seeds: Sequence[int],
    settings: ProbeSettings | None = None,
    ranking: RankingSettings | None = None,
) -> StartResult:
    """Every arm with the same folds."""
    settings, ranking = settings or ProbeSettings(), ranking or RankingSettings()
    lengths, groups = asked.lengths, np.arange(len(asked.lengths), dtype=np.int64)
    signs, embeddings = asked.features[:, :NUM_SIGNS], asked.features[:, NUM_SIGNS:]
    last, mean = views_of("last", asked.last), views_of("mean", asked.mean)
    ridges: Mapping[str, Views] = {
        "today, ridge": {"today": (signs, embeddings)},
        "last": last,
        "mean": mean,
        "last + today": {name: (*blocks, signs, embeddings) for name, blocks in last.items()},
    }
    found: dict[str, list[Agreement]] = {}
    chosen: Counter[str] = Counter()

    def note(arm: str, scores: npt.NDArray[np.generic]) -> None:
        found.setdefault(arm, []).append(agreement(scores, lengths, groups))

    def network(arm: str, seed: int, by_fold: Sequence[Floats]) -> None:
        note(arm, network_held_out(by_fold.__getitem__, lengths, groups, seed, settings.num_folds, ranking))

    for seed in seeds:
        held_out = {arm: ridge_held_out(views, lengths, groups, seed, settings) for arm, views in ridges.items()}
        for arm, one in held_out.items():
            note(arm, one.scores)
        picked = [name for name, _ in held_out["last"].chosen]
        chosen.update(picked)
        network("signs", seed, [signs] * settings.num_folds)
        network("today", seed, [asked.features] * settings.num_folds)
        network("last, network", seed, [last[name][0] for name in picked])
        network("last + today, network", seed, [np.hstack([last[name][0], asked.features]) for name in picked])
        note("length", asked.features[:, LENGTH_FEATURE])
        if asked.again is not None:
            note("twice", asked.again)
    return StartResult(asked.name, len(lengths), {arm: mean_of(some) for arm, some in found.items()}, chosen)


def views_of(kind: str, states: Floats) -> dict[str, Sequence[Floats]]:
    """`states` [samples, layers, hidden], of LAYERS."""
    return {f"{kind}, layer {layer}": (states[:, number],) for number, layer in enumerate(LAYERS)}


def measure_ages(
    features: Floats, states: StateTable, seeds: Sequence[int], settings: ProbeSettings | None = None
) -> list[AgeResult]:
    """`features` [prompts, …] by index. Answers to one prompt are held out together.

    start      predicted from the prompt by what predictors see today, all of the answer: nothing is learned on the way
    survived   the same features, but trained at this age on what is left of the answers that got so far
    first      the prompt's own last state, trained at this age
    now        the state of the last token at this age
    both       the two states side by side
    """
    settings = settings or ProbeSettings()
    today = features[states.index]
    signs, embeddings = today[:, :NUM_SIGNS], today[:, NUM_SIGNS:]
    found: dict[int | None, dict[str, list[Agreement]]] = {}
    for seed in seeds:
        whole = ridge_held_out({"today": (signs, embeddings)}, states.num_output_tokens, states.index, seed, settings)
        by_age: dict[int, dict[str, Doubles]] = {}
        for number, age in enumerate(AGES):
            rows = np.flatnonzero(states.num_output_tokens > age)
            left, groups = states.num_output_tokens[rows] - age, states.index[rows]
            arms: Mapping[str, Views] = {
                "survived": {"today": (signs[rows], embeddings[rows])},
                "first": views_of("first", states.last[rows, 0]),
                "now": views_of("now", states.last[rows, number]),
                "both": _side_by_side(states.last[rows, 0], states.last[rows, number]),
            }
            held_out = {arm: ridge_held_out(views, left, groups, seed, settings).scores for arm, views in arms.items()}
            by_age[age] = {arm: _spread_out(scores, rows, len(states.index)) for arm, scores in held_out.items()} | {
                "start": np.log(np.maximum(1.0, np.exp(whole.scores) - age)),
                "age": np.full(len(states.index), age),
            }
            for arm, scores in by_age[age].items():
                if arm != "age":
                    here = scores if arm != "start" else whole.scores
                    of_age = found.setdefault(age, {})
                    of_age.setdefault(arm, []).append(agreement(here[rows], left, groups))
        _mixed(states, by_age, seed, found.setdefault(None, {}))
    return [
        AgeResult(
            age,
            int((states.num_output_tokens > (age or 0)).sum()),
            {arm: mean_of(some) for arm, some in arms.items()},
        )
        for age, arms in found.items()
    ]


def _side_by_side(first: Floats, now: Floats) -> Views:
    return {f"both, layer {layer}": (first[:, number], now[:, number]) for number, layer in enumerate(LAYERS)}


def _mixed(
    states: StateTable, by_age: Mapping[int, Mapping[str, Doubles]], seed: int, found: dict[str, list[Agreement]]
) -> None:
    """A queue of all answers, each at a random one of the ages that it reached."""
    source = np.random.default_rng(seed)
    reached = (states.num_output_tokens[:, None] > np.array(AGES)).sum(axis=1)
    places = (source.random(len(reached)) * reached).astype(np.int64)
    ages = np.array(AGES)[places]
    left = states.num_output_tokens - ages
    for arm in ("start", "survived", "first", "now", "both", "age"):
        scores = np.stack([by_age[age][arm] for age in AGES])[places, np.arange(len(places))]
        found.setdefault(arm, []).append(agreement(scores, left, states.index))


def _spread_out(scores: Doubles, rows: Ints, num: int) -> Doubles:
    whole = np.full(num, np.nan)
    whole[rows] = scores
    return whole
