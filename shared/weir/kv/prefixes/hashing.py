"""Content hashes of full pages: equal hashes mean equal tokens from position 0 on, under one model and one salt.

    hash of page i = blake2b-128(hash of page i - 1 | the 16 token ids of page i, int32)

The hash before page 0 is the seed. A chain of hashes names a prompt's prefix without its text.
"""

import hashlib
from array import array
from collections.abc import Sequence

from weir.kv.geometry import PAGE_TOKENS

HASH_BYTES = 16

_PAGE_TOKEN_BYTES = 4 * PAGE_TOKENS


def prefix_seed(model_digest: str, salt: str = "") -> bytes:
    """HASH_BYTES bytes. Pages are shared only under one seed: another salt keeps tenants apart."""
    parts = (part.encode() for part in (model_digest, salt))
    packed = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return hashlib.blake2b(packed, digest_size=HASH_BYTES).digest()


def page_hashes(token_ids: Sequence[int], seed: bytes) -> tuple[bytes, ...]:
    """The hashes of all pages that `token_ids` fill; about a microsecond each."""
    num_pages = len(token_ids) // PAGE_TOKENS
    packed = array("i", token_ids[: num_pages * PAGE_TOKENS]).tobytes()
    blake2b, previous, hashes = hashlib.blake2b, seed, []
    for start in range(0, num_pages * _PAGE_TOKEN_BYTES, _PAGE_TOKEN_BYTES):
        previous = blake2b(previous + packed[start : start + _PAGE_TOKEN_BYTES], digest_size=HASH_BYTES).digest()
        hashes.append(previous)
    return tuple(hashes)


def split_hashes(packed: bytes) -> tuple[bytes, ...]:
    """The hashes that lie one after the other in `packed`, as on the wire. Raises ValueError for a part of one."""
    if len(packed) % HASH_BYTES:
        raise ValueError(f"page_hashes: {len(packed)} bytes, must be a multiple of {HASH_BYTES}")
    return tuple(packed[start : start + HASH_BYTES] for start in range(0, len(packed), HASH_BYTES))
