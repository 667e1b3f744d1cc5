"""Page arithmetic."""

from dataclasses import dataclass

PAGE_TOKENS = 16


def num_pages_for(num_tokens: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // PAGE_TOKENS)


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """Layout of one page: `[num_layers, 2 (key, value), num_kv_heads, PAGE_TOKENS, head_dim]` of `dtype_bytes` each."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int = 4

    @property
    def page_bytes(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * PAGE_TOKENS * self.head_dim * self.dtype_bytes


@dataclass(frozen=True, slots=True)
class ArenaGeometry:
    """Size of one arena: `num_pages` pages of `page_bytes`, and `num_slots` records of at most `max_context_tokens`."""

    page_bytes: int
    num_pages: int
    num_slots: int
    max_context_tokens: int

    @property
    def max_pages_per_sequence(self) -> int:
        return num_pages_for(self.max_context_tokens)
