"""What `weir bench serve` sends and when: random prompts or a trace, with lanes and tenants by their shares.

Everything follows from the seed, so that two runs send the same.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path

from weir.sim.workloads.traces import read_trace
from weir.sim.workloads.workload import SimRequest, Workload

_TOKEN_LOW = 1000
_TOKEN_HIGH = 40_000


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request. Times in seconds after the start."""

    prompt: Sequence[int]
    output_len: int
    at_s: float = 0.0
    lane: str = ""
    tenant: str = ""
    body: Mapping[str, object] = field(default_factory=dict)
    """More fields of the request."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Names with their shares of the requests, which need not add up to 1. Without names every request has none."""

    shares: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> "Mix":
        """Of `interactive=0.2,batch=0.8`. Raises ValueError."""
        shares: dict[str, float] = {}
        for part in text.split(",") if text else ():
            name, _, share = part.partition("=")
            try:
                value = float(share)
            except ValueError:
                value = -1.0
            if not name.strip() or name.strip() in shares or not 0 < value < float("inf"):
                raise ValueError(f"mix {text!r}: {part!r} must be NAME=SHARE with a share above 0, each name once")
            shares[name.strip()] = value
        return cls(shares)

    def draw(self, num: int, seed: int) -> list[str]:
        if not self.shares:
            return [""] * num
        return random.Random(seed).choices(list(self.shares), list(self.shares.values()), k=num)


def random_prompts(num: int, length: int, seed: int) -> list[list[int]]:
    """Token ids, the same for the same seed."""
    source = random.Random(seed)
    return [[source.randrange(_TOKEN_LOW, _TOKEN_HIGH) for _ in range(length)] for _ in range(num)]


def random_jobs(num: int, input_len: int, output_len: int, request_rate: float, seed: int) -> list[BenchRequest]:
    """`request_rate` a second, infinite: all at once."""
    prompts = random_prompts(num, input_len, seed)
    source = random.Random(seed + 1)
    gaps_s = [source.expovariate(request_rate) if request_rate != float("inf") else 0.0 for _ in prompts]
    times_s = [0.0, *accumulate(gaps_s)]
    return [BenchRequest(prompt, output_len, at_s) for prompt, at_s in zip(prompts, times_s, strict=False)]


@dataclass(frozen=True, slots=True)
class TraceReplay:
    """How a trace is replayed: times are multiplied by `time_scale`, lengths divided by the other two."""

    path: Path
    time_scale: float = 1.0
    prompt_scale: float = 1.0
    output_scale: float = 1.0


def trace_jobs(replay: TraceReplay, num: int, seed: int) -> list[BenchRequest]:
    """The first `num` requests. Raises `weir.sim.workloads.trace_file.TraceError`.

    Where the trace says what requests share, their prompts begin alike.
    """
    workload = read_trace(replay.path, seed=seed)
    return [_traced(workload, request, replay, seed + index) for index, request in enumerate(workload.requests[:num])]


def mixed(jobs: Sequence[BenchRequest], lanes: Mix, tenants: Mix, seed: int) -> list[BenchRequest]:
    """The jobs with lanes and tenants by shares, where there are any: those of a trace stay otherwise."""
    sampled = zip(jobs, lanes.draw(len(jobs), seed + 2), tenants.draw(len(jobs), seed + 3), strict=True)
    return [replace(job, lane=lane or job.lane, tenant=tenant or job.tenant) for job, lane, tenant in sampled]


def _traced(workload: Workload, request: SimRequest, replay: TraceReplay, seed: int) -> BenchRequest:
    length = max(1, round(request.num_prompt_tokens / replay.prompt_scale))
    body: dict[str, object] = {}
    for name, seconds in (
        ("ttft_target_ms", request.ttft_target_s),
        ("itl_target_ms", request.itl_target_s),
        ("deadline_ms", request.deadline_s),
    ):
        if seconds > 0:
            body[name] = max(1, round(1000 * seconds))
    return BenchRequest(
        prompt=_prompt_of(
            request.prefix_blocks, length, max(1, round(workload.block_tokens / replay.prompt_scale)), seed
        ),
        output_len=max(1, round(request.num_output_tokens / replay.output_scale)),
        at_s=request.arrival_s * replay.time_scale,
        lane=request.lane,
        tenant=request.tenant,
        body=body,
    )


def _prompt_of(blocks: Sequence[int], length: int, block_len: int, seed: int) -> list[int]:
    tokens: list[int] = []
    for block in blocks:
        if len(tokens) >= length:
            break
        tokens += random_prompts(1, block_len, block)[0]
    tokens += random_prompts(1, max(0, length - len(tokens)), seed)[0]
    return tokens[:length]
