"""Hashes of a prompt's pages, so that the scheduler can place it where its beginning is cached. No text in them."""

import asyncio

from weir.bus.messages import SCHEDULER_HASH_BYTES
from weir.kv.geometry import PAGE_TOKENS
from weir.kv.prefixes.hashing import page_hashes, prefix_seed
from weir_gateway.requests.validation import CheckedRequest

_MAX_PAGES = 4096
"""Told of a prompt: 32 kB in its message. What is cached of a longer one is more than the scheduler knows."""
_MAX_TOKENS_AT_ONCE = 8192  # about half a millisecond


async def pages_of(checked: CheckedRequest) -> bytes:
    """SCHEDULER_HASH_BYTES of each full page; none of a prompt that takes nothing from the cache."""
    options, model = checked.draft.options, checked.model
    if not model.digest or options.skips_prefix_cache or checked.sampling.prompt_logprobs is not None:
        return b""
    seed = prefix_seed(model.digest, salt=checked.scope.cache_salt)
    token_ids = checked.prompt_token_ids[: _MAX_PAGES * PAGE_TOKENS]
    if len(token_ids) <= _MAX_TOKENS_AT_ONCE:
        hashes = page_hashes(token_ids, seed)
    else:
        hashes = await asyncio.to_thread(page_hashes, token_ids, seed)
    return b"".join(page_hash[:SCHEDULER_HASH_BYTES] for page_hash in hashes)
