"""How long a request would take on a worker, by the worker's own cost model and what is booked there."""

from weir.bus.messages import WorkerRecord
from weir.core.cost import StepCost
from weir.scheduling.accounting.reservations import DecodeLoad, PrefillLoad

UNKNOWN_COST = StepCost(5.0, 0.5, 0.0, 0.05, 0.0001)
"""Of a worker that has not told its own: it orders workers by load, and is trusted for nothing else."""
_UNKNOWN_STEP_TOKENS = 512


class WorkerState:
    """A worker as a placer sees it: its record, what is booked there, and estimates of both.

    The sums are those of `StepCost`, written out: a decision makes dozens of them.
    """

    __slots__ = (
        "_base_ms",
        "_context_ms",
        "_pair_ms",
        "_sequence_ms",
        "_token_ms",
        "arena_id",
        "decode",
        "is_measured",
        "max_context_tokens",
        "max_num_seqs",
        "prefill",
        "record",
        "serves_locally",
        "step_tokens",
        "worker_id",
    )

    def __init__(self, record: WorkerRecord, prefill: PrefillLoad, decode: DecodeLoad) -> None:
        self.record = record
        self.worker_id = record.worker_id
        self.arena_id = record.worker_id if record.num_own_pages else record.host_id
        self.step_tokens = record.max_num_batched_tokens or _UNKNOWN_STEP_TOKENS
        self.max_num_seqs = record.max_num_seqs
        self.max_context_tokens = record.max_context_tokens
        self.serves_locally = record.serves_locally
        self.is_measured = record.cost is not None
        self.prefill = prefill
        self.decode = decode
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
            + self._sequence_ms * (len(load.ranks) + 1)
            + self._context_ms * (load.num_context_tokens + num_prompt_tokens)
        )

    def prefill_ms(self, num_uncached_tokens: int, num_cached_tokens: int) -> float:
        """A prompt by itself on a worker that does nothing else."""
        num_steps = -(-num_uncached_tokens // self.step_tokens)
        pairs_ms = self._pair_ms * (num_cached_tokens + num_uncached_tokens / 2)
        return num_steps * self._base_ms + num_uncached_tokens * (self._token_ms + pairs_ms)

    def prefill_beside_ms(self, num_uncached_tokens: int, num_cached_tokens: int) -> float:
        """A prompt on a worker that decodes what is booked there meanwhile."""
        load = self.decode
        num_running = len(load.ranks)
        num_steps = -(-num_uncached_tokens // max(self.step_tokens - num_running, 1))
        step_ms = self._base_ms + self._sequence_ms * num_running + self._context_ms * load.num_context_tokens
        pairs_ms = self._pair_ms * (num_cached_tokens + num_uncached_tokens / 2)
        return num_steps * step_ms + num_uncached_tokens * (self._token_ms + pairs_ms)
