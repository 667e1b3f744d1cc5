"""One line of a request log: what a predictor can be trained on, from gateways to training.

Lengths and features by default. Features are the pooled vector that a predictor would be given: training needs nothing
else, and words cannot be read off it, though what a prompt is about can. Token ids, which are the text, only if asked.
"""

import base64
import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from weir.policy.predictors.features import Floats

LOG_VERSION = 1


@dataclass(frozen=True, slots=True)
class LogRecord:
    """One request that ended by itself. `is_cut`: at `max_tokens`, so it might have been longer.

    `features` are float16 numbers of the token table `table_digest`; empty: none. `prompt_token_ids` None: not kept.
    """

    at_s: float
    """Unix time of its end."""
    model: str
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    is_cut: bool
    table_digest: str = ""
    features: bytes = b""
    prompt_token_ids: tuple[int, ...] | None = None
    arrival_s: float | None = None
    """Unix time at which it came, if known: with it a log is a trace for the simulator."""

    def to_line(self) -> str:
        content: dict[str, Any] = {
            "v": LOG_VERSION,
            "at_s": round(self.at_s, 3),
            "model": self.model,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
            "max_tokens": self.max_tokens,
            "is_cut": self.is_cut,
        }
        if self.arrival_s is not None:
            content["arrival_s"] = round(self.arrival_s, 6)
        if self.features:
            content |= {"table": self.table_digest, "features": base64.b64encode(self.features).decode()}
        if self.prompt_token_ids is not None:
            content["prompt_token_ids"] = list(self.prompt_token_ids)
        return json.dumps(content, separators=(",", ":")) + "\n"


def record_from_line(line: str) -> LogRecord:
    """Raises ValueError, naming what is wrong, for a line that is not a whole record of this version."""
    content = json.loads(line)
    if not isinstance(content, dict) or content.get("v") != LOG_VERSION:
        raise ValueError(f"not a record of version {LOG_VERSION}")
    try:
        ids, arrival_s = content.get("prompt_token_ids"), content.get("arrival_s")
        record = LogRecord(
            at_s=float(content["at_s"]),
            model=str(content["model"]),
            num_prompt_tokens=_count(content, "num_prompt_tokens", 0),
            num_output_tokens=_count(content, "num_output_tokens", 1),
            max_tokens=_count(content, "max_tokens", 1),
            is_cut=bool(content["is_cut"]),
            table_digest=str(content.get("table", "")),
            features=base64.b64decode(content.get("features", ""), validate=True),
            prompt_token_ids=None if ids is None else tuple(int(token_id) for token_id in ids),
            arrival_s=None if arrival_s is None else float(arrival_s),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"lacks {error}, or has it in another form") from error
    if not math.isfinite(record.at_s):
        raise ValueError("at_s is not a time")
    return record


def pack_features(row: Floats) -> bytes:
    return np.asarray(row, np.float16).tobytes()


def unpack_features(packed: bytes) -> Floats:
    """Raises ValueError for bytes that are no float16 numbers, or not finite ones."""
    row = np.frombuffer(packed, np.float16).astype(np.float32)
    if not np.isfinite(row).all():
        raise ValueError("features are not finite")
    return row


def _count(content: dict[str, Any], name: str, least: int) -> int:
    value = content[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} {value!r}: must be a whole number of at least {least}")
    return value
