"""The watermark: free pages that a worker keeps for sequences that grow, and what it leaves to be reserved."""

from weir.kv.geometry import ArenaGeometry

_WATERMARK_DIVISOR = 128
_MAX_WATERMARK_PAGES = 32
_UNRESERVABLE_DIVISOR = 8


def watermark_pages(geometry: ArenaGeometry) -> int:
    """Enough that few sequences wait for the arena; none in an arena so small that every page counts."""
    return min(_MAX_WATERMARK_PAGES, geometry.num_pages // _WATERMARK_DIVISOR)


def num_reservable_pages(geometry: ArenaGeometry) -> int:
    """Pages that requests may reserve: they must be there although workers hold up to twice their watermark."""
    return geometry.num_pages - geometry.num_pages // _UNRESERVABLE_DIVISOR
