"""What workers and the transfer service say to each other about ownership."""

from dataclasses import dataclass

from weir.core.attempt import Attempt


@dataclass(frozen=True, slots=True)
class Claims:
    """What a worker says it holds when it attaches.

    `handing_off_slots` wait for the answer to a hand-off; their pages are not among `page_ids`.
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
