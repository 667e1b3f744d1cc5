"""How many free pages a worker keeps for itself while it has work."""

from weir.kv.geometry import ArenaGeometry

_SHARE = 128
_MAX_RESERVE_PAGES = 32
_BOOKABLE_SHARE = 8


def reserve_pages(geometry: ArenaGeometry) -> int:
    """Enough that few sequences wait for the arena; none in an arena so small that every page counts."""
    return min(_MAX_RESERVE_PAGES, geometry.num_pages // _SHARE)


def num_reservable_pages(geometry: ArenaGeometry) -> int:
    """Pages that requests may book: what is booked must be there although workers hold up to twice their reserve."""
    return geometry.num_pages - geometry.num_pages // _BOOKABLE_SHARE
