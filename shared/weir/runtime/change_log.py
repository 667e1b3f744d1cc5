"""What operators change: a JSON line each, for whoever asks later who did what.

    an operator's call ─> who it is ─> done, refused or denied ─> ChangeLog.write ─> this process' log, at INFO
                                                                                  └> its own file, if it has one
                                                                                     NAME, NAME.1 … NAME.4

Not the life events of requests, which `weir.bus.audit` keeps. There is never a key in it, of which 8 hex digits of its
digest stand for it, nor anything of a request. A value that was refused is not repeated: it may be a key by mistake.
"""

import contextlib
import errno
import json
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from weir.core.errors import InvalidRequest, PermissionDenied, Unauthenticated, Unavailable, WeirError

logger = logging.getLogger(__name__)

FILES = "changes-*.jsonl*"
HERE = "here"
"""The actor where no key is asked for: who reaches the process from its own host, or its user."""

Result = Literal["done", "refused", "denied", "uncertain"]
_MAX_SHOWN_CHARS = 200
_WINDOW_S = 60.0
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_NAME = re.compile(r"[A-Za-z0-9_.:/@-]{1,200}")
_LONG_PART = re.compile(r"[A-Za-z0-9_-]{40,}")
"""Longer than any part of a name that anybody chose: a key, perhaps."""


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that somebody changed, or was not let."""

    actor: str
    """`key:` and 8 hex digits of the digest of an operator's key; `here`, or the address, where none is asked for;
    of who was not let in: `nobody`, or `tenant-key:` or `unknown-key:` with the digits."""
    action: str
    """`set limits`, `drain`."""
    object: str
    """`lanes.batch.max_queued`, `decode-0-1a2b3c4d`."""
    result: Result
    """`denied`: who asked may not; `refused`: it cannot be; `uncertain`: it may have been done, nobody answered."""
    before: str = ""
    after: str = ""
    reason: str = ""
    """Of what is not done: the kind of error, and the field. Of what a tuner does: why, with its figures."""
    correlation_id: str = ""


@dataclass(frozen=True, slots=True)
class Told:
    """What a change turned out to be."""

    object: str
    before: str = ""
    after: str = ""
    reason: str = ""


def outcome_of(error: WeirError) -> tuple[Result, str]:
    """With the reason. Never the message, which may repeat what was asked for."""
    kind = type(error).__name__
    if isinstance(error, Unauthenticated | PermissionDenied):
        return "denied", kind
    if isinstance(error, InvalidRequest):
        fields = ", ".join(shown_name(violation.field) for violation in error.violations[:4])
        return "refused", f"{kind}: {fields}"
    return "uncertain" if isinstance(error, Unavailable) else "refused", kind


def shown_name(name: str) -> str:
    """The name of a setting, a worker, a model; what cannot be one is not repeated."""
    return name if _NAME.fullmatch(name) and not _LONG_PART.search(name) else "(not a name)"


def shown_value(value: str) -> str:
    """Of a setting that was found right. Digests are shortened."""
    return _DIGEST.sub(lambda match: match[0][:8], value)[:_MAX_SHOWN_CHARS]


def new_correlation_id() -> str:
    return uuid.uuid4().hex


class ChangeLog:
    """Of one process, which alone writes to `path`. None: changes are in the process' log alone.

    At `max_bytes` the file is put aside, and `num_kept` of them stay. What is not done could fill it, since anybody may
    ask: of that `max_failures` a minute are written, and the next line says how many were not.
    """

    def __init__(
        self,
        path: Path | None,
        process: str,
        *,
        max_bytes: int = 1 << 20,
        num_kept: int = 4,
        max_failures: int = 10,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._path = path
        self._process = process
        self._max_bytes = max_bytes
        self._num_kept = num_kept
        self._max_failures = max_failures
        self._now_s = now_s
        self._window_began_s = 0.0
        self._num_in_window = 0
        self._num_unsaid = 0
        self.num_written = 0
        self.num_lost = 0
        """Of the file; the process' log has them."""

    def write(self, change: Change) -> bool:
        """False: it is one too many that were not done. A file that cannot be written keeps nobody from changing
        anything: it is told, and counted."""
        now_s = self._now_s()
        if change.result != "done" and not self._may_say(now_s):
            self._num_unsaid += 1
            return False
        fields = {name: value for name, value in asdict(change).items() if value}
        if self._num_unsaid:
            fields["num_failures_before"] = self._num_unsaid
            self._num_unsaid = 0
        logger.info("change", extra=fields)
        if self._path is None:
            return True
        moment = datetime.fromtimestamp(now_s, UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": moment, "process": self._process, **fields}).encode() + b"\n"
        try:
            self._append(self._path, line)
            self.num_written += 1
        except OSError as error:
            self.num_lost += 1
            logger.error("%s: a change cannot be written (%s); it stands in this log", self._path, error)
        return True

    def write_all(self, actor: str, action: str, told: Iterable[Told], correlation_id: str) -> None:
        """What was done by one call."""
        for one in told:
            before, after = shown_value(one.before), shown_value(one.after)
            name = shown_name(one.object)
            self.write(Change(actor, action, name, "done", before, after, one.reason, correlation_id))

    def write_failure(
        self, actor: str, action: str, objects: Iterable[str], error: WeirError, correlation_id: str
    ) -> None:
        """What one call asked for in vain."""
        result, reason = outcome_of(error)
        for name in objects:
            self.write(Change(actor, action, shown_name(name), result, reason=reason, correlation_id=correlation_id))

    def metrics(self) -> dict[str, float]:
        return {"changes_written_total": float(self.num_written), "changes_lost_total": float(self.num_lost)}

    def _may_say(self, now_s: float) -> bool:
        if not 0 <= now_s - self._window_began_s < _WINDOW_S:
            self._window_began_s, self._num_in_window = now_s, 0
        self._num_in_window += 1
        return self._num_in_window <= self._max_failures

    def _append(self, path: Path, line: bytes) -> None:
        """Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            if path.lstat().st_size + len(line) > self._max_bytes:
                self._put_aside(path)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            if os.write(descriptor, line) < len(line):  # the next line must not begin amid this one
                os.ftruncate(descriptor, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        finally:
            os.close(descriptor)

    def _put_aside(self, path: Path) -> None:
        for number in range(self._num_kept - 1, 0, -1):
            older = path.with_name(f"{path.name}.{number}")
            if older.exists():
                older.replace(path.with_name(f"{path.name}.{number + 1}"))
        path.replace(path.with_name(f"{path.name}.1"))


def read_changes(folder: Path) -> Iterator[dict[str, Any]]:
    """Of all processes that keep theirs in this folder, oldest first. A line that was cut is left out."""
    found: list[dict[str, Any]] = []
    for path in folder.glob(FILES):
        try:
            text = path.read_text(errors="replace")
        except FileNotFoundError:  # put aside meanwhile; what was in it is in the next one
            continue
        for line in text.splitlines():
            try:
                change = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(change, dict):
                found.append(change)
    return iter(sorted(found, key=lambda change: str(change.get("time", ""))))
