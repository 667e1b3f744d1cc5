"""What is sent: the same requests to a stack on this machine and to its simulation, in turns.

What is compared, and how. `live` runs both sides.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from weir.bench.serving.jobs import random_prompts
from weir.bench.serving.records import BenchRequest
from weir.core.cost import StepCost
from weir.sim.profile import CostProfile
from weir.sim.spec import PoolSpec, SystemSpec
from weir.sim.workloads.workload import SimRequest, Workload, poisson

ALLOWED_ERROR = 0.15
"""Beyond what real rounds differ by."""
PREFILL_SIZES = (16, 2048, 512)
DECODE_SIZES = (32, 2048, 256)
"""max_num_seqs, max_num_batched_tokens and chunk_tokens of workers that `weir up` starts."""
TARGET_STEP_MS = 100.0
"""Of both."""
_MESSAGES_TO_FIRST_TOKEN = 4
"""Gateway to scheduler and back, gateway to worker and back."""


@dataclass(frozen=True, slots=True)
class CalibrateConfig:
    """`loads`: parts of the request rate that the stack served when all came at once. Lengths in tokens."""

    model: str = "smollm2-135m"
    loads: tuple[float, ...] = (0.5, 0.8)
    num_requests: int = 60
    rounds: int = 5
    prompt_len: tuple[int, int] = (16, 512)
    output_len: tuple[int, int] = (8, 96)
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.loads or not all(0 < load <= 10 for load in self.loads):
            raise ValueError(f"loads {self.loads}: give at least one, each above 0 and at most 10")
        if self.num_requests < 2 or self.rounds < 2:
            raise ValueError(f"num_requests {self.num_requests}, rounds {self.rounds}: both must be at least 2")


class Served(NamedTuple):
    """One request as its client saw it, in seconds of whatever clock."""

    sent_s: float
    first_token_s: float
    last_token_s: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """Of one round. ITL: time between first and last token by tokens after the first, over all requests."""

    mean_ttft_s: float
    mean_itl_s: float
    output_tok_per_s: float


@dataclass(frozen=True, slots=True)
class Overheads:
    """Measured with one request at a time. `hand_off_ms` None: idle, the scheduler never handed one off."""

    message_ms: float
    hand_off_ms: float | None
    idle_ttft_ms: float
    idle_itl_ms: float


@dataclass(frozen=True, slots=True)
class Costs:
    """What the two workers have fitted to their own steps, means: queues follow these."""

    prefill: StepCost
    decode: StepCost
    prefill_contention: float
    decode_contention: float


@dataclass(frozen=True, slots=True)
class Round:
    """One of a real run and the simulated one before it; shares of requests that their decode worker prefilled."""

    real: LoadFigures
    simulated: LoadFigures
    real_local_share: float
    simulated_local_share: float


@dataclass(frozen=True, slots=True)
class LoadComparison:
    """One figure over all rounds of a load."""

    figure: str
    real: tuple[float, ...]
    simulated: tuple[float, ...]

    @property
    def error(self) -> float:
        """Of the simulated median, relative to the real one."""
        return statistics.median(self.simulated) / statistics.median(self.real) - 1

    @property
    def spread(self) -> tuple[float, float]:
        """Lowest and highest real round, relative to the real median."""
        median = statistics.median(self.real)
        return min(self.real) / median - 1, max(self.real) / median - 1

    @property
    def error_beyond(self) -> float:
        """By how much the simulated median lies outside of the real rounds, relative to the real median; signed."""
        low, high = self.spread
        return self.error - min(max(self.error, low), high)

    @property
    def is_within(self) -> bool:
        return abs(self.error_beyond) <= ALLOWED_ERROR


def figures_of(served: Sequence[Served]) -> LoadFigures:
    """Raises ValueError unless somebody had two tokens."""
    num_gaps = sum(one.num_tokens - 1 for one in served)
    if num_gaps < 1:
        raise ValueError("no request had two tokens")
    duration_s = max(one.last_token_s for one in served) - min(one.sent_s for one in served)
    return LoadFigures(
        mean_ttft_s=statistics.fmean(one.first_token_s - one.sent_s for one in served),
        mean_itl_s=sum(one.last_token_s - one.first_token_s for one in served) / num_gaps,
        output_tok_per_s=sum(one.num_tokens for one in served) / duration_s,
    )


def comparisons(rounds: Sequence[Round]) -> list[LoadComparison]:
    """One for each of `LoadFigures`."""
    return [
        LoadComparison(
            entry.name,
            tuple(getattr(one.real, entry.name) for one in rounds),
            tuple(getattr(one.simulated, entry.name) for one in rounds),
        )
        for entry in fields(LoadFigures)
    ]


def trace_of(config: CalibrateConfig, rate_a_s: float, seed: int) -> Workload:
    """Poisson arrivals; lengths are drawn evenly by their logarithm, and an answer is as long as it may be."""
    source = np.random.default_rng(seed)
    times_s = poisson(rate_a_s, config.num_requests, source).tolist()
    lengths = []
    for low, high in (config.prompt_len, config.output_len):
        sampled = np.exp(source.uniform(np.log(low), np.log(high + 1), config.num_requests))
        lengths.append([min(high, int(length)) for length in sampled])
    requests = [
        SimRequest(f"r{index}", at_s - times_s[0], num_prompt, num_output, num_output)
        for index, (at_s, num_prompt, num_output) in enumerate(zip(times_s, *lengths, strict=True))
    ]
    return Workload("calibration", tuple(requests))


def jobs_of(workload: Workload, seed: int) -> list[BenchRequest]:
    """The same requests for a real stack."""
    return [
        BenchRequest(
            random_prompts(1, request.num_prompt_tokens, seed + index)[0], request.num_output_tokens, request.arrival_s
        )
        for index, request in enumerate(workload.requests)
    ]


def overheads_of(idle_ttft_s: float, idle_itl_s: float, hand_off_s: float | None) -> Overheads:
    """Of medians over requests with a prompt of one token: its step is one like that of any other token,
    so what the first token takes longer than the others is the way of its messages."""
    message_ms = max(0.0, 1000 * (idle_ttft_s - idle_itl_s) / _MESSAGES_TO_FIRST_TOKEN)
    hand_off_ms = None if hand_off_s is None else max(0.0, 1000 * hand_off_s)
    return Overheads(message_ms, hand_off_ms, 1000 * idle_ttft_s, 1000 * idle_itl_s)


def system_of(costs: Costs, overheads: Overheads, num_pages: int) -> SystemSpec:
    """One prefill and one decode worker over one arena of `num_pages`, as `weir up` makes them."""

    def profile_of(name: str, step: StepCost, contention: float) -> CostProfile:
        # Bytes of a token only count for links, and here pages change their owner in place.
        profile = CostProfile(
            name,
            step,
            num_pages=max(1, num_pages // 2),
            kv_bytes_per_token=1,
            bus_ms=overheads.message_ms,
            stream_ms=overheads.message_ms,
            contention=contention,
        )
        return profile if overheads.hand_off_ms is None else replace(profile, hand_off_ms=overheads.hand_off_ms)

    return SystemSpec(
        (
            PoolSpec(
                "prefill",
                1,
                profile_of("live-prefill", costs.prefill, costs.prefill_contention),
                *PREFILL_SIZES,
                target_step_ms=TARGET_STEP_MS,
            ),
            PoolSpec(
                "decode",
                1,
                profile_of("live-decode", costs.decode, costs.decode_contention),
                *DECODE_SIZES,
                serves_locally=True,
                target_step_ms=TARGET_STEP_MS,
            ),
        ),
        keeps_prefixes=False,
    )


def cost_line(name: str, cost: StepCost, contention: float) -> str:
    """For people."""
    values = asdict(cost) | {"contention": contention}
    return f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in values.items())
