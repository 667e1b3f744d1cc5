"""The seam to whatever knows what workers can do: the simulator in earnest, a formula in tests."""

from typing import NamedTuple, Protocol

from weir.planner.observation import ExpectedLoad, Pools


class Prediction(NamedTuple):
    """Of one load on one set of pools, when it goes on for a while."""

    attainment: float
    """Share of the requests that meet their SLO."""
    ttft_s: float
    """The mean; infinite where none is served."""
    itl_s: float


class CapacityModel(Protocol):
    """Of one model on workers of one kind. Calls may take seconds of computing; the same ones are remembered."""

    def prefill_s(self, num_tokens: float) -> float:
        """Of one prefill worker, for so many uncached tokens in prompts as they were seen last."""
        ...

    def predict(self, load: ExpectedLoad, pools: Pools) -> Prediction: ...

    def least_pools(self, load: ExpectedLoad, target: float, most: Pools) -> Pools:
        """The fewest workers whose attainment is at least `target`, or about what `most` reach where that is less."""
        ...
