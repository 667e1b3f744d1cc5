"""How long a request would take on a worker, by the worker's own cost model and what is booked there."""

from weir.bus.messages import WorkerRecord
from weir.core.cost import StepCost
from weir.scheduling.book import DecodeLoad, PrefillLoad

UNKNOWN_COST = StepCost(5.0, 0.5, 0.0, 0.05, 0.0001)
"""Of a worker that has not told its own: it orders workers by load, and is trusted for nothing else."""
_UNKNOWN_STEP_TOKENS = 512


class Station:
    """A worker as a placer sees it: its record, what is booked there, and estimates of both."""

    def __init__(self, record: WorkerRecord, prefill: PrefillLoad, decode: DecodeLoad) -> None:
        self.record = record
        self.worker_id = record.worker_id
        self.memory_id = record.worker_id if record.num_own_pages else record.host_id
        self.is_measured = record.cost is not None
        self.cost = record.cost or UNKNOWN_COST
        self.step_tokens = record.max_num_batched_tokens or _UNKNOWN_STEP_TOKENS
        self.max_num_seqs = record.max_num_seqs
        self.max_context_tokens = record.max_context_tokens
        self.serves_locally = record.serves_locally
        self.prefill = prefill
        self.decode = decode

    def itl_ms(self, num_prompt_tokens: int) -> float:
        """Between two tokens, with one more sequence of this prompt."""
        cost, load = self.cost, self.decode
        return (
            cost.base_ms
            + cost.decode_sequence_ms * (len(load.ranks) + 1)
            + cost.context_token_ms * (load.num_context_tokens + num_prompt_tokens)
        )

    def read_ms(self, num_uncached_tokens: int, num_cached_tokens: int) -> float:
        """A prompt by itself on a worker that does nothing else."""
        return self.cost.prefill_ms(num_uncached_tokens, num_cached_tokens, self.step_tokens)

    def read_beside_ms(self, num_uncached_tokens: int, num_cached_tokens: int) -> float:
        """A prompt on a worker that decodes what is booked there meanwhile."""
        cost, load = self.cost, self.decode
        num_running = len(load.ranks)
        chunk_tokens = max(self.step_tokens - num_running, 1)
        num_steps = -(-num_uncached_tokens // chunk_tokens)
        beside_ms = cost.decode_sequence_ms * num_running + cost.context_token_ms * load.num_context_tokens
        return cost.prefill_ms(num_uncached_tokens, num_cached_tokens, chunk_tokens) + num_steps * beside_ms
