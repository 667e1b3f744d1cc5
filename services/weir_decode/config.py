"""Settings of a decode worker."""

from dataclasses import dataclass

from weir.worker.config import WorkerConfig


@dataclass(frozen=True)
class DecodeConfig(WorkerConfig):
    """A decode worker: takes over handed-off sequences and draws their tokens."""
