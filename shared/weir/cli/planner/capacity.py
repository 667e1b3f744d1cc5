"""What the workers of a running stack can do: by their own measurements, or by a profile that was given."""

from collections.abc import Callable

from weir.core.cost import StepCost
from weir.kv.geometry import PAGE_TOKENS
from weir.planner.capacity import Prediction
from weir.planner.observation import ExpectedLoad, Pools
from weir.scheduling.limits import CoreLimits
from weir.sim.capacity import CapacitySpec, SimCapacity
from weir.sim.planning import PoolSizes
from weir.sim.profile import CostProfile
from weir.sim.results.metrics import Slo
from weir.sim.spec import LinkSpec, PoolSpec, SystemSpec

_NEWS = 1.25
"""A coefficient that has changed by so much makes it another worker."""
_ANY_LINK = LinkSpec(25.0)
"""Fast engines are for workers with a link; on one host no byte moves, and here hardly any time passes."""


def measured_profile(step: StepCost, num_pages: int) -> CostProfile:
    """Of a worker with so many pages."""
    pages = max(1, num_pages)
    return CostProfile("measured", step, pages, kv_bytes_per_token=1024, max_context_tokens=pages * PAGE_TOKENS)


class MeasuredCapacity:
    """Implements `weir.planner.capacity.CapacityModel`. Must be told of workers before it is asked."""

    def __init__(self, slo: Slo, limits: CoreLimits) -> None:
        self._slo = slo
        self._limits = limits
        self._workers: tuple[PoolSpec, PoolSpec] | None = None
        self._max_tokens = 0
        self._model: SimCapacity | None = None

    def measure(self, prefill: PoolSpec, decode: PoolSpec, max_tokens: int = 0) -> None:
        """One worker of each, and what requests ask for at most; what is about the same as before changes nothing."""
        is_asked_more = not 1 / _NEWS < (max_tokens + 1) / (self._max_tokens + 1) < _NEWS
        if self._workers is not None and not is_asked_more and not any(map(_is_news, self._workers, (prefill, decode))):
            return
        self._workers, self._max_tokens = (prefill, decode), max_tokens
        system = _system_of(prefill, decode)
        self._model = SimCapacity(CapacitySpec(system, self._slo, self._limits, max_tokens=max_tokens))

    @property
    def is_known(self) -> bool:
        return self._model is not None

    def prefill_s(self, num_tokens: float) -> float:
        return self._known.prefill_s(num_tokens)

    def predict(self, load: ExpectedLoad, pools: Pools) -> Prediction:
        return self._known.predict(load, pools)

    def least_pools(self, load: ExpectedLoad, target: float, most: Pools) -> Pools:
        return self._known.least_pools(load, target, most)

    @property
    def _known(self) -> SimCapacity:
        assert self._model is not None, "measured before"
        return self._model


def _system_of(prefill: PoolSpec, decode: PoolSpec) -> Callable[[PoolSizes], SystemSpec]:
    def system(sizes: PoolSizes) -> SystemSpec:
        pools = (_with_num(prefill, sizes.num_prefill), _with_num(decode, sizes.num_decode))
        return SystemSpec(pools, _ANY_LINK)

    return system


def _with_num(pool: PoolSpec, num: int) -> PoolSpec:
    sizes = (pool.max_num_seqs, pool.max_num_batched_tokens, pool.chunk_tokens)
    return PoolSpec(pool.role, num, pool.profile, *sizes)


def _is_news(before: PoolSpec, now: PoolSpec) -> bool:
    """Steps of a typical size take another time, or there is another number of places."""
    if (before.max_num_seqs, before.max_num_batched_tokens) != (now.max_num_seqs, now.max_num_batched_tokens):
        return True
    if not 1 / _NEWS < now.num_worker_pages / before.num_worker_pages < _NEWS:
        return True
    pairs = zip(_typical_ms(before.profile.step), _typical_ms(now.profile.step), strict=True)
    return any(not 1 / _NEWS < new_ms / max(1e-9, old_ms) < _NEWS for old_ms, new_ms in pairs)


def _typical_ms(step: StepCost) -> tuple[float, float]:
    """Of a prompt, and of a step of a small batch."""
    return step.prefill_ms(512, 0, 512), step.step_ms((), 8, 8 * 512)
