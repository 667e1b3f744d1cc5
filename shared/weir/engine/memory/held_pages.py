"""The pages that sequences hold: counted, given back while a sequence goes on, and when it has ended."""

from collections.abc import Iterable

from weir.engine.counters import EngineCounters
from weir.engine.memory.pages import PagePool
from weir.engine.sequence import Sequence, Stage
from weir.kv.geometry import PAGE_TOKENS


def count_load(sequences: Iterable[Sequence]) -> tuple[int, int, int]:
    """The sequences that wait; the pages of all, and those that hold at least one computed token."""
    num_waiting = num_held = num_filled = 0
    waiting = Stage.WAITING
    for sequence in sequences:
        num_waiting += sequence.stage is waiting
        first_page = sequence.first_page
        num_held += len(sequence.block_table) - first_page
        num_filled += max(0, (sequence.num_computed + PAGE_TOKENS - 1) // PAGE_TOKENS - first_page)
    return num_waiting, num_held, num_filled


def give_back_behind(past_window: Iterable[tuple[Sequence, int]], pool: PagePool, counters: EngineCounters) -> None:
    """The pages of sequences that go on before the one named with each, from which on what is still to be computed
    reads. A pool puts that off while a step runs, although no step that was planned reads them. They may still serve
    others as a prefix."""
    for sequence, first_page_seen in past_window:
        first_page, page_ids = sequence.first_page, sequence.give_back(first_page_seen)
        counters.pages_behind_window += len(page_ids)
        seed = sequence.prefix_seed
        token_ids = sequence.token_ids[: sequence.first_page * PAGE_TOKENS] if seed else ()
        pool.put_back(None, page_ids, token_ids, seed, first_page=first_page)


def put_back_all(sequence: Sequence, pool: PagePool) -> None:
    """Of a sequence that has ended, with its slot."""
    computed = sequence.token_ids[: sequence.num_computed]
    pool.put_back(sequence.slot, sequence.held_pages, computed, sequence.prefix_seed, first_page=sequence.first_page)
