"""What one request may ask for at most, as a tenant or a lane bounds it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestCaps:
    """0: no cap but the model's and the API's own.

    A request that leaves `top_k` or `max_tokens` out takes the cap, so that leaving it out is no way around it.
    """

    max_n: int = 0
    max_top_k: int = 0
    max_output_tokens: int = 0
    """Of one choice."""
    max_sequence_tokens: int = 0
    """Prompt and output of one choice together: what it may hold in the KV cache."""


NO_CAPS = RequestCaps()
