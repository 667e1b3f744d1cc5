"""What workers and the transfer service say to each other about ownership."""

from dataclasses import dataclass

from weir.core.attempt import Attempt


@dataclass(frozen=True, slots=True)
class Acquired:
    """What a lease was given."""

    page_ids: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PageChain:
    """Pages of one sequence in the order of its positions.

    `hashes` are those of its first pages: full ones, computed, that may serve other sequences as a prefix.
    """

    page_ids: tuple[int, ...]
    hashes: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Claims:
    """What a worker says it holds when it attaches.

    A shared page that several of its sequences use is named as often as they do. `handing_off_slots` wait for the
    answer to a hand-off; their pages are not among `page_ids`.
    """

    page_ids: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    handing_off_slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HandedOff:
    """A sequence that came to a lease by hand-off; the record of its slot says the rest."""

    slot: int
    slot_generation: int
    request_id: str
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class HandOffReceipt:
    """A committed hand-off."""

    num_pages: int
    num_bytes_copied: int


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What is there of a prompt: the cached pages of its prefix, pinned, and what was acquired for the rest.

    `match_id` stands for the pages that are pending now; 0: none.
    """

    match_id: int
    page_ids: tuple[int, ...]
    acquired: Acquired
