"""What the owner of an arena says of prefixes that came from other ones: a part of its news."""

from dataclasses import dataclass

MAX_FETCHED = 16
"""In one message."""


@dataclass(frozen=True, slots=True)
class PrefixFetched:
    """What a fetch from another arena has brought, and how long it took: from what the scheduler learns links."""

    source: str
    """HOST:PORT of that arena's `Pages`."""
    num_bytes: int
    """0: it failed."""
    busy_s: float
    """While pages were asked for and not here yet."""
    round_trip_s: float
    """Until the first offer came; 0: it is not known."""
