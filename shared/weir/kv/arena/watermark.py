"""How many pages of an arena workers keep free for sequences that grow, and how many requests may reserve."""

_WATERMARK_SHARE = 128
_MAX_WATERMARK_PAGES = 32
_UNRESERVABLE_SHARE = 8


def watermark_pages(num_arena_pages: int) -> int:
    """Free pages that a worker keeps while it has work: enough that few sequences wait for the arena; none in an arena
    so small that every page counts."""
    return min(_MAX_WATERMARK_PAGES, num_arena_pages // _WATERMARK_SHARE)


def num_reservable_pages(num_arena_pages: int) -> int:
    """Pages that requests may reserve: what is reserved must be there although workers hold up to twice their
    watermark."""
    return num_arena_pages - num_arena_pages // _UNRESERVABLE_SHARE
