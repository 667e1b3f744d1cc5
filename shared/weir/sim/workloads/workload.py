"""What is asked of a simulated system: requests in the order of their arrival, drawn or made out of others.

`max_tokens` is one number for a whole workload. What a client asks for at most says little about what it gets, and a
bound close to each request's true length would tell the scheduler what nobody knows.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weir.kv.geometry import PAGE_TOKENS

Times = NDArray[np.float64]
_NOT_NEGATIVE = ("arrival_s", "deadline_s", "ttft_target_s", "itl_target_s", "predicted_output_tokens")


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request. `num_output_tokens` is the truth that only the modelled workers may know."""

    request_id: str
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    lane: str = ""
    tenant: str = ""
    prefix_blocks: tuple[int, ...] = ()
    """Equal leading ids are an equal prefix of the prompt; each stands for `block_tokens` of the workload."""
    deadline_s: float = 0.0
    """From the arrival; 0: none."""
    ttft_target_s: float = 0.0
    """0: its lane's."""
    itl_target_s: float = 0.0
    """0: its lane's."""
    predicted_output_tokens: float = 0.0
    """0: no prediction."""
    output_score: float | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """`requests` by arrival time."""

    name: str
    requests: Sequence[SimRequest]
    block_tokens: int = 512
    """Of each of a request's `prefix_blocks`."""


def check_workload(workload: Workload) -> None:
    """Raises ValueError, naming request and field."""
    if workload.block_tokens % PAGE_TOKENS:
        raise ValueError(f"block_tokens {workload.block_tokens}: must be a multiple of {PAGE_TOKENS}")
    seen: set[str] = set()
    last_s = 0.0
    for request in workload.requests:
        for name in ("num_prompt_tokens", "num_output_tokens", "max_tokens"):
            if getattr(request, name) < 1:
                raise ValueError(f"request {request.request_id}: {name} {getattr(request, name)}, must be at least 1")
        for name in _NOT_NEGATIVE:
            if not 0 <= getattr(request, name) < inf:
                value = getattr(request, name)
                raise ValueError(f"request {request.request_id}: {name} {value}, must be finite and at least 0")
        if request.request_id in seen:
            raise ValueError(f"request {request.request_id}: is in the workload twice")
        if request.arrival_s < last_s:
            raise ValueError(f"request {request.request_id}: arrival_s {request.arrival_s}, after one at {last_s}")
        seen.add(request.request_id)
        last_s = request.arrival_s


class Lengths(NamedTuple):
    """Of one request, in tokens."""

    num_prompt_tokens: int
    num_output_tokens: int


def draw(
    lengths: Sequence[Lengths],
    arrivals_s: Times,
    source: np.random.Generator,
    *,
    name: str = "sampled",
    lane: str = "",
    tenant: str = "",
    max_tokens: int = 0,
) -> Workload:
    """A request for each arrival, its lengths drawn from `lengths` without repeats as long as there are enough.

    `max_tokens` 0: the largest output of all `lengths`. Raises ValueError if it is below what is drawn.
    """
    if not lengths:
        raise ValueError(f"{name}: no lengths to draw from")
    picks = source.choice(len(lengths), len(arrivals_s), replace=len(arrivals_s) > len(lengths))
    asked = max_tokens or max(pair.num_output_tokens for pair in lengths)
    requests = []
    for number, (at_s, pick) in enumerate(zip(arrivals_s.tolist(), picks.tolist(), strict=True)):
        num_prompt, num_output = lengths[pick]
        if num_output > asked:
            raise ValueError(f"{name}: max_tokens {asked} is below an output of {num_output} tokens")
        requests.append(SimRequest(f"{name}-{number}", at_s, num_prompt, num_output, asked, lane, tenant))
    return Workload(name, tuple(requests))


def poisson(rate_a_s: float, num: int, source: np.random.Generator) -> Times:
    """`num` arrivals of a Poisson process. The first is one gap after 0."""
    _check(rate_a_s, num)
    return np.cumsum(source.exponential(1.0 / rate_a_s, num))


def gamma(rate_a_s: float, cv: float, num: int, source: np.random.Generator) -> Times:
    """Gaps drawn from a Gamma distribution with coefficient of variation `cv`: 1 is Poisson, above it is bursty."""
    _check(rate_a_s, num)
    if not 0 < cv <= 100:
        raise ValueError(f"cv {cv}: must be over 0 and at most 100")
    shape = 1.0 / cv**2
    return np.cumsum(source.gamma(shape, 1.0 / (rate_a_s * shape), num))


def burst(num: int, at_s: float = 0.0) -> Times:
    """All at one moment."""
    _check(1.0, num)
    return np.full(num, float(at_s))


def at_rate(workload: Workload, rate_a_s: float) -> Workload:
    """The same requests in the same pattern, stretched to a mean of `rate_a_s`."""
    times = rescaled([request.arrival_s for request in workload.requests], rate_a_s)
    return with_values(workload, arrival_s=times.tolist())


def with_values(workload: Workload, **values: Sequence[object]) -> Workload:
    """The same requests in the same order with other fields: of each field named, a value for each request."""
    rows = zip(*values.values(), strict=True)
    changed = (
        dataclasses.replace(request, **dict(zip(values, row, strict=True)))
        for request, row in zip(workload.requests, rows, strict=True)
    )
    return dataclasses.replace(workload, requests=tuple(changed))


def first(workload: Workload, num: int) -> Workload:
    """Its first `num` requests."""
    return dataclasses.replace(workload, requests=tuple(workload.requests[:num]))


def merge(name: str, workloads: Sequence[Workload]) -> Workload:
    """All their requests by arrival time. Raises ValueError if they count prefix blocks differently or share an id."""
    block_sizes = {workload.block_tokens for workload in workloads}
    if len(block_sizes) != 1:
        raise ValueError(f"{name}: workloads with blocks of {sorted(block_sizes)} tokens do not merge")
    requests = sorted(
        (request for workload in workloads for request in workload.requests),
        key=lambda request: (request.arrival_s, request.request_id),
    )
    if len({request.request_id for request in requests}) != len(requests):
        raise ValueError(f"{name}: two requests share an id; give the workloads names of their own")
    return Workload(name, tuple(requests), block_sizes.pop())


def rescaled(arrivals_s: Sequence[float] | Times, rate_a_s: float) -> Times:
    """The same pattern from 0 on, stretched so that the mean rate over its span is `rate_a_s`.

    Raises ValueError where all come at one moment: no stretch gives them a rate.
    """
    _check(rate_a_s, len(arrivals_s))
    times: Times = np.asarray(arrivals_s, np.float64) - arrivals_s[0]
    if times[-1] <= 0:
        raise ValueError(f"{len(times)} arrivals at one moment: they have no rate to change")
    stretch = (len(times) - 1) / rate_a_s / float(times[-1])
    return times * stretch


def jittered_within_ticks(arrivals_s: Sequence[float] | Times, tick_s: float, source: np.random.Generator) -> Times:
    """Times that were rounded down to ticks, spread evenly inside them; sorted."""
    if not tick_s > 0:
        raise ValueError(f"tick_s {tick_s}: must be over 0")
    times = np.asarray(arrivals_s, np.float64)
    return np.sort(times + source.uniform(0.0, tick_s, len(times)))


def _check(rate_a_s: float, num: int) -> None:
    if not 0 < rate_a_s < float("inf"):
        raise ValueError(f"rate_a_s {rate_a_s}: must be finite and over 0")
    if num < 1:
        raise ValueError(f"num {num}: must be at least 1")
