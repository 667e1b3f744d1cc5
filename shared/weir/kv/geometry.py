"""Page arithmetic: how large pages are, how many a sequence needs, how many stay free."""

from dataclasses import dataclass

PAGE_TOKENS = 16

PAGE_LAYOUT = "keys [head_dim, token], values [token, head_dim]"
"""Goes into the model digest, so that pages of another layout are never taken for these."""

TOKEN_MAJOR_PAGE_LAYOUT = "keys [token, head_dim], values [token, head_dim]"
"""Of the Triton kernels: a row of a key block is one token, as their matrix products want it."""

ATTENTION_BLOCK_TOKENS = 128
"""Attention goes through a context in blocks of so many tokens, or of a part of them, that begin at position 0 and are
passed over as wholes."""

_WATERMARK_SHARE = 128
_MAX_WATERMARK_PAGES = 32
_UNRESERVABLE_SHARE = 8


def num_pages_for(num_tokens: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // PAGE_TOKENS)


def first_page_read(position: int, window: int) -> int:
    """The number of the first page that is read for a query at `position` that sees the last `window` positions, its
    own among them; nor do queries behind it read any before."""
    return max(0, position + 1 - window) // ATTENTION_BLOCK_TOKENS * (ATTENTION_BLOCK_TOKENS // PAGE_TOKENS)


def tokens_until_behind(window: int) -> int:
    """With so many positions computed from the first page on that was read, and not with one fewer, the next query
    reads a later one first: `first_page_read` the other way round."""
    return window - 1 + ATTENTION_BLOCK_TOKENS


def most_pages_read(window: int, chunk_tokens: int) -> int:
    """What a prompt needs at a time that is computed in chunks of so many tokens, each of which sees `window`."""
    return num_pages_for(window + ATTENTION_BLOCK_TOKENS + chunk_tokens)


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """Layout of one page: `[num_layers, 2 (keys, values), num_kv_heads, block]` of `dtype_bytes` each number; behind
    all numbers, where they have them, scales `[num_layers, 2, num_kv_heads, PAGE_TOKENS]` of `scale_bytes` each.

    A block is what one layer and head keeps of the page's tokens, in one piece:

        keys    [head_dim, PAGE_TOKENS]     one load is a dimension of all tokens: scores need no sum across lanes
        values  [PAGE_TOKENS, head_dim]     one load is a part of one token's value, which one weight multiplies
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int = 4
    scale_bytes: int = 0

    @property
    def page_bytes(self) -> int:
        num_heads = self.num_layers * 2 * self.num_kv_heads * PAGE_TOKENS
        return num_heads * (self.head_dim * self.dtype_bytes + self.scale_bytes)


@dataclass(frozen=True, slots=True)
class ArenaGeometry:
    """Size of one arena: `num_pages` pages of `page_bytes`, and `num_slots` records of at most `max_context_tokens`.

    With `pages_on_device` the segment has all but the pages themselves (see `weir.kv.memory.device`).
    """

    page_bytes: int
    num_pages: int
    num_slots: int
    max_context_tokens: int
    pages_on_device: bool = False

    @property
    def page_memory_bytes(self) -> int:
        """All pages together."""
        return self.num_pages * self.page_bytes

    @property
    def max_pages_per_sequence(self) -> int:
        return num_pages_for(self.max_context_tokens)


def watermark_pages(num_arena_pages: int) -> int:
    """Free pages that a worker keeps while it has work: enough that few sequences wait for the arena; none in an arena
    so small that every page counts."""
    return min(_MAX_WATERMARK_PAGES, num_arena_pages // _WATERMARK_SHARE)


def num_reservable_pages(num_arena_pages: int) -> int:
    """Pages that requests may reserve: what is reserved must be there although workers hold up to twice their
    watermark."""
    return num_arena_pages - num_arena_pages // _UNRESERVABLE_SHARE


def least_arena_pages(num_reserved_pages: int) -> int:
    """Pages of the smallest arena in which requests may reserve so many."""
    share = _UNRESERVABLE_SHARE
    return (num_reserved_pages - 1) * share // (share - 1) + 1
