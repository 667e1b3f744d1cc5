"""Which pages a query behind a window reads, and when that changes."""

from hypothesis import given
from hypothesis import strategies as st

from weir.kv.geometry import (
    ATTENTION_BLOCK_TOKENS,
    PAGE_TOKENS,
    first_page_read,
    most_pages_read,
    num_pages_for,
    tokens_until_behind,
)

POSITIONS, WINDOWS = st.integers(0, 200_000), st.integers(1, 10_000)


@given(POSITIONS, WINDOWS)
def test_pages_are_read_from_the_block_on_in_which_the_window_begins(position: int, window: int) -> None:
    first = first_page_read(position, window) * PAGE_TOKENS
    assert first % ATTENTION_BLOCK_TOKENS == 0
    assert first <= max(0, position + 1 - window) < first + ATTENTION_BLOCK_TOKENS


@given(POSITIONS, WINDOWS, st.integers(-300, 300))
def test_a_later_page_is_read_first_from_so_many_tokens_behind_the_first_one_on(
    position: int, window: int, num_over: int
) -> None:
    first_page = first_page_read(position, window)
    num_tokens = max(0, tokens_until_behind(window) + num_over)
    is_behind = first_page_read(first_page * PAGE_TOKENS + num_tokens, window) > first_page
    assert is_behind == (num_tokens >= tokens_until_behind(window))


@given(POSITIONS, WINDOWS, st.integers(1, 4096))
def test_a_chunk_reads_and_writes_no_more_pages_than_a_prompt_needs_at_a_time(
    start: int, window: int, num_tokens: int
) -> None:
    num_pages = num_pages_for(start + num_tokens) - first_page_read(start, window)
    assert num_pages <= most_pages_read(window, num_tokens)
