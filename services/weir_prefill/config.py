"""Settings of a prefill worker."""

from dataclasses import dataclass

from weir.runtime.config import setting
from weir.worker.config import WorkerConfig


@dataclass(frozen=True)
class PrefillConfig(WorkerConfig):
    """A prefill worker: computes prompts, samples their first token and hands them off."""

    max_num_seqs: int = setting(16, "Prompts that have pages here, those being handed off included.")
    max_num_waiting: int = setting(64, "Prompts that wait for pages; more are refused.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_num_waiting < 0:
            raise ValueError(f"max_num_waiting {self.max_num_waiting}: must be at least 0")
