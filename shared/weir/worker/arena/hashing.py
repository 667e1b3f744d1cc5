"""Page hashes without stopping the event loop for long."""

import asyncio
from collections.abc import Sequence

from weir.kv.prefixes.hashing import page_hashes

_MAX_TOKENS_AT_ONCE = 8192  # about half a millisecond


async def hashes_of(token_ids: Sequence[int], seed: bytes) -> tuple[bytes, ...]:
    """`page_hashes`; those of a long text in a thread, which lets the event loop have its turns."""
    if len(token_ids) <= _MAX_TOKENS_AT_ONCE:
        return page_hashes(token_ids, seed)
    return await asyncio.to_thread(page_hashes, token_ids, seed)
