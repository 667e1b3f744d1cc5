"""What training reads, features and lengths from a request log, and how well an order agrees with them."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.stats import kendalltau

from weir.policy.predictors.features import Floats, PromptFeatures
from weir.policy.predictors.log_record import LogRecord, record_from_line, unpack_features

_MAX_SAMPLES = 200_000


class LogError(Exception):
    """A request log cannot be trained on; says why."""


@dataclass(frozen=True)
class Samples:
    """`features` [samples, features], `num_output_tokens` int64 [samples]."""

    features: Floats
    num_output_tokens: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.num_output_tokens)

    def take(self, indices: npt.NDArray[np.int64]) -> "Samples":
        return Samples(self.features[indices], self.num_output_tokens[indices])


@dataclass(frozen=True)
class LoadedLog:
    """`skipped`: how many lines were left out, by reason."""

    samples: Samples
    skipped: Counter[str]


def load_samples(paths: Iterable[Path], features: PromptFeatures, model: str) -> LoadedLog:
    """The newest 200,000 records of `model`. Lines that do not fit are counted, not guessed at.

    Raises:
        LogError: a file cannot be read, or nothing in it can be used.
    """
    skipped: Counter[str] = Counter()
    rows: list[Floats] = []
    lengths: list[int] = []
    digest = features.table.digest
    for path in paths:
        try:
            with path.open(encoding="utf-8") as file:
                for line in file:
                    row, length = _try_read(line, features, digest, model, skipped)
                    if row is not None:
                        rows.append(row)
                        lengths.append(length)
        except (OSError, UnicodeDecodeError) as error:
            raise LogError(f"{path}: {error}") from error
        rows, lengths = rows[-_MAX_SAMPLES:], lengths[-_MAX_SAMPLES:]
    if not rows:
        reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.items()) or "there are no lines"
        raise LogError(f"no record can be used: {reasons}")
    return LoadedLog(Samples(np.stack(rows), np.array(lengths, np.int64)), skipped)


def _try_read(
    line: str, features: PromptFeatures, digest: str, model: str, skipped: Counter[str]
) -> tuple[Floats | None, int]:
    try:
        record = record_from_line(line)
        row = _features_of(record, features, digest)
    except ValueError:
        skipped["damaged"] += 1
        return None, 0
    if record.model != model:
        skipped["of another model"] += 1
    elif row is None:
        skipped["with features of another token table"] += 1
    else:
        return row, record.num_output_tokens
    return None, 0


def _features_of(record: LogRecord, features: PromptFeatures, digest: str) -> Floats | None:
    """From the tokens if they are there. None: the features are another table's, or there are none."""
    if record.prompt_token_ids is not None:
        row: Floats = features.of([record.prompt_token_ids])[0]
        return row
    if record.table_digest != digest:
        return None
    packed = unpack_features(record.features)
    if packed.shape != (features.num_features,):
        raise ValueError("features are cut off")
    return packed


def tau(one: npt.NDArray[np.generic], other: npt.NDArray[np.generic]) -> float:
    """Kendall's tau-b; 0 where all of one side are equal, so that nothing can be ranked."""
    value = float(kendalltau(one, other).statistic)
    return 0.0 if np.isnan(value) else value
