"""First come, first served: what everything else is measured against."""

from weir.policy.keyed_queue import KeyedOrder
from weir.policy.params import NoParams
from weir.policy.seams import Policy


def make(params: NoParams) -> Policy:
    del params
    return Policy("fcfs", fcfs_order(), gate=None, step_budget=None)


def fcfs_order() -> KeyedOrder:
    """By arrival, which every queue falls back to."""
    return KeyedOrder(lambda request: ())
