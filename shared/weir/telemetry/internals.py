"""What operators see of a worker's steps and of an arena's pages, when they ask for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

MAX_STEPS = 256
MAX_PAGE_RANGES = 1024
MAX_STEP_SEQUENCES = 128
"""Of a step that holds more, the first so many are named."""


@dataclass(frozen=True, slots=True)
class SequenceShare:
    """What one sequence got of a step."""

    request_id: str
    num_prompt_tokens: int
    """0: the step decoded it."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One forward pass of a worker."""

    step: int
    started_at_s: float
    """Unix time."""
    duration_ms: float
    num_sequences: int
    num_tokens: int
    num_prefill_tokens: int
    sequences: tuple[SequenceShare, ...] = ()


@dataclass(frozen=True, slots=True)
class PageRange:
    """Pages of one range of an arena, by their state."""

    num_free: int
    num_leased: int
    num_orphaned: int
    num_cached: int
    """Sealed prefixes that nobody uses now."""
    num_shared: int
    """Sealed prefixes that sequences use."""


@dataclass(frozen=True, slots=True)
class PageMap:
    """All pages of an arena, in ranges of `pages_per_range`; the last one may be shorter."""

    num_pages: int
    pages_per_range: int
    ranges: tuple[PageRange, ...]


ListSteps = Callable[[int], Sequence[StepRecord]]
"""At most so many of the newest."""
MapPages = Callable[[int], PageMap]
"""In at most so many ranges."""
