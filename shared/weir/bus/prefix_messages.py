"""KV events: what the owner of pages reports of its prefix cache to the scheduler.

They are hints: a lost one costs time, never a token. Pages are known by the first SCHEDULER_HASH_BYTES of their hashes,
one after the other.
"""

import re
from dataclasses import dataclass

MAX_HASHES = 100_000
"""In one message: 800 kB, which the bus takes."""


_ARENA_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


def _check_arena_id(arena_id: str) -> None:
    """It is part of a subject."""
    if not _ARENA_ID.fullmatch(arena_id):
        raise ValueError(f"arena_id {arena_id[:64]!r}: use 1 to 128 characters of A-Z a-z 0-9 _ -")


@dataclass(frozen=True, slots=True)
class PrefixChanged:
    """What came into the cache of an arena and went out of it since the message before.

    Sent at least every second, with nothing in it if nothing happened, so that a lost one is soon noticed. An arena
    that starts anew starts a new incarnation, with sequence 0 and an empty cache before it.
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

    def __post_init__(self) -> None:
        _check_arena_id(self.arena_id)


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
