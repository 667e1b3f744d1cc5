"""Steps of many shapes, and how they are timed: for `weir bench step`, and for the cost that `weir profile` fits.

A grid is timed in rounds over all shapes, so that a slow minute of the machine does not fall on one shape alone.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from weir.core.cost_fit import CostSample
from weir.core.sampling import SamplingParams
from weir.engine.plan import ChunkPlan, ModelRunner, SampleSpec, StepPlan
from weir.kv.geometry import num_pages_for

_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class StepShape:
    """`num_prompt_tokens` of one prompt after `num_before`, beside `num_decodes` at `context_tokens` each."""

    num_prompt_tokens: int = 0
    num_before: int = 0
    num_decodes: int = 0
    context_tokens: int = 0
    """Of each decode, with the token that it computes."""
    is_sampled: bool = True

    @property
    def num_pages(self) -> int:
        return num_pages_for(self.num_before + self.num_prompt_tokens) + self.num_decodes * num_pages_for(
            self.context_tokens
        )

    def plan(self, vocab_size: int) -> StepPlan:
        """Every sequence has pages of its own; what is in them does not matter to the time."""
        chunks = []
        num_prompt_pages = num_pages_for(self.num_before + self.num_prompt_tokens)
        if self.num_prompt_tokens:
            token_ids = tuple((7 * position) % vocab_size for position in range(self.num_prompt_tokens))
            table = tuple(range(num_prompt_pages))
            chunks.append(ChunkPlan(0, self.num_before, token_ids, table, self._sample(0)))
        num_each = num_pages_for(self.context_tokens)
        for index in range(self.num_decodes):
            first = num_prompt_pages + index * num_each
            table = tuple(range(first, first + num_each))
            chunks.append(ChunkPlan(1 + index, self.context_tokens - 1, (1,), table, self._sample(1)))
        return StepPlan(0, tuple(chunks))

    def _sample(self, output_index: int) -> SampleSpec | None:
        return SampleSpec(_GREEDY, output_index) if self.is_sampled else None


def shapes(max_context_tokens: int, max_num_seqs: int, max_chunk_tokens: int) -> list[StepShape]:
    """Prompts, decodes and both, as far as the bounds allow."""
    sizes = [size for size in (16, 64, 160, max_chunk_tokens) if 2 <= size <= max_chunk_tokens]
    contexts = [context for context in (64, 400, 1200) if context < max_context_tokens]
    counts = sorted({min(count, max_num_seqs) for count in (1, 2, 4, 8, 16, 32)})
    made = [
        StepShape(size, before) for size in sizes for before in (0, *contexts) if size + before < max_context_tokens
    ]
    made += [StepShape(num_decodes=count, context_tokens=context) for count in counts for context in contexts]
    made += [StepShape(size, 0, count, contexts[0]) for size in sizes[:3] for count in counts[-2:]]
    return made


def time_grid(
    grid: Sequence[StepShape],
    runner: ModelRunner,
    vocab_size: int,
    rounds: int,
    *,
    seed: int = 0,
    now_s: Callable[[], float] = time.perf_counter,
) -> Iterator[CostSample]:
    """`rounds` times each shape, in an order of its own each round; the first round is not measured."""
    plans = [shape.plan(vocab_size) for shape in grid]
    chance = random.Random(seed)
    for number in range(rounds + 1):
        chance.shuffle(plans)
        for plan in plans:
            started_s = now_s()
            runner.run(plan)
            if number > 0:
                yield CostSample(*plan.load, duration_ms=(now_s() - started_s) * 1e3)


def timed_ms(call: Callable[[], object], repeats: int) -> list[float]:
    """Of each call but the first, which warms up."""
    call()
    times_ms = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        call()
        times_ms.append((time.perf_counter() - start_s) * 1e3)
    return times_ms
