"""What a worker has done since it started, under the same names in both roles, so that they can be compared."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields


@dataclass(slots=True)
class EngineCounters:
    """Counts from zero; only ever raised."""

    steps: int = 0
    prefill_steps: int = 0
    """Steps that computed at least one prompt token."""
    decode_steps: int = 0
    """Steps that computed at least one output token."""
    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    """Found in pages that others had computed."""
    output_tokens_computed: int = 0
    tokens_generated: int = 0
    taken_over: int = 0
    """Sequences that came by hand-off."""
    adopted: int = 0
    """Sequences of workers that had ended."""
    handed_off: int = 0
    handed_over: int = 0
    """Sequences that others of its role go on with, since this worker was emptied."""
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    stalls: int = 0
    """Times a sequence began to wait for a page or slot."""
    failed_steps: int = 0
    preemptions: int = 0
    preemptions_dropped: int = 0
    """Those whose pages were not kept: the swap file had no room, or a prefill worker's prompt gave way."""
    pages_swapped_out: int = 0
    pages_swapped_in: int = 0
    swap_failures: int = 0
    """Sequences whose pages came back with a wrong checksum: computed again."""
    tokens_recomputed: int = 0
    """Computed before, lost by preemption and computed again; not counted as prompt or output tokens a second time."""
    pages_behind_window: int = 0
    """Given back by sequences that went on, since nothing that was still to be computed saw them."""
    pauses: int = 0
    """Times a sequence left the batch for a more urgent one; its pages stayed."""
    policy_defects: int = 0
    """Steps in which a decision of the policy was impossible and not followed."""
    held_rows_computed: int = 0
    """Rows of static batches that were computed after their sequences had ended."""
    late_rows_computed: int = 0
    """Rows of steps planned ahead whose sequences the step before had ended."""
    page_fingerprint: int = 0
    """XOR of `fingerprint_of` over all hand-offs. XORed over workers, it is the same for all prefill workers as for all
    decode workers exactly when the same requests went out and came in with the same pages."""

    def count_chunk(self, start: int, end: int, num_prompt_tokens: int, num_computed_before: int = 0) -> None:
        """Positions [start, end) were computed; those below `num_computed_before` not for the first time."""
        first_new = min(end, max(start, num_computed_before))
        self.tokens_recomputed += first_new - start
        start = first_new
        num_of_prompt = max(0, min(end, num_prompt_tokens) - start)
        self.prompt_tokens_computed += num_of_prompt
        self.output_tokens_computed += end - start - num_of_prompt

    def count_hand_off(self, request_id: str, page_ids: Sequence[int]) -> None:
        self.page_fingerprint ^= fingerprint_of(request_id, page_ids)

    def snapshot(self) -> Mapping[str, int]:
        return {name: getattr(self, name) for name in _NAMES}


_NAMES = tuple(entry.name for entry in fields(EngineCounters))  # asdict takes ten times as long, every step


def fingerprint_of(request_id: str, page_ids: Sequence[int]) -> int:
    """48 bits (exact as a float) of a hash over a request and its pages in their order."""
    text = f"{request_id}:{','.join(map(str, page_ids))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")
