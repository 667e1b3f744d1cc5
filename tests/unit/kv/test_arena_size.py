"""The rule for an arena that nobody has sized, and the longest sequence that an arena holds."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.kv.arena_size import (
    LEAST_BYTES,
    MOST_WANTED_BYTES,
    FreeMemory,
    arena_bytes_for,
    bytes_for_context,
    longest_context,
    shm_bytes_for,
    wanted_arena_bytes,
)
from weir.kv.geometry import PAGE_TOKENS, ArenaGeometry, least_arena_pages, num_pages_for, num_reservable_pages
from weir.kv.layout import geometry_within
from weir.model.files.dummy import MODEL_SHAPES
from weir.model.precision import page_geometry

GIB = 1 << 30
PLENTY = FreeMemory(1 << 40, 1 << 40)


def shape_of(name: str, *, on_device: bool = False) -> ArenaGeometry:
    model = MODEL_SHAPES[name]
    page_bytes = page_geometry(model, "int8").page_bytes
    return ArenaGeometry(page_bytes, 0, 512, model.max_context_tokens, pages_on_device=on_device)


SHAPES = st.builds(
    ArenaGeometry,
    page_bytes=st.integers(1, 64).map(lambda number: number * 4096),
    num_pages=st.just(0),
    num_slots=st.integers(1, 600),
    max_context_tokens=st.integers(1, 200_000),
    pages_on_device=st.booleans(),
)


@given(st.integers(1, 10**6))
def test_the_smallest_arena_for_a_reservation_is_the_smallest(num_pages: int) -> None:
    least = least_arena_pages(num_pages)
    assert num_reservable_pages(least) >= num_pages
    assert num_reservable_pages(least - 1) < num_pages


@given(SHAPES, st.integers(0, 40 * GIB))
def test_the_longest_context_is_taken_and_one_page_more_is_not(shape: ArenaGeometry, arena_bytes: int) -> None:
    longest = longest_context(arena_bytes, shape)
    assert 0 <= longest <= shape.max_context_tokens
    if longest:
        made = within(arena_bytes, replace(shape, max_context_tokens=longest))
        assert num_reservable_pages(made.num_pages) >= num_pages_for(longest)
    if longest < shape.max_context_tokens:
        assert longest % PAGE_TOKENS == 0
        more = min(longest + PAGE_TOKENS, shape.max_context_tokens)
        with pytest.raises(ValueError, match="too small for one sequence"):
            within(arena_bytes, replace(shape, max_context_tokens=more))


@given(SHAPES)
def test_the_bytes_for_a_context_hold_it(shape: ArenaGeometry) -> None:
    assert longest_context(bytes_for_context(shape), shape) == shape.max_context_tokens


@given(SHAPES, st.integers(-GIB, 64 * GIB), st.integers(1 << 20, 64 * GIB), st.booleans())
def test_an_arena_is_never_more_than_is_wanted_or_free(
    shape: ArenaGeometry, left_bytes: int, shm_bytes: int, is_asked: bool
) -> None:
    size = arena_bytes_for(shape, FreeMemory(left_bytes, shm_bytes), is_context_asked=is_asked)
    assert 0 < size <= wanted_arena_bytes(shape, is_context_asked=is_asked)
    assert shm_bytes_for(size) <= max(shm_bytes, 1) + 1
    assert size <= max(LEAST_BYTES, left_bytes // 2)


@given(SHAPES, st.integers(1 << 20, 64 * GIB))
def test_twice_the_memory_and_the_room_that_is_named_allow_an_arena(shape: ArenaGeometry, arena_bytes: int) -> None:
    free = FreeMemory(2 * arena_bytes, shm_bytes_for(arena_bytes))
    allowed = arena_bytes_for(shape, free, is_context_asked=True)
    assert allowed == min(wanted_arena_bytes(shape, is_context_asked=True), arena_bytes)


@pytest.mark.parametrize(
    ("name", "least_gib", "most_gib"),
    [("tiny", 0.03, 0.1), ("smollm2-135m", 1.5, 2.0), ("qwen2.5-0.5b", 0.8, 1.2), ("llama-3.2-1b", 4.0, 4.0)],
)
def test_what_models_want_is_by_their_own_context_and_bounded(name: str, least_gib: float, most_gib: float) -> None:
    size = arena_bytes_for(shape_of(name), PLENTY, is_context_asked=False)
    assert least_gib <= size / GIB <= most_gib


def test_a_context_that_is_asked_for_gets_more_than_the_bound_where_that_is_free() -> None:
    shape = shape_of("llama-3.2-1b")
    assert arena_bytes_for(shape, PLENTY, is_context_asked=False) == MOST_WANTED_BYTES
    size = arena_bytes_for(shape, PLENTY, is_context_asked=True)
    assert size > MOST_WANTED_BYTES
    assert longest_context(size, shape) == 131_072


def test_a_small_machine_gets_a_small_arena() -> None:
    shape = shape_of("llama-3.2-1b")
    small = arena_bytes_for(shape, FreeMemory(GIB, 4 * GIB), is_context_asked=False)
    assert small == GIB // 2
    assert 10_000 < longest_context(small, shape) < 16_000
    assert arena_bytes_for(shape, FreeMemory(-GIB, 4 * GIB), is_context_asked=False) == LEAST_BYTES
    assert arena_bytes_for(shape, FreeMemory(GIB, 64 << 20), is_context_asked=False) < 64 << 20


def within(arena_bytes: int, shape: ArenaGeometry) -> ArenaGeometry:
    return geometry_within(
        arena_bytes, shape.page_bytes, shape.num_slots, shape.max_context_tokens, pages_on_device=shape.pages_on_device
    )
