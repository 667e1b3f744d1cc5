"""From a request log to a predictor's file: what `weir train-predictor` does."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from weir.model.files.source import resolve_model
from weir.model.tokens.chat_template import load_chat_template
from weir.model.tokens.tokenizer import load_tokenizer
from weir.model.tokens.vectors import load_token_table
from weir.policy.predictors.features import LENGTH_FEATURE, PromptFeatures
from weir.policy.predictors.predictor import Predictor, PredictorInfo
from weir.policy.predictors.predictor_file import save_predictor
from weir.policy.predictors.token_table import TokenTable
from weir.training.forest import ForestSettings, fit_forest, held_out_tau
from weir.training.ranking import RankingSettings, compress, train_ranker
from weir.training.samples import Samples, load_samples, tau

Kind = Literal["ranking", "forest"]
FILE_DIMS = 48


@dataclass(frozen=True)
class TrainingReport:
    """`length_tau`: of the prompt's length alone, on the same requests."""

    kind: Kind
    model: str
    num_samples: int
    skipped: Counter[str]
    held_out_tau: float
    length_tau: float
    file_bytes: int


def train_from_logs(
    logs: Sequence[Path], out: Path, model: str, kind: Kind = "ranking", seed: int = 0
) -> TrainingReport:
    """Reads, trains, writes.

    Raises:
        ModelError: the model's files cannot be read.
        LogError: nothing in the logs can be used.
        ValueError: too few requests.
        OSError: `out` cannot be written.
    """
    source = resolve_model(model)
    table = load_token_table(source, load_tokenizer(source), load_chat_template(source))
    features = PromptFeatures(table)
    loaded = load_samples(logs, features, source.name)
    predictor = train_predictor(table, loaded.samples, source.name, kind, seed)
    save_predictor(out, predictor)
    return TrainingReport(
        kind=kind,
        model=source.name,
        num_samples=len(loaded.samples),
        skipped=loaded.skipped,
        held_out_tau=predictor.info.held_out_tau,
        length_tau=tau(loaded.samples.features[:, LENGTH_FEATURE], loaded.samples.num_output_tokens),
        file_bytes=out.stat().st_size,
    )


def train_predictor(
    table: TokenTable,
    samples: Samples,
    model: str,
    kind: Kind = "ranking",
    seed: int = 0,
    settings: RankingSettings | None = None,
) -> Predictor:
    """Over features of `table`, which must be the whole one. Raises ValueError for too few samples."""
    if kind == "forest":
        forest_settings = ForestSettings(seed=seed)
        info = PredictorInfo(model, len(samples), held_out_tau(samples, forest_settings))
        return Predictor(PromptFeatures(table), fit_forest(samples, forest_settings), info)
    trained = train_ranker(samples, replace(settings or RankingSettings(), seed=seed))
    small_table, ranker = compress(table, trained.ranker, FILE_DIMS)
    return Predictor(PromptFeatures(small_table), ranker, PredictorInfo(model, len(samples), trained.held_out_tau))
