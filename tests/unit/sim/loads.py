"""Small loads and systems for tests of the simulator."""

import random

from weir.core.cost import StepCost
from weir.sim.profile import CostProfile
from weir.sim.workloads.workload import SimRequest, Workload

PROFILE = CostProfile(
    name="test",
    step=StepCost(5.0, 0.02, 1e-6, 0.01, 1e-4),
    num_pages=2000,
    kv_bytes_per_token=131_072,
    max_context_tokens=8192,
)


def poisson_load(num: int, rate_a_s: float, *, prompt: int = 200, output: int = 60, seed: int = 1) -> Workload:
    """Exponential lengths."""
    source = random.Random(seed)
    at_s, requests = 0.0, []
    for index in range(num):
        at_s += source.expovariate(rate_a_s)
        num_prompt = 1 + int(source.expovariate(1 / prompt))
        num_output = 1 + int(source.expovariate(1 / output))
        requests.append(SimRequest(f"r{index}", at_s, min(num_prompt, 2000), min(num_output, 500), 500))
    return Workload("poisson", tuple(requests))


def shared_prompts(num: int, rate_a_s: float, *, num_prompts: int = 4, seed: int = 1) -> Workload:
    """Prompts of 32-token blocks; all begin with the same one, then each with those of one of `num_prompts`."""
    source = random.Random(seed)
    at_s, requests = 0.0, []
    for index in range(num):
        at_s += source.expovariate(rate_a_s)
        kind, num_blocks = source.randrange(num_prompts), source.randrange(2, 12)
        blocks = (0, *(1000 * (kind + 1) + number for number in range(1, num_blocks)), 10**6 + index)
        num_prompt = 32 * num_blocks + source.randrange(1, 32)
        requests.append(SimRequest(f"r{index}", at_s, num_prompt, source.randrange(1, 40), 100, prefix_blocks=blocks))
    return Workload("shared", tuple(requests), block_tokens=32)
