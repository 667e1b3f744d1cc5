"""How well output lengths are ranked from prompts alone, within each data set, and what it costs.

Held-out prompts, several splits of each data set. Beside the predictors stand two lines: the prompt's length alone,
and how well one answer ranks another to the same prompt (two seeds). The second is not a bound in the strict sense:
it has the noise of two draws, a prediction only that of one.
"""

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import numpy.typing as npt

from benchmarks.predictors.data import DataSet
from weir.policy.predictors.features import LENGTH_FEATURE, NUM_PLAIN, Floats, PromptFeatures
from weir.policy.predictors.predictor import Predictor
from weir.policy.predictors.token_table import SIGNS, TokenTable
from weir.training.forest import ForestSettings, fit_forest
from weir.training.make import FILE_DIMS
from weir.training.ranking import RankingSettings, compress, train_ranker
from weir.training.samples import Samples, tau

TRAINING_SHARE = 0.8
NUM_SIGNS = NUM_PLAIN + len(SIGNS)
"""Features that are no embeddings."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Over the splits."""

    mean: float
    deviation: float


@dataclass(frozen=True, slots=True)
class SetResult:
    """Kendall's tau with the true lengths, on held-out prompts. `twice` None: there is one answer a prompt.

    `ranking`: the network over all embeddings' dimensions; `in_file`: the same, reduced to what its file holds;
    `signs`: without embeddings; `embeddings`: without signs; `length_error`: mean |predicted - true| over the mean
    length, and `constant_error` the same for always saying the training mean.
    """

    name: str
    num_prompts: int
    mean_tokens: float
    prompt_length: Spread
    twice: Spread | None
    ranking: Spread
    in_file: Spread
    signs: Spread
    embeddings: Spread
    forest: Spread
    length_error: float
    constant_error: float

    @property
    def share_of_way(self) -> float | None:
        """From the prompt's length alone (0) to a second answer (1)."""
        if self.twice is None:
            return None
        way = self.twice.mean - self.prompt_length.mean
        return (self.in_file.mean - self.prompt_length.mean) / way if way > 0 else None


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds of one core, a prompt."""

    batch: int
    prompt_tokens: int
    median_ms: float
    p99_ms: float


@dataclass(frozen=True)
class PredictorsReport:
    """`pairs`: (model, model, tau) of different models' answers to the same prompts."""

    splits: int
    sets: tuple[SetResult, ...]
    pairs: tuple[tuple[str, str, float], ...]
    costs: tuple[Cost, ...]


def measure_group(
    sets: Sequence[DataSet], table: TokenTable, num_splits: int, settings: RankingSettings | None = None
) -> list[SetResult]:
    """Sets of one model: one predictor a split, trained on all of them, looked at within each."""
    features = PromptFeatures(table)
    rows = [features.of(data_set.prompts) for data_set in sets]
    splits = [_measure_split(sets, rows, table, split, settings or RankingSettings()) for split in range(num_splits)]
    return [_result(data_set, [split[i] for split in splits]) for i, data_set in enumerate(sets)]


def pairwise_tau(sets: Sequence[DataSet]) -> list[tuple[str, str, float]]:
    """Of models that answered the same prompts: where nobody was asked twice, how alike different models are."""
    pairs = [(one, other) for i, one in enumerate(sets) for other in sets[:i]]
    return [(one.group, other.group, tau(one.num_output_tokens, other.num_output_tokens)) for one, other in pairs]


def measure_cost(predictor: Predictor, prompts: Sequence[Sequence[int]], repeats: int = 200) -> list[Cost]:
    """In this thread, of the given prompts and of prompts of 512 and 4,096 tokens."""
    vocab = predictor.features.table.vocab_size
    kinds: list[tuple[int, Sequence[Sequence[int]]]] = [
        (round(statistics.mean(len(prompt) for prompt in prompts)), prompts),
        *((size, [[(7919 * i) % vocab for i in range(size)]]) for size in (512, 4096)),
    ]
    costs = []
    for num_tokens, some in kinds:
        for batch in (1, 8, 32):
            taken = []
            for number in range(repeats):
                asked = [some[(number * batch + i) % len(some)] for i in range(batch)]
                started_s = time.perf_counter()
                predictor.predict(asked)
                taken.append((time.perf_counter() - started_s) * 1e3 / batch)
            costs.append(Cost(batch, num_tokens, statistics.median(taken), float(np.percentile(taken, 99))))
    return costs


@dataclass(frozen=True, slots=True)
class ScoredLength:
    """A request for the simulator, with the prediction of one that has not seen its prompt."""

    num_prompt_tokens: int
    num_output_tokens: int
    score: float
    predicted_output_tokens: float


def scored_lengths(
    data_set: DataSet, table: TokenTable, num_parts: int = 5, seed: int = 0, settings: RankingSettings | None = None
) -> list[ScoredLength]:
    """Every prompt of a set, each part scored by a predictor that was trained on the other parts.

    Parts are scored by different networks, so scores are deviations from the mean of their part.
    """
    rows = PromptFeatures(table).of(data_set.prompts)
    lengths = data_set.num_output_tokens
    part_of = np.random.default_rng(seed).permutation(len(lengths)) % num_parts
    scores, predicted = np.zeros(len(lengths)), np.zeros(len(lengths))
    for part in range(num_parts):
        kept, left_out = np.flatnonzero(part_of != part), np.flatnonzero(part_of == part)
        part_settings = replace(settings or RankingSettings(), seed=seed * 10 + part)
        ranker = train_ranker(Samples(rows[kept], lengths[kept]), part_settings).ranker
        found = ranker.predict(rows[left_out])
        predicted[left_out] = found.output_tokens
        scores[left_out] = (found.scores - found.scores.mean()) / max(1e-9, float(found.scores.std()))
    return [
        ScoredLength(len(prompt), int(length), float(score), float(tokens))
        for prompt, length, score, tokens in zip(data_set.prompts, lengths, scores, predicted, strict=True)
    ]


def _measure_split(
    sets: Sequence[DataSet], rows: Sequence[Floats], table: TokenTable, split: int, settings: RankingSettings
) -> list[dict[str, float]]:
    """One predictor of each kind, and the figures of each set's held-out prompts."""
    parts = [_split(len(data_set.prompts), split) for data_set in sets]
    training = Samples(
        np.concatenate([row[kept] for row, (kept, _) in zip(rows, parts, strict=True)]),
        np.concatenate([s.num_output_tokens[kept] for s, (kept, _) in zip(sets, parts, strict=True)]),
    )
    settings = replace(settings, seed=split)
    ranker = train_ranker(training, settings).ranker
    small_table, small = compress(table, ranker, FILE_DIMS)
    signs = train_ranker(_columns(training, slice(0, NUM_SIGNS)), settings).ranker
    embeddings = train_ranker(_columns(training, slice(NUM_SIGNS, None)), settings).ranker
    forest = fit_forest(training, ForestSettings(seed=split))
    figures = []
    for data_set, row, (_, held_out) in zip(sets, rows, parts, strict=True):
        lengths, shown = data_set.num_output_tokens[held_out], row[held_out]
        predicted = small.predict(PromptFeatures(small_table).of([data_set.prompts[i] for i in held_out]))
        found = {
            "prompt_length": tau(shown[:, LENGTH_FEATURE], lengths),
            "ranking": tau(-ranker.score(shown), lengths),
            "in_file": tau(-predicted.scores, lengths),
            "signs": tau(-signs.score(shown[:, :NUM_SIGNS]), lengths),
            "embeddings": tau(-embeddings.score(shown[:, NUM_SIGNS:]), lengths),
            "forest": tau(forest.predict(shown).output_tokens, lengths),
            "length_error": float(np.abs(predicted.output_tokens - lengths).mean() / lengths.mean()),
            "constant_error": float(np.abs(training.num_output_tokens.mean() - lengths).mean() / lengths.mean()),
        }
        if data_set.again is not None:
            found["twice"] = tau(data_set.again[held_out], lengths)
        figures.append(found)
    return figures


def _split(num_prompts: int, split: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Indices to train on, and those held out."""
    order = np.random.default_rng(split).permutation(num_prompts)
    num_training = int(TRAINING_SHARE * num_prompts)
    return order[:num_training], order[num_training:]


def _columns(samples: Samples, columns: slice) -> Samples:
    return Samples(np.ascontiguousarray(samples.features[:, columns]), samples.num_output_tokens)


def _result(data_set: DataSet, splits: Sequence[dict[str, float]]) -> SetResult:
    def spread(name: str) -> Spread:
        values = [figures[name] for figures in splits]
        return Spread(statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0)

    return SetResult(
        name=data_set.name,
        num_prompts=len(data_set.prompts),
        mean_tokens=float(data_set.num_output_tokens.mean()),
        prompt_length=spread("prompt_length"),
        twice=None if data_set.again is None else spread("twice"),
        ranking=spread("ranking"),
        in_file=spread("in_file"),
        signs=spread("signs"),
        embeddings=spread("embeddings"),
        forest=spread("forest"),
        length_error=spread("length_error").mean,
        constant_error=spread("constant_error").mean,
    )


_COLUMNS = {
    "prompt_length": "length",
    "signs": "signs",
    "embeddings": "embeddings",
    "forest": "forest",
    "ranking": "network",
    "in_file": "in file",
    "twice": "twice",
}
_WORDS = """\
- `length`: the prompt's length alone, as a prediction
- `signs`: ListMLE network without embeddings; `embeddings`: without signs; `network`: on all features; `in file`: the
  same, as a predictor's file holds it
- `forest`: Magnus's random forest, on all features
- `twice`: a second answer to the same prompt, as a prediction. No strict bound: it has the noise of two draws
- `way`: how far `in file` is from `length` (0) to `twice` (1); n/a where `twice` is not above `length`
"""


def as_json(report: PredictorsReport) -> str:
    found = asdict(report)
    for entry, result in zip(found["sets"], report.sets, strict=True):
        entry["share_of_way"] = result.share_of_way
    return json.dumps(found, indent=2)


def as_markdown(report: PredictorsReport) -> str:
    """The kept form."""
    lines = [
        "# Output-length predictors",
        "",
        "`WEIR_TEST_DATA=... python -m benchmarks.predictors --out shared/docs/results`; sets of the built-in model",
        "are its own answers (`--generate`, temperature 1, at most 512 tokens). Those to alpaca_eval are not kept",
        "beside the code (`--generate own.json --sets alpaca_eval`, then `--answers own.json` beside the kept ones).",
        "",
        "Kendall's tau-b with the true lengths, within each data set, on held-out prompts (20 %), mean ± deviation",
        f"over {report.splits} splits. One predictor a model and split, trained on the other 80 % of all its sets.",
        "",
        _WORDS,
        f"| data set | prompts | mean tokens | {' | '.join(_COLUMNS.values())} | way |",
        "|---|" + "--:|" * (3 + len(_COLUMNS)),
        *(_row(result) for result in report.sets),
        "",
        "Different models' answers to the same alpaca_eval prompts, an indication only of what can be known there:",
        "; ".join(f"{one} and {other} {value:.3f}" for one, other, value in report.pairs) + ".",
        "",
        "Mean error of the predicted length over the mean length (of always saying the training mean):",
        "; ".join(f"{r.name} {r.length_error:.2f} ({r.constant_error:.2f})" for r in report.sets) + ".",
        "",
        "Cost of a prediction on one core, in ms a prompt:",
        "",
        "| tokens | batch | median | p99 |",
        "|--:|--:|--:|--:|",
        *(f"| {c.prompt_tokens} | {c.batch} | {c.median_ms:.3f} | {c.p99_ms:.3f} |" for c in report.costs),
    ]
    return "\n".join(lines) + "\n"


def _row(result: SetResult) -> str:
    cells = [_shown(getattr(result, name)) for name in _COLUMNS]
    way = "n/a" if result.share_of_way is None else f"{result.share_of_way:.0%}"
    return f"| {result.name} | {result.num_prompts} | {result.mean_tokens:.0f} | {' | '.join(cells)} | {way} |"


def _shown(spread: Spread | None) -> str:
    return "unknown" if spread is None else f"{spread.mean:.3f} ± {spread.deviation:.3f}"
