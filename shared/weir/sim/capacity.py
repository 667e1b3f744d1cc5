"""What workers can do, by simulation: short loads on candidate pools, each of which is simulated once."""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from weir.planner.capacity import Prediction
from weir.planner.observation import ExpectedLoad, Pools
from weir.scheduling.limits import CoreLimits
from weir.sim.planning import PoolSizes, search_upward
from weir.sim.results.metrics import Estimate, Slo, Slos, summarize
from weir.sim.simulator import simulate
from weir.sim.spec import PoolSpec, SystemSpec
from weir.sim.workloads.workload import Lengths, Workload, draw, poisson

_MAX_REMEMBERED = 4096
_RATE_STEP = 1.08
_LENGTH_STEP = 1.15
_MOST_BUSY = 0.9
"""Of the time: workers that are busier keep nobody's SLO for long, whatever a short simulation says."""
_NO_HELP = 0.01
"""Of the attainment: for less no worker is started."""
_LEAST_COMPUTED = 0.01
"""Of a prompt: its last token is computed however much of it is cached."""
_HOPELESS = Prediction(0.0, math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class CapacitySpec:
    """`system(pools)`: the workers of which it is asked, with a link. `num_requests`: of one simulation."""

    system: Callable[[PoolSizes], SystemSpec]
    slo: Slo
    limits: CoreLimits
    num_requests: int = 200
    max_steps: int = 8
    """Of one search, each two simulations at most; what it has reached then is a floor already."""
    max_tokens: int = 0
    """What each request asks for at most, where a worker has room for so many; never less than the longest answer of
    the load."""


class SimCapacity:
    """Implements `weir.planner.capacity.CapacityModel`. Loads that differ by a few percent are one load: the rate is
    rounded up to the next power of 1.08, mean lengths to one of 1.15."""

    def __init__(self, spec: CapacitySpec) -> None:
        self.num_simulated = 0
        self._spec = spec
        self._predictions: OrderedDict[tuple[object, ...], Prediction] = OrderedDict()
        self._workloads: OrderedDict[tuple[object, ...], Workload] = OrderedDict()
        system = spec.system(PoolSizes(1, 1))
        self._prefill = next(pool for pool in system.pools if pool.role == "prefill")
        self._decode = next(pool for pool in system.pools if pool.role == "decode")
        self._mean_prompt_tokens = 512.0

    def prefill_s(self, num_tokens: float) -> float:
        """In prompts as long as those of the last load that was asked about."""
        mean = max(1, round(self._mean_prompt_tokens))
        return num_tokens / mean * self._prompt_s(mean)

    def predict(self, load: ExpectedLoad, pools: Pools) -> Prediction:
        """Attainment 0 where workers would be busy for longer than time passes, without a simulation."""
        self._mean_prompt_tokens = load.mean_uncached_tokens or self._mean_prompt_tokens
        if min(pools) < 1:
            return _HOPELESS
        rate_a_s, key = self._key(load)
        if rate_a_s <= 0:
            return Prediction(
                1.0, self._prompt_s(round(self._mean_prompt_tokens)), self._decode.profile.step.base_ms / 1e3
            )
        least = self._lower_bound(load, rate_a_s)
        if pools.prefill < least.prefill or pools.decode < least.decode:
            return _HOPELESS
        found = self._predictions.get((*key, pools))
        if found is None:
            found = self._simulated(load, rate_a_s, key, pools)
            self._predictions[*key, pools] = found
            if len(self._predictions) > _MAX_REMEMBERED:
                self._predictions.popitem(last=False)
        return found

    def least_pools(self, load: ExpectedLoad, target: float, most: Pools) -> Pools:
        rate_a_s, _ = self._key(load)
        if rate_a_s <= 0:
            return Pools(1, 1)

        def judge(sizes: PoolSizes) -> Estimate:
            attainment = self.predict(load, Pools(sizes.num_prefill, sizes.num_decode)).attainment
            return Estimate(attainment, -math.inf, math.inf, 1)

        fewest, largest = PoolSizes(*self._lower_bound(load, rate_a_s)), PoolSizes(*most)
        found = search_upward(judge, target, fewest, largest, self._spec.max_steps)
        if judge(found).mean < target and (reachable := judge(largest).mean - _NO_HELP) < target:
            # Where all that there may be misses the target, as a prompt by itself may do, more workers are no help.
            found = search_upward(judge, reachable, fewest, largest, self._spec.max_steps)
        return Pools(found.num_prefill, found.num_decode)

    def _lower_bound(self, load: ExpectedLoad, rate_a_s: float) -> Pools:
        """By the law of Little: fewer would be busier than workers may be."""
        prompt_s = sum(map(self._prompt_s, load.prompt_lengths)) / len(load.prompt_lengths) * (1 - load.cached_share)
        step, num_seqs = self._decode.profile.step, self._decode.max_num_seqs
        context = load.mean_prompt_tokens + load.mean_output_tokens / 2
        step_ms = step.step_ms((), num_seqs, round(num_seqs * context))
        num_running = rate_a_s * load.mean_output_tokens * step_ms / 1e3
        return Pools(
            max(1, math.ceil(rate_a_s * prompt_s / _MOST_BUSY)), max(1, math.ceil(num_running / num_seqs / _MOST_BUSY))
        )

    def _prompt_s(self, num_tokens: int) -> float:
        """By itself; prompts that share a step share its base."""
        step = self._prefill.profile.step
        num_steps = num_tokens / self._prefill.max_num_batched_tokens
        return (num_steps * step.base_ms + step.prefill_ms(num_tokens, 0, num_tokens) - step.base_ms) / 1e3

    def _key(self, load: ExpectedLoad) -> tuple[float, tuple[object, ...]]:
        """The rate that stands for this one, and what tells loads apart."""
        if not load.rate_a_s > 0 or not load.prompt_lengths or not load.output_lengths:
            return 0.0, ()
        rate = math.ceil(math.log(load.rate_a_s, _RATE_STEP) - 1e-9)
        means = (load.mean_prompt_tokens, load.mean_uncached_tokens, load.mean_output_tokens)
        return _RATE_STEP**rate, (rate, *(round(math.log(max(1.0, mean), _LENGTH_STEP)) for mean in means))

    def _simulated(self, load: ExpectedLoad, rate_a_s: float, key: tuple[object, ...], pools: Pools) -> Prediction:
        """Warm-up left out, as everywhere."""
        self.num_simulated += 1
        workload = self._workloads.get(key)
        if workload is None:
            workload = self._workloads[key] = self._workload(load, rate_a_s)
            if len(self._workloads) > _MAX_REMEMBERED // 16:
                self._workloads.popitem(last=False)
        system = self._spec.system(PoolSizes(pools.prefill, pools.decode))
        system = replace(system, pools=tuple(_with_cache(pool, load.cached_share) for pool in system.pools))
        result = simulate(system, workload, limits=self._spec.limits)
        summary = summarize(result, Slos(self._spec.slo))
        if not summary.num_finished:
            return _HOPELESS
        return Prediction(summary.attainment, summary.mean_ttft_s, summary.mean_tpot_s)

    def _workload(self, load: ExpectedLoad, rate_a_s: float) -> Workload:
        """The same draws for every rate and pool, so that more is never worse by chance alone."""
        source = np.random.default_rng(0)
        num = self._spec.num_requests
        prompts = source.choice(np.array(load.prompt_lengths), num)
        outputs = source.choice(np.array(load.output_lengths), num)
        lengths = [
            Lengths(max(1, prompt), max(1, output))
            for prompt, output in zip(prompts.tolist(), outputs.tolist(), strict=True)
        ]
        times = poisson(rate_a_s, num, source)
        room = self._decode.max_context_tokens - max(pair.num_prompt_tokens for pair in lengths)
        asked = max(min(self._spec.max_tokens, room), *(pair.num_output_tokens for pair in lengths))
        return draw(lengths, times, source, name="expected", max_tokens=asked)


def _with_cache(pool: PoolSpec, share: float) -> PoolSpec:
    """Its prefill workers find that share of each prompt cached: they compute the rest, which attends to all of it."""
    left = max(_LEAST_COMPUTED, 1 - share)
    if pool.role != "prefill" or left == 1:
        return pool
    step = pool.profile.step
    step = replace(
        step,
        prefill_token_ms=step.prefill_token_ms * left,
        prefill_pair_ms=step.prefill_pair_ms * left * (2 - left),
    )
    return replace(
        pool,
        profile=replace(pool.profile, step=step),
        max_num_batched_tokens=round(pool.max_num_batched_tokens / left),
        chunk_tokens=round(pool.chunk_tokens / left),
    )
