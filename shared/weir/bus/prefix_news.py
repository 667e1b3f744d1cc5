"""What the owner of an arena says of its prefixes: those that are there, and those that came from other arenas."""

import re
from dataclasses import dataclass

_ARENA_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
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


@dataclass(frozen=True, slots=True)
class PrefixChanged:
    """A KV event: what came into the cache of an arena and went out of it since the message before.

    A hint: a lost one costs time, never a token. Pages are the first SCHEDULER_HASH_BYTES of their hashes, one after
    the other. Sent at least every second, with nothing in it if nothing happened, so that a lost one is soon noticed.
    An arena that starts anew starts a new incarnation, with sequence 0 and an empty cache before it.
    """

    arena_id: str
    """The host's, or the worker's if it has memory of its own."""
    incarnation: int
    """Rises with every start."""
    sequence: int
    """Rises by one with each message of an incarnation."""
    num_pages: int | None
    """Cached, after this change; None: more than were reported."""
    added: bytes = b""
    evicted: bytes = b""
    fetched: tuple[PrefixFetched, ...] = ()
    """Since the message before; some may be left out."""

    def __post_init__(self) -> None:
        if not _ARENA_ID.fullmatch(self.arena_id):  # it is part of a subject
            raise ValueError(f"arena_id {self.arena_id[:64]!r}: use 1 to 128 characters of A-Z a-z 0-9 _ -")


@dataclass(frozen=True, slots=True)
class AskPrefixes:
    """The scheduler has missed an event and needs a snapshot."""

    arena_id: str


@dataclass(frozen=True, slots=True)
class PrefixSnapshot:
    """All cached pages, as of the PrefixChanged of this sequence."""

    arena_id: str
    incarnation: int
    sequence: int
    hashes: bytes = b""
