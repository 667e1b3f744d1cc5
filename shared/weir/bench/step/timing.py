"""Steps to time, and how they are timed: what `weir bench step` is made of."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from weir.core.sampling import SamplingParams
from weir.engine.plan import ChunkPlan, SampleSpec, StepPlan
from weir.kv.geometry import num_pages_for

DECODE_CONTEXT = 160
_REPEATS = 9
_BANDWIDTH_BYTES = 256 << 20
_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class StepTime:
    """One kind of step, timed `_REPEATS` times. `floor_ms`: reading every weight once at the measured bandwidth."""

    name: str
    num_tokens: int
    median_ms: float
    fastest_ms: float
    slowest_ms: float
    floor_ms: float

    @property
    def tokens_a_second(self) -> float:
        return self.num_tokens / self.median_ms * 1e3


@dataclass(frozen=True, slots=True)
class DecodeSplit:
    """Where the time of a decode step goes. `attention_ms` is what the context costs beyond its first token."""

    num_sequences: int
    linear_ms: float
    head_ms: float
    attention_ms: float
    other_ms: float


def prefill_plan(num_tokens: int, vocab_size: int) -> StepPlan:
    """One prompt in one chunk."""
    token_ids = tuple((7 * position) % vocab_size for position in range(num_tokens))
    table = tuple(range(num_pages_for(num_tokens)))
    return StepPlan(0, (ChunkPlan(0, 0, token_ids, table, SampleSpec(_GREEDY, 0)),))


def decode_plan(num_sequences: int, context_tokens: int = DECODE_CONTEXT, is_sampled: bool = True) -> StepPlan:
    """One token each, behind `context_tokens` tokens in pages of their own."""
    num_pages = num_pages_for(DECODE_CONTEXT + 1)
    sample = SampleSpec(_GREEDY, 1) if is_sampled else None
    chunks = (
        ChunkPlan(slot, context_tokens, (1,), tuple(range(slot * num_pages, (slot + 1) * num_pages)), sample)
        for slot in range(num_sequences)
    )
    return StepPlan(0, tuple(chunks))


def time_step(name: str, plan: StepPlan, run: Callable[[StepPlan], object], floor_ms: float) -> StepTime:
    """One step unmeasured, then `_REPEATS` measured ones."""
    times_ms = timed_ms(lambda: run(plan), _REPEATS)
    return StepTime(name, plan.num_tokens, statistics.median(times_ms), min(times_ms), max(times_ms), floor_ms=floor_ms)


def memory_bandwidth() -> float:
    """Bytes a second that all threads together read from memory, at best; far more data than any cache holds."""
    data = torch.ones(_BANDWIDTH_BYTES // 4)
    return _BANDWIDTH_BYTES / (min(timed_ms(data.sum, _REPEATS)) / 1e3)


def timed_ms(call: Callable[[], object], repeats: int) -> list[float]:
    call()
    times_ms = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        call()
        times_ms.append((time.perf_counter() - start_s) * 1e3)
    return times_ms
