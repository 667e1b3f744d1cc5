"""Many steps at once, for simulators: a batch in which everybody decodes, nobody waits and nobody ends.

Such steps differ in nothing but the pages that sequences grow by. What is left behind is what single steps leave, page
by page; only the tokens are not told as events.
"""

from bisect import bisect_right

from weir.engine.counters import Counters
from weir.engine.pages import PagePool
from weir.engine.sequence import Sequence, Stage
from weir.kv.geometry import PAGE_TOKENS, num_pages_for


class FastForward:
    """Works on one batcher's sequences between two of its steps."""

    def __init__(self, pool: PagePool, counters: Counters, max_context_tokens: int) -> None:
        self._pool = pool
        self._counters = counters
        self._max_context_tokens = max_context_tokens

    def num_steps(self, batch: list[Sequence], token_id: int, max_steps: int) -> int:
        """How many steps, at most `max_steps`, would be alike; 0 if the next one is not of that kind."""
        num_steps = max_steps
        for sequence in batch:
            if not _only_decodes(sequence) or token_id in sequence.stop_token_ids:
                return 0
            num_booked_tokens = sequence.facts.num_booked_pages * PAGE_TOKENS
            num_at_most = min(sequence.num_tokens_at_most, self._max_context_tokens) - 1
            num_steps = min(num_steps, num_at_most - sequence.num_tokens, num_booked_tokens - sequence.num_computed)
        num_free = self._pool.num_free_pages
        if num_steps <= 0 or _num_missing(batch, num_steps) <= num_free:
            return max(0, num_steps)
        return bisect_right(range(num_steps), num_free, key=lambda number: _num_missing(batch, number)) - 1

    def run(self, batch: list[Sequence], token_id: int, num_steps: int, ended_at_s: float) -> None:
        """`num_steps` was said by `num_steps` for this batch."""
        self._grow(batch, num_steps)
        token_ids = [token_id] * num_steps
        for sequence in batch:
            sequence.record_decodes(token_ids)
            sequence.served_at_s = ended_at_s
        counters = self._counters
        counters.steps += num_steps
        counters.decode_steps += num_steps
        counters.output_tokens_computed += num_steps * len(batch)
        counters.tokens_generated += num_steps * len(batch)

    def _grow(self, batch: list[Sequence], num_steps: int) -> None:
        """In the order in which single steps would take the pages."""
        growths = []
        for place, sequence in enumerate(batch):
            first = len(sequence.block_table) * PAGE_TOKENS
            last = sequence.num_computed + num_steps - 1
            growths += [(position - sequence.num_computed, place) for position in range(first, last + 1, PAGE_TOKENS)]
        for _, place in sorted(growths):
            page_ids = self._pool.try_take(1)
            assert page_ids is not None, "counted before"
            batch[place].grow(page_ids[0])


def _only_decodes(sequence: Sequence) -> bool:
    return (
        sequence.stage is Stage.RUNNING
        and sequence.away_since_s is None
        and sequence.stalled_since_s is None
        and sequence.num_uncomputed == 1
        and sequence.num_computed >= sequence.num_prompt_tokens
        and sequence.num_computed >= sequence.num_computed_before
        and sequence.history is None
        and sequence.facts.sampling.logprobs is None
    )


def _num_missing(batch: list[Sequence], num_steps: int) -> int:
    return sum(max(0, num_pages_for(s.num_computed + num_steps) - len(s.block_table)) for s in batch)
