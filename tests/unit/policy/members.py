"""Batches as gates see them."""

from weir.policy.registry import PolicySpec
from weir.policy.seams import BatchView, Gate, Member


def gate_of(name: str, **params: float) -> Gate:
    gate = PolicySpec(name, params).make().gate
    assert gate is not None
    return gate


def member(request_id: str, predicted: float | None, emitted: int = 0, *, lane: int = 0, since_s: float = 0) -> Member:
    return Member(request_id, 100, emitted, since_s, predicted, lane)


def view(waiting: list[Member], running: list[Member], max_running: int, free: int = 10**6) -> BatchView:
    return BatchView(waiting, running, max_running, 10**6, free)
