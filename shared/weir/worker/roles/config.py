"""Settings that only one of the worker kinds has, or has other defaults for."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from weir.core.fields import ByteSize, check_range
from weir.engine.batching.admission import PauseSettings
from weir.engine.batching.own_rules import Batching, JoinSettings, PrefillBatchSettings
from weir.engine.batching.running import RunningSettings
from weir.engine.memory.preemption import PreemptionSettings
from weir.kv.arena.segment import DEFAULT_DIRECTORY
from weir.runtime.config import setting
from weir.worker.config import WorkerConfig


@dataclass(frozen=True)
class PrefillConfig(WorkerConfig):
    """A prefill worker: computes prompts, samples their first token and hands them off."""

    ROLE: ClassVar[str] = "prefill"

    max_num_seqs: int = setting(16, "Prompts that have pages here, those being handed off included.")
    max_num_waiting: int = setting(64, "Prompts that wait for pages; more are refused.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_num_waiting < 0:
            raise ValueError(f"max_num_waiting {self.max_num_waiting}: must be at least 0")


@dataclass(frozen=True)
class DecodeConfig(WorkerConfig):
    """A decode worker: decodes handed-off sequences, and serves whole the prompts that it is given."""

    ROLE: ClassVar[str] = "decode"

    batching: Literal["continuous", "static", "static-hold", "dynamic"] = setting(
        "continuous", "When sequences join the batch; all but continuous are for comparison."
    )
    batch_window_ms: int = setting(50, "Dynamic batching: how long the first sequence waits for others.")
    serves_locally: bool = setting(True, "Also prefill prompts, where that costs less than a hand-off to this worker.")
    chunk_tokens: int = setting(256, "Tokens of one prompt computed in a step.")
    prefill_batches: bool = setting(False, "Prefill in batches of its own while prompts are long and outputs short.")
    max_pauses: int = setting(3, "Times that a sequence is paused for a more urgent one. 0: never.")
    max_preemptions: int = setting(3, "Times that one sequence gives its pages up for others. 0: never.")
    swap_bytes: ByteSize = setting(-1, "Memory for the pages of such sequences. -1: a quarter of the arena, 0: none.")
    swap_dir: Path = field(
        default=DEFAULT_DIRECTORY, metadata={"help": "Where that memory is taken from, page by page as it is needed."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, smallest, largest in (
            ("batch_window_ms", 1, 10_000),
            ("max_pauses", 0, 1000),
            ("max_preemptions", 0, 1000),
            ("swap_bytes", -1, 2**63 - 1),
        ):
            check_range(self, name, smallest, largest)

    def running_settings(self, num_swap_slots: int, num_arena_pages: int) -> RunningSettings:
        return RunningSettings(
            JoinSettings(Batching(self.batching), self.batch_window_ms / 1e3),
            PreemptionSettings(max_preemptions=self.max_preemptions, num_swap_slots=num_swap_slots),
            PauseSettings(max_pauses=self.max_pauses),
            num_arena_pages=num_arena_pages,
            prefill_batches=PrefillBatchSettings() if self.prefill_batches else None,
        )
