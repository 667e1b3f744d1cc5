"""The request log: what ended, one line each, for `weir train-predictor`. Written by a thread, bounded on disk.

requests.jsonl      being written, at most half of the limit
requests.jsonl.1    the one before; replaced when the next is full
"""

import contextlib
import logging
import os
import queue
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from weir.policy.predictors.features import PromptFeatures
from weir.policy.predictors.log_record import LogRecord, pack_features

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestLogSettings:
    """`keeps_tokens`: prompt token ids, which are the prompt's text; without it their pooled features."""

    path: Path
    max_bytes: int
    keeps_tokens: bool = False
    max_waiting: int = 4096


class RequestLog:
    """`write` never waits: what the disk cannot keep up with is dropped and counted."""

    def __init__(self, settings: RequestLogSettings, features: PromptFeatures | None) -> None:
        """Raises OSError if the file cannot be opened for writing."""
        self._settings = settings
        self._features = features
        self._table_digest = "" if features is None else features.table.digest
        self._waiting: queue.Queue[tuple[LogRecord, Sequence[int]] | None] = queue.Queue(settings.max_waiting)
        self._counts: Counter[str] = Counter()
        settings.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _open(settings.path)
        self._thread = threading.Thread(target=self._run, name="request log", daemon=True)
        self._thread.start()

    def write(self, record: LogRecord, prompt_token_ids: Sequence[int]) -> None:
        try:
            self._waiting.put_nowait((record, prompt_token_ids))
        except queue.Full:
            self._counts["dropped"] += 1

    def close(self, timeout_s: float = 2.0) -> None:
        """Writes what waits, as far as the time allows."""
        with contextlib.suppress(queue.Full):  # the thread is a daemon: what is left is lost with the process
            self._waiting.put(None, timeout=timeout_s)
        self._thread.join(timeout_s)

    def metrics(self) -> dict[str, float]:
        return {f"request_log_{name}_total": float(self._counts[name]) for name in ("written", "dropped", "failed")}

    def _run(self) -> None:
        while (entry := self._waiting.get()) is not None:
            try:
                self._write_line(*entry)
                self._counts["written"] += 1
            except Exception:  # the boundary of one record: the log is a help, and requests go on
                if not self._counts["failed"]:
                    logger.exception("a request could not be logged to %s", self._settings.path)
                self._counts["failed"] += 1
        self._file.close()

    def _write_line(self, record: LogRecord, prompt_token_ids: Sequence[int]) -> None:
        if self._settings.keeps_tokens:
            record = replace(record, prompt_token_ids=tuple(prompt_token_ids))
        elif self._features is not None:
            packed = pack_features(self._features.of([prompt_token_ids])[0])
            record = replace(record, features=packed, table_digest=self._table_digest)
        line = record.to_line()
        if self._file.closed:  # it could not be opened anew when it was rotated
            self._file = _open(self._settings.path)
        if self._file.tell() + len(line) > self._settings.max_bytes // 2:
            self._rotate()
        self._file.write(line)
        if self._waiting.empty():
            self._file.flush()

    def _rotate(self) -> None:
        path = self._settings.path
        self._file.close()
        try:
            path.replace(path.with_name(f"{path.name}.1"))
        finally:
            self._file = _open(path)


def _open(path: Path) -> TextIO:
    """Readable by its owner alone: it shows what clients ask about. A line that a crash has torn is ended first."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    file = os.fdopen(descriptor, "a", encoding="ascii")
    if file.tell():
        file.write("\n")
    return file
