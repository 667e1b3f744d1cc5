"""What every runner refuses, and the order in which it computes a step's chunks."""

from weir.core.errors import InternalError
from weir.engine.plan import ChunkPlan, StepPlan
from weir.kv.geometry import num_pages_for


def ordered_chunks(
    plan: StepPlan, num_pages: int, vocab_size: int, max_context_tokens: int
) -> tuple[list[ChunkPlan], list[ChunkPlan]]:
    """Chunks of one token, shortest context first, and the others.

    Raises:
        InternalError: the plan would read or write where it must not.
    """
    for chunk in plan.chunks:
        _check(chunk, num_pages, vocab_size, max_context_tokens)
    slots = [chunk.slot for chunk in plan.chunks]
    if len(set(slots)) != len(slots):
        raise InternalError(f"step plan: a slot has two chunks (slots {sorted(slots)})")
    decodes = sorted((chunk for chunk in plan.chunks if len(chunk.token_ids) == 1), key=lambda chunk: chunk.end)
    return decodes, [chunk for chunk in plan.chunks if len(chunk.token_ids) > 1]


def _check(chunk: ChunkPlan, num_pages: int, vocab_size: int, max_context_tokens: int) -> None:
    token_ids, table, end = chunk.token_ids, chunk.block_table, chunk.end
    if not token_ids or chunk.start < 0:
        problem = f"{len(token_ids)} tokens from position {chunk.start}"
    elif end > max_context_tokens:
        problem = f"reaches position {end}, the model's context is {max_context_tokens}"
    elif len(table) < num_pages_for(end):
        problem = f"{len(table)} pages for {end} positions"
    elif min(table) < 0 or max(table) >= num_pages:
        problem = f"block table {table} with {num_pages} pages"
    elif min(token_ids) < 0 or max(token_ids) >= vocab_size:
        problem = f"a token id is outside the vocabulary of {vocab_size}"
    else:
        return
    raise InternalError(f"step plan, slot {chunk.slot}: {problem}")
