"""What the placer expected of a request when it chose where it runs."""

from typing import NamedTuple


class PlacementPlan(NamedTuple):
    """Estimates; zeros where nothing is known, as for a request that an earlier scheduler placed."""

    num_cached_tokens: int = 0
    """Of the prompt, in the memory of the worker that reads it."""
    prefill_ms: float = 0.0
    """Of its prompt by itself."""
    itl_ms: float = 0.0
    num_charged_pages: int = 0
    """That it counts against its lane's share; 0: those that are booked."""


NO_PLAN = PlacementPlan()
