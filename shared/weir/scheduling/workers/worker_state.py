"""A worker as placement sees it: its record, what is reserved on it, and how long a request would take there."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from weir.bus.messages import WorkerRecord
from weir.core.cost import StepCost
from weir.scheduling.accounting.reservations import DecodeLoad, PrefillLoad

UNKNOWN_COST = StepCost(5.0, 0.5, 0.0, 0.05, 0.0001)
"""Of a worker that has not measured its own: it orders workers by load, and is trusted for nothing else."""
_UNKNOWN_STEP_TOKENS = 512


@dataclass(frozen=True, slots=True, eq=False)
class ArenaLoad:
    """Pages of one arena, and what decode workers have reserved in it."""

    arena_id: str
    """The host's, or the worker's if it has memory of its own."""
    num_pages: int
    loads: tuple[DecodeLoad, ...]

    @property
    def num_reserved_pages(self) -> int:
        return sum(load.num_pages for load in self.loads)

    def pages_by_lane(self) -> Mapping[str, int]:
        """As they are charged."""
        if len(self.loads) == 1:
            return self.loads[0].pages_by_lane
        total: Counter[str] = Counter()
        for load in self.loads:
            total.update(load.pages_by_lane)
        return total


class WorkerState:
    """The sums are those of `StepCost`, written out: a decision makes dozens of them."""

    __slots__ = (
        "_base_ms",
        "_context_ms",
        "_pair_ms",
        "_sequence_ms",
        "_token_ms",
        "arena",
        "decode",
        "is_measured",
        "max_context_tokens",
        "max_num_seqs",
        "prefill",
        "record",
        "step_tokens",
        "worker_id",
    )

    def __init__(self, record: WorkerRecord, prefill: PrefillLoad, decode: DecodeLoad, arena: ArenaLoad) -> None:
        self.record = record
        self.worker_id = record.worker_id
        self.step_tokens = record.max_num_batched_tokens or _UNKNOWN_STEP_TOKENS
        self.max_num_seqs = record.max_num_seqs
        self.max_context_tokens = record.max_context_tokens
        self.is_measured = record.cost is not None
        self.prefill = prefill
        self.decode = decode
        self.arena = arena
        cost = record.cost or UNKNOWN_COST
        self._base_ms = cost.base_ms
        self._token_ms = cost.prefill_token_ms
        self._pair_ms = cost.prefill_pair_ms
        self._sequence_ms = cost.decode_sequence_ms
        self._context_ms = cost.context_token_ms

    def itl_ms(self, num_prompt_tokens: int) -> float:
        """Between two tokens, with one more sequence of this prompt."""
        load = self.decode
        return (
            self._base_ms
            + self._sequence_ms * (len(load.priorities) + 1)
            + self._context_ms * (load.num_context_tokens + num_prompt_tokens)
        )

    def prefill_ms(self, num_uncached_tokens: int, num_cached_tokens: int) -> float:
        """A prompt by itself on a worker that does nothing else."""
        num_steps = -(-num_uncached_tokens // self.step_tokens)
        pairs_ms = self._pair_ms * (num_cached_tokens + num_uncached_tokens / 2)
        return num_steps * self._base_ms + num_uncached_tokens * (self._token_ms + pairs_ms)

    def prefill_beside_ms(self, num_uncached_tokens: int, num_cached_tokens: int) -> float:
        """A prompt on a worker that decodes its reservations meanwhile."""
        load = self.decode
        num_running = len(load.priorities)
        num_steps = -(-num_uncached_tokens // max(self.step_tokens - num_running, 1))
        step_ms = self._base_ms + self._sequence_ms * num_running + self._context_ms * load.num_context_tokens
        pairs_ms = self._pair_ms * (num_cached_tokens + num_uncached_tokens / 2)
        return num_steps * step_ms + num_uncached_tokens * (self._token_ms + pairs_ms)
