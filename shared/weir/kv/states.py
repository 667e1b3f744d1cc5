"""The states of the ownership table's rows.

    FREE ──acquire──> LEASED ──release──> FREE            owner = the lease
                        ├──orphan──> ORPHANED ──> FREE    its process is dead
                        └── seal ──> SHARED <──> CACHED ──evict──> FREE

A sealed page (SHARED or CACHED) is full, computed and never written again. It has a hash and no owner; SHARED as long
as leases pin it (its reference count), CACHED, a reusable prefix, when none does.
"""

from enum import IntEnum

NO_LEASE = 0


class PageState(IntEnum):
    """State of a page."""

    FREE = 0
    LEASED = 1
    ORPHANED = 2
    CACHED = 3
    SHARED = 4


class SlotState(IntEnum):
    """State of a slot; values as for pages."""

    FREE = 0
    LEASED = 1
    ORPHANED = 2


class NotOwned(Exception):
    """A lease named pages or slots that it does not own. Nothing was changed."""
