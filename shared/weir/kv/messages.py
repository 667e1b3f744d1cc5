"""What workers and the transfer service exchange about ownership."""

from dataclasses import dataclass

from weir.core.life import Attempt


@dataclass(frozen=True, slots=True)
class Acquired:
    """Pages and slots that a lease was given."""

    page_ids: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PageChain:
    """Pages of one sequence in the order of its positions.

    `hashes` are those of the first of `page_ids`: full ones, computed, that may serve other sequences as a prefix.
    `earlier_hashes` are those of all the sequence's pages before `page_ids`, given back by now or still in use: where
    one of them is not kept, none of these is either.
    """

    page_ids: tuple[int, ...]
    hashes: tuple[bytes, ...] = ()
    earlier_hashes: tuple[bytes, ...] = ()

    @classmethod
    def of_sequence(cls, page_ids: tuple[int, ...], first_page: int, hashes: tuple[bytes, ...]) -> "PageChain":
        """`page_ids` begin at page number `first_page` of a sequence; `hashes` from its page 0 on."""
        return cls(page_ids, hashes[first_page : first_page + len(page_ids)], hashes[:first_page])


@dataclass(frozen=True, slots=True)
class PrefixSource:
    """Where another host's arena offers more of a prompt's prefix, HOST:PORT (empty: none does), and the trace that
    is to tell where the prefix came from."""

    address: str
    traceparent: str = ""
    is_expected: bool = False
    """It is about to be computed there."""


@dataclass(frozen=True, slots=True)
class Claims:
    """What a worker holds, as it claims when it attaches.

    A shared page that several of its sequences use is named as often as they do. `handing_off_slots` wait for the
    answer to a hand-off; their pages are not among `page_ids`.
    """

    page_ids: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    handing_off_slots: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class HandedOff:
    """A sequence that came to a lease by hand-off or adoption; the record in its slot has everything else."""

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
    """The cached pages of a prompt's prefix, pinned, and what was acquired for the rest.

    `match_id` stands for the pages that are pending now; 0: none.
    """

    match_id: int
    page_ids: tuple[int, ...]
    acquired: Acquired
