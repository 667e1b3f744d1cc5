"""First come, first served: what everything else is measured against."""

from dataclasses import dataclass

from weir.policy.keyed_order import KeyedOrder
from weir.policy.seams import Policy, Waiting


@dataclass(frozen=True, slots=True)
class FcfsParams:
    """There are none."""


def make(params: FcfsParams) -> Policy:
    del params
    return Policy("fcfs", fcfs_order(), gate=None, step_budget=None)


def fcfs_order() -> KeyedOrder:
    """By arrival, which every queue falls back to."""
    return KeyedOrder(_no_key)


def _no_key(request: Waiting) -> tuple[float, ...]:
    del request
    return ()
