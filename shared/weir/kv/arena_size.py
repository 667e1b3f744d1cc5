"""How large an arena is where nobody has said, and how long a sequence an arena holds: rules, of numbers alone.

    wanted     one sequence of the model's context, or WANTED_TOKENS in up to WANTED_SEQUENCES, whichever is more; at
               most MOST_WANTED_BYTES, unless a longer context was asked for by name
    allowed    half of the memory that the workers leave, and what /dev/shm has free but for what is swapped out;
               LEAST_BYTES even where that is less, for an arena that is too large is an error that says so

The arena is taken at the start, page by page, so that what is not needed costs time and memory.
"""

from dataclasses import dataclass, replace

from weir.kv.geometry import PAGE_TOKENS, ArenaGeometry, least_arena_pages, num_pages_for
from weir.kv.layout import bytes_for_pages, geometry_within

WANTED_TOKENS = 65_536
WANTED_SEQUENCES = 32
MOST_WANTED_BYTES = 4 << 30
LEAST_BYTES = 128 << 20
LEAST_CONTEXT_TOKENS = 512
"""A model whose own context is longer is not bounded to less: nobody wants to be surprised by that."""
_MEMORY_SHARE = 2
_SHM_PARTS, _SHM_PARTS_OF_ARENA = 5, 4  # the fifth is for the quarter of an arena that a decode worker swaps out


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Of a machine, in bytes. `left_bytes`: available, less what workers and the rest will take; may be negative.

    `shm_bytes`: free where the arena's file is made.
    """

    left_bytes: int
    shm_bytes: int


def arena_bytes_for(shape: ArenaGeometry, free: FreeMemory, *, is_context_asked: bool) -> int:
    """What an arena is made of if nobody said. `shape`: of the model; its `num_pages` are not looked at."""
    wanted_bytes = wanted_arena_bytes(shape, is_context_asked=is_context_asked)
    of_memory = max(LEAST_BYTES, free.left_bytes // _MEMORY_SHARE)
    of_shm = free.shm_bytes * _SHM_PARTS_OF_ARENA // _SHM_PARTS
    return max(1, min(wanted_bytes, of_memory, of_shm))


def shm_bytes_for(arena_bytes: int) -> int:
    """What has to be free in /dev/shm for an arena of this size and for what is swapped out of it."""
    return -(-arena_bytes * _SHM_PARTS // _SHM_PARTS_OF_ARENA)


def wanted_arena_bytes(shape: ArenaGeometry, *, is_context_asked: bool = False) -> int:
    """As if memory were free."""
    context = shape.max_context_tokens
    one_bytes = bytes_for_context(shape)
    many_bytes = _bytes_for_tokens(shape, max(context, min(WANTED_TOKENS, WANTED_SEQUENCES * context)))
    most_bytes = max(MOST_WANTED_BYTES, one_bytes) if is_context_asked else MOST_WANTED_BYTES
    return min(many_bytes, most_bytes)


def bytes_for_context(shape: ArenaGeometry) -> int:
    """Of an arena that holds one sequence of `shape.max_context_tokens`, and what is kept free beside it."""
    return _bytes_for_tokens(shape, shape.max_context_tokens)


def longest_context(arena_bytes: int, shape: ArenaGeometry) -> int:
    """Tokens of the longest sequence that `arena_bytes` hold, whole pages unless it is the model's whole context; 0 if
    they hold no page. `shape`: as of `arena_bytes_for`."""
    low, high = 0, num_pages_for(shape.max_context_tokens)
    while low < high:  # [low, high] holds the answer, in pages
        middle = (low + high + 1) // 2
        if _fits(arena_bytes, replace(shape, max_context_tokens=_tokens(middle, shape))):
            low = middle
        else:
            high = middle - 1
    return _tokens(low, shape)


def _tokens(num_pages: int, shape: ArenaGeometry) -> int:
    return min(num_pages * PAGE_TOKENS, shape.max_context_tokens)


def _fits(arena_bytes: int, shape: ArenaGeometry) -> bool:
    try:
        geometry_within(
            arena_bytes,
            shape.page_bytes,
            shape.num_slots,
            shape.max_context_tokens,
            pages_on_device=shape.pages_on_device,
        )
    except ValueError:
        return False
    return True


def _bytes_for_tokens(shape: ArenaGeometry, num_tokens: int) -> int:
    """Of an arena in which requests may reserve so many."""
    num_pages = least_arena_pages(num_pages_for(num_tokens)) + 1
    return bytes_for_pages(replace(shape, num_pages=num_pages))
