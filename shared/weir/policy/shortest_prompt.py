"""Shortest prompt first: least uncached tokens. Needs no model, and is the yardstick for time to first token."""

from weir.policy.keyed_queue import KeyedOrder
from weir.policy.seams import Policy
from weir.policy.starvation import StarvationParams


def make(params: StarvationParams) -> Policy:
    return Policy("shortest-prompt", shortest_prompt_order(params), gate=None, step_budget=None)


def shortest_prompt_order(params: StarvationParams) -> KeyedOrder:
    """By what is left to prefill of a prompt."""
    return KeyedOrder(lambda request: (float(request.num_uncached_tokens),), params)
