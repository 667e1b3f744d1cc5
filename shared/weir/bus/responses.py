"""What gateways keep of answers of the Responses API, for each other: the entries of one tenant's bucket.

A bucket is one tenant's, so that no tenant's answers take the room of another's, and none can be asked for by another.
"""

import hashlib
from dataclasses import dataclass

RESPONSE_TTL_S = 24 * 3600.0
"""`ttl_s` of the bucket."""
RESPONSE_BUCKET_BYTES = 32 << 20
"""`max_bytes` of the bucket."""
MAX_RESPONSES = 10_000
"""`max_entries` of the bucket: over either bound the oldest make room."""
MAX_RESPONSE_BYTES = 512 << 10
"""Of one entry; what is longer is not kept. Well under what one message of the bus may have."""


@dataclass(frozen=True, slots=True)
class ResponseRecord:
    """One answer. `response` is the object that its client got, `turns` the conversation up to and with the answer, a
    list of [role, text] without the instructions; both are JSON."""

    response: bytes
    turns: bytes

    def __post_init__(self) -> None:
        num_bytes = len(self.response) + len(self.turns)
        if num_bytes > MAX_RESPONSE_BYTES:
            raise ValueError(f"response and turns have {num_bytes} bytes, at most {MAX_RESPONSE_BYTES}")


def tenant_name(tenant: str) -> str:
    """Of the tenant's bucket, in characters that a bucket's name may have."""
    return hashlib.blake2b(tenant.encode(), digest_size=16, person=b"weir tenant").hexdigest()
