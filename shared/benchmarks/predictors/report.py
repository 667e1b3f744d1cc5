"""What `python -m benchmarks.predictors` found, as a page and as JSON."""

import json
from dataclasses import asdict, dataclass

from benchmarks.predictors.measure import Cost, SetResult, Spread

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


@dataclass(frozen=True)
class PredictorsReport:
    """`pairs`: (model, model, tau) of different models' answers to the same prompts."""

    splits: int
    sets: tuple[SetResult, ...]
    pairs: tuple[tuple[str, str, float], ...]
    costs: tuple[Cost, ...]


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
