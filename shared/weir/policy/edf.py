"""Earliest deadline first. Best where all deadlines can be met; under overload it serves those about to be late first,
and makes them all late (the domino effect), which `hybrid` cures."""

import math
from dataclasses import dataclass

from weir.policy.keyed_queue import KeyedOrder
from weir.policy.params import bounded, check_bounds
from weir.policy.seams import Policy, Waiting


@dataclass(frozen=True, slots=True)
class EdfParams:
    """`default_ttft_s`: when a request without a target is due after its arrival. Being finite it lets nobody starve:
    whatever arrives later than a request's deadline comes after it."""

    default_ttft_s: float = bounded(30.0, 0)

    def __post_init__(self) -> None:
        check_bounds(self)


def make(params: EdfParams) -> Policy:
    order = KeyedOrder(lambda request: (deadline_s(request, params.default_ttft_s),))
    return Policy("edf", order, gate=None, step_budget=None)


def deadline_s(request: Waiting, default_ttft_s: float) -> float:
    """When the first token is due."""
    if request.ttft_deadline_s < math.inf:
        return request.ttft_deadline_s
    return request.arrived_at_s + default_ttft_s
