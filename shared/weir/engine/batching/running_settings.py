"""The settings of a running batch."""

from dataclasses import dataclass, field

from weir.engine.batching.joining import JoinSettings
from weir.engine.batching.pausing import RestSettings
from weir.engine.batching.prefill_batches import PrefillBatchSettings
from weir.engine.memory.preemption import PreemptionSettings


@dataclass(frozen=True, slots=True)
class RunningSettings:
    """How sequences join, and what happens when there are too few pages or places for those that have.

    `num_arena_pages`: what the arena has, for policies that look at its use; 0: what the pool holds is all there is.
    """

    join: JoinSettings = field(default_factory=JoinSettings)
    preemption: PreemptionSettings = field(default_factory=PreemptionSettings)
    pauses: RestSettings = field(default_factory=RestSettings)
    num_arena_pages: int = 0
    prefill_batches: PrefillBatchSettings | None = None
    """None: never. While a policy has a gate or a step budget, and for static batches: never."""
