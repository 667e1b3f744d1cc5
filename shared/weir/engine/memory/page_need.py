"""What a running batch will take from the pool: decodes page by page, prompts chunk by chunk as steps get to them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from weir.engine.memory.pages import PageNeed
from weir.engine.sequence import LOOKAHEAD_TOKENS, Sequence, Stage
from weir.kv.geometry import PAGE_TOKENS

_STEPS_AHEAD = 2
"""Pages of the prompts that the next step gets to are asked for in this one."""


@dataclass(frozen=True, slots=True)
class StepReach:
    """How far a step gets: `num_tokens` of prompts at most, and `chunk_tokens` of one of them. `is_whole`: a prompt
    takes all of its pages when it joins."""

    num_tokens: int
    chunk_tokens: int
    is_whole: bool = False

    def pages_of(self, sequences: Iterable[Sequence], num_steps: int = 1) -> list[int]:
        """What each lacks for the next steps, which get to them in order; who waits for pages already is counted as if
        a step got to it."""
        num_left, most = num_steps * self.num_tokens, num_steps * min(self.chunk_tokens, self.num_tokens)
        pages = []
        for sequence in sequences:
            if self.is_whole or sequence.num_uncomputed <= 1:
                pages.append(sequence.num_pages_short_of(0))
                continue
            num_tokens = min(sequence.num_uncomputed, most)
            if sequence.stalled_since_s is None:
                num_tokens = min(num_tokens, num_left)
            num_left = max(0, num_left - num_tokens)
            if num_steps > 1 and num_tokens == sequence.num_uncomputed:  # by then it decodes
                pages.append(sequence.num_pages_short_of(LOOKAHEAD_TOKENS))
            else:
                pages.append(sequence.num_pages_short_of_chunk(num_tokens) if num_tokens else 0)
        return pages


def num_growing_pages(batch: Iterable[Sequence], reach: StepReach) -> int:
    """Pages that the batch as it is will want: decodes within the next LOOKAHEAD_TOKENS, prompts in the next step."""
    num_pages, prompts = 0, []
    for sequence in batch:
        if sequence.preempted_since_s is not None:
            continue
        if sequence.num_uncomputed > 1:
            prompts.append(sequence)
        else:
            num_pages += sequence.num_pages_short_of(LOOKAHEAD_TOKENS)
    return num_pages + sum(reach.pages_of(prompts))


def need_of(ranked: Iterable[Sequence], joinable: Callable[[], list[Sequence]], reach: StepReach) -> PageNeed:
    """The pages that the batch will want within LOOKAHEAD_TOKENS, those of its prompts and of waiting sequences that
    may join, as far as this step and the next one get to them, and those of preempted sequences; if some of the batch
    want one at once, these come first."""
    now = soon = num_waiting = 0
    preempted, prompts = [], []
    running = Stage.RUNNING
    for sequence in ranked:  # all of them every step, so this is quick
        if sequence.stage is not running:
            num_waiting += 1
        elif sequence.preempted_since_s is not None:
            preempted.append((sequence.num_pages_short_of(0), 0))
        elif len(sequence.token_ids) + LOOKAHEAD_TOKENS > len(sequence.block_table) * PAGE_TOKENS:
            if sequence.num_uncomputed > 1:
                prompts.append(sequence)
            else:
                soon += sequence.num_pages_short_of(LOOKAHEAD_TOKENS)
                now += sequence.num_pages_short_of(0)
    waiting = joinable() if num_waiting else []
    pages = reach.pages_of([*prompts, *waiting])
    now += sum(pages[: len(prompts)])
    soon += sum(reach.pages_of([*prompts, *waiting], _STEPS_AHEAD))
    of_waiting = zip(pages[len(prompts) :], (int(sequence.slot is None) for sequence in waiting), strict=True)
    others = [*preempted, *(need for need in of_waiting if any(need))]
    head_pages, head_slots = (now, 0) if now or not others else others[0]
    return PageNeed(
        num_pages=soon + sum(num_pages for num_pages, _ in preempted),
        num_slots=sum(num_slots for _, num_slots in others),
        head_pages=head_pages,
        head_slots=head_slots,
    )
