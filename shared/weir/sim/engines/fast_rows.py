"""What a fast engine keeps of each sequence, and how far apart the steps ended."""

from bisect import bisect_left
from dataclasses import dataclass

from weir.engine.batching.prompt_order import in_turn, note_turn
from weir.kv.geometry import PAGE_TOKENS, num_pages_for
from weir.sim.call import SimRequestState
from weir.sim.workers.arriving import SimArrival


@dataclass(slots=True, eq=False)
class FastRow:
    """`order`: of its coming. Decoding, it has `context(step)` tokens to read in each step from `first_step` on."""

    call: SimRequestState
    arrival: SimArrival
    order: int
    num_prompt_tokens: int
    num_computed: int = 0
    """Of its prompt."""
    first_step: int = 0
    """0: it has no token yet."""
    told_step: int = 0
    """Its tokens up to the end of this step have been told."""
    is_waiting: bool = True
    is_gone: bool = False
    is_eager: bool = False
    """Each of its tokens is told when it is drawn."""
    is_over: bool = False
    """None of them is."""
    num_passed_over: int = 0

    @property
    def num_uncomputed(self) -> int:
        """Of its prompt."""
        return self.num_prompt_tokens - self.num_computed

    @property
    def num_prompt_pages(self) -> int:
        return num_pages_for(self.num_prompt_tokens)

    @property
    def last_step(self) -> int:
        """In which it draws its last token; the first one came from its prompt."""
        return self.first_step + self.call.num_true_tokens - 2

    @property
    def growth_phase(self) -> int:
        """It needs another page in the steps whose number has this remainder."""
        return (self.first_step - self.num_prompt_tokens) % PAGE_TOKENS

    def context(self, step: int) -> int:
        """Tokens that it has when the step begins; the last of them is computed in it."""
        return self.num_prompt_tokens + 1 + step - self.first_step

    def num_grown_pages(self, step: int) -> int:
        """Beyond those of its prompt, when the step is over."""
        return num_pages_for(self.context(step)) - self.num_prompt_pages


class Gaps:
    """Nanoseconds between the ends of consecutive steps: the longest since some step, in logarithmic time."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._gaps_ns: list[int] = []

    def add(self, step: int, gap_ns: int) -> None:
        """Only what no later gap exceeds is kept: gaps fall, steps rise."""
        while self._gaps_ns and self._gaps_ns[-1] <= gap_ns:
            self._gaps_ns.pop()
            self._steps.pop()
        self._steps.append(step)
        self._gaps_ns.append(gap_ns)

    def longest_since(self, step: int) -> int:
        """Among the steps from this one on, of which there must be one."""
        return self._gaps_ns[bisect_left(self._steps, step)]


def plan_prompts(prompts: list[FastRow], budget: int, chunk_tokens: int) -> list[tuple[FastRow, int]]:
    """Who computes how many tokens in a step: first those that lack one token, which count as decodes."""
    if len(prompts) == 1:
        row = prompts[0]
        num_tokens = min(row.num_uncomputed, chunk_tokens, budget) if row.num_uncomputed > 1 else 1
        row.num_passed_over = 0 if num_tokens > 0 else row.num_passed_over + 1
        return [(row, num_tokens)] if num_tokens > 0 else []
    longer = [row for row in prompts if row.num_uncomputed > 1]
    planned = [(row, 1) for row in prompts if row.num_uncomputed == 1]
    budget -= len(planned)
    served = []
    for row in in_turn(longer):
        if budget <= 0:
            break
        num_tokens = min(row.num_uncomputed, chunk_tokens, budget)
        budget -= num_tokens
        planned.append((row, num_tokens))
        served.append(row)
    note_turn(longer, served)
    return planned
