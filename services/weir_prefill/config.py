"""Settings of a prefill worker."""

from dataclasses import dataclass

from weir.runtime.config import setting
from weir.worker.config import WorkerConfig


@dataclass(frozen=True)
class PrefillConfig(WorkerConfig):
    """A prefill worker: reads prompts, draws their first token and hands them off."""

    max_num_seqs: int = setting(16, "Prompts that have pages here, those being handed off included.")
    chunk_tokens: int = setting(512, "Tokens of one prompt computed in a step.")
    max_num_waiting: int = setting(64, "Prompts that wait for a place; more are refused.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, smallest in (("chunk_tokens", 1), ("max_num_waiting", 0)):
            if getattr(self, name) < smallest:
                raise ValueError(f"{name} {getattr(self, name)}: must be at least {smallest}")
