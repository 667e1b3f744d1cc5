"""Longest prompt first: the worst order for the mean time to the first token, and so easy to see at work."""

from dataclasses import dataclass

from weir.policy.keyed_orders import KeyedOrder
from weir.policy.params import bounded, check_bounds
from weir.policy.seams import Policy, Waiting


@dataclass(frozen=True, slots=True)
class LongestPromptParams:
    """Prompts of more than `max_tokens` count as that long: among them the first that came goes first."""

    max_tokens: int = bounded(8192, 1)

    def __post_init__(self) -> None:
        check_bounds(self)


def make(params: LongestPromptParams) -> Policy:
    """An order alone: no gate, whoever has a slot joins; no step budget, decodes first, then prompts in chunks.

    This order may starve short prompts; `weir.policy.starvation` has what keeps Weir's own from that.
    """

    def key_of(request: Waiting) -> tuple[float, ...]:
        return (-float(min(request.num_uncached_tokens, params.max_tokens)),)  # smallest key first

    return Policy("longest-prompt", KeyedOrder(key_of), gate=None, step_budget=None)
