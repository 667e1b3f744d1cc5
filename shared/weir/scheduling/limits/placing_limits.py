"""How requests are placed, and how much memory they are taken to need."""

from dataclasses import dataclass
from typing import Literal, get_args

from weir.kv.geometry import num_pages_for
from weir.scheduling.limits.ranges import check_choice, check_range

MemoryFitName = Literal["conservative", "aggressive", "past-future", "predicted"]
Router = Literal["estimated-ttft", "least-load", "longest-prefix", "random"]


@dataclass(frozen=True, slots=True)
class PlacingLimits:
    """`router` and `memory_fit` beside the defaults are baselines to measure against; `predicted` wants a predictor
    for every request, and takes its lengths for the truth."""

    memory_fit: MemoryFitName = "conservative"
    memory_reserve: float = 0.05
    """Part of an arena that the past-future test leaves free: for what lengths of the past do not tell."""
    router: Router = "estimated-ttft"
    small_pool: int = 16
    """Pools of at most this many workers are looked through; of larger ones a few, sampled at random."""
    itl_weight: float = 10.0
    """Milliseconds to the first token that one between two tokens is worth."""
    prefill_weight: float = 0.2
    """What a millisecond of a worker's prefill counts against one to the first token: others wait for it."""
    hand_off_ms: float = 1.0
    hand_off_page_ms: float = 0.0
    """For each page of the prompt; 0 where pages change owner and do not move."""
    local_harm: float = 0.1
    """What a millisecond by which each running sequence is delayed counts against one to the first token."""
    local_gain: float = 0.25
    """A request is prefilled by its decode worker only where that is cheaper by this part."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice(self, "memory_fit", get_args(MemoryFitName))
        check_choice(self, "router", get_args(Router))
        for name, low, high in (
            ("memory_reserve", 0, 0.9),
            ("small_pool", 2, 1024),
            ("itl_weight", 0, 10_000),
            ("prefill_weight", 0, 100),
            ("hand_off_ms", 0, 60_000),
            ("hand_off_page_ms", 0, 1000),
            ("local_harm", 0, 100),
            ("local_gain", 0, 1),
            ("seed", 0, 2**63 - 1),
        ):
            check_range(self, name, low, high)

    def hand_off_time_ms(self, num_prompt_tokens: int) -> float:
        """From the end of the prefill until the decode worker can go on."""
        if not self.hand_off_page_ms:
            return self.hand_off_ms
        return self.hand_off_ms + self.hand_off_page_ms * num_pages_for(num_prompt_tokens)


DEFAULT_PLACING = PlacingLimits()
