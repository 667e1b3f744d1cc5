"""The newest steps of an engine, bounded: what each computed and how long it took. A cost model is fitted to it."""

from collections import deque

from weir.core.cost_fit import CostSample
from weir.engine.messages import StepTiming
from weir.engine.plan import StepLoad


class StepLog:
    """Keeps the newest `max_steps` steps, and `num_added` shows whether there are new ones."""

    def __init__(self, max_steps: int = 4096) -> None:
        self._samples: deque[CostSample] = deque(maxlen=max_steps)
        self.num_added = 0

    def add(self, timing: StepTiming) -> None:
        if timing.duration_s > 0:
            self._samples.append(sample_of(timing.load, timing.duration_s))
            self.num_added += 1

    def samples(self) -> tuple[CostSample, ...]:
        """The oldest first."""
        return tuple(self._samples)


def sample_of(load: StepLoad, duration_s: float) -> CostSample:
    return CostSample(*load, duration_ms=duration_s * 1e3)
