"""Workloads put together from lengths and arrival times, and made out of others.

`max_tokens` is one number for a whole workload. What a client asks for at most says little about what it gets, and a
bound close to each request's true length would tell the scheduler what nobody knows.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from weir.sim.workloads.arrivals import Times, rescaled
from weir.sim.workloads.workload import SimRequest, Workload


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


def at_rate(workload: Workload, rate_a_s: float) -> Workload:
    """The same requests in the same pattern, stretched to a mean of `rate_a_s`."""
    return with_arrivals(workload, rescaled([request.arrival_s for request in workload.requests], rate_a_s))


def with_arrivals(workload: Workload, arrivals_s: Times) -> Workload:
    """The same requests in the same order, at these times."""
    moved = (
        dataclasses.replace(request, arrival_s=at_s)
        for request, at_s in zip(workload.requests, arrivals_s.tolist(), strict=True)
    )
    return dataclasses.replace(workload, requests=tuple(moved))


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
