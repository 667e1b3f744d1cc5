"""What a batch and a file are, and the bounds of a tenant's. Pure.

in_progress ─> completed        all lines have a result
    │ └──────> expired          the others have `batch_expired` for one
    v
cancelling ──> cancelled        the others have `batch_cancelled` for one
failed                          no line of the input is a request
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

Json = dict[str, Any]
MAX_ERRORS_SHOWN = 100


class BatchStatus(Enum):
    """OpenAI's words. A batch is read as it is made, and its files are written as it ends: it is never seen validating
    or finalizing."""

    IN_PROGRESS = "in_progress"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    FAILED = "failed"


OPEN_STATUSES = (BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING)


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file without its bytes. `expires_s` None: it stays until it is deleted."""

    file_id: str
    tenant: str
    filename: str
    purpose: str
    num_bytes: int
    created_s: int
    expires_s: int | None

    def json(self) -> Json:
        return {
            "id": self.file_id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_s,
            "expires_at": self.expires_s,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """`errors`: the first bad lines, as OpenAI names them. `num_failed` counts bad lines too."""

    batch_id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: dict[str, str] | None
    status: BatchStatus
    created_s: int
    expires_s: int
    num_lines: int
    num_completed: int
    num_failed: int
    errors: list[Json]
    cancelling_s: int | None
    ended_s: int | None
    output_file_id: str | None
    error_file_id: str | None

    def json(self) -> Json:
        ended = {f"{status.value}_at": None for status in BatchStatus if status not in OPEN_STATUSES}
        if self.status not in OPEN_STATUSES:
            ended[f"{self.status.value}_at"] = self.ended_s  # type: ignore[assignment]
        return {
            "id": self.batch_id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status.value,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_s,
            "in_progress_at": None if self.status is BatchStatus.FAILED else self.created_s,
            "expires_at": self.expires_s,
            "finalizing_at": self.ended_s,
            "cancelling_at": self.cancelling_s,
            **ended,
            "request_counts": {
                "total": self.num_lines,
                "completed": self.num_completed,
                "failed": self.num_failed,
            },
            "metadata": self.metadata,
        }


@dataclass(frozen=True, slots=True)
class NewBatch:
    """What a client asks for, checked."""

    tenant: str
    endpoint: str
    input_file_id: str
    window_s: int
    completion_window: str
    metadata: dict[str, str] | None


@dataclass(frozen=True, slots=True)
class ClaimedLine:
    """A line that a gateway may answer until its lease ends. `fence` tells this claim from later ones."""

    batch_id: str
    number: int
    custom_id: str
    body: str
    tenant: str
    endpoint: str
    fence: int
    num_tries: int


@dataclass(frozen=True, slots=True)
class LineResult:
    """A line of the output file, or with `is_error` of the error file. `content`: JSON."""

    is_error: bool
    content: str
