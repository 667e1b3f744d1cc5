"""What gateways keep of a request with an idempotency key, for each other and for the next one: the bucket's entries,
and how one gateway asks another for such a request.

Written by gateways, each by compare and set: whoever has written last owns the key. Neither key nor prompt is in it.
"""

import hashlib
from dataclasses import dataclass
from enum import Enum

from weir.core.life import FinishReason

KEY_TTL_S = 3600.0
"""An entry is kept so long after its last change. `ttl_s` of the bucket."""
KEY_BUCKET_BYTES = 64 << 20
"""Some 200,000 entries. `max_bytes` of the bucket."""
DISPATCHES_PER_GATEWAY = 1000
"""Above what a gateway may use for one request."""
BODY_DIGEST_BYTES = 16
SEED_BYTES = 8


class KeyStatus(Enum):
    """How far a request with a key has come."""

    RUNNING = "running"
    """Its gateway drives it, or died."""
    FINISHED = "finished"
    """Its answer is complete. Sent again it is computed again."""
    ENDED = "ended"
    """Refused, failed, cancelled, or let go."""


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """The entry of one key."""

    body_digest: bytes
    """Of all that decides the answer."""
    seed: bytes
    """Big endian."""
    request_id: str
    gateway_id: str
    first_dispatch: int
    """The gateway numbers its dispatches from here; the next one's begin above all that it may have used."""
    status: KeyStatus = KeyStatus.RUNNING
    finish_reason: FinishReason | None = None
    num_output_tokens: int = 0

    def __post_init__(self) -> None:
        if len(self.body_digest) != BODY_DIGEST_BYTES:
            raise ValueError(f"body_digest has {len(self.body_digest)} bytes, must have {BODY_DIGEST_BYTES}")
        if len(self.seed) != SEED_BYTES:
            raise ValueError(f"seed has {len(self.seed)} bytes, must have {SEED_BYTES}")


class Holding(Enum):
    """What a gateway says of a key."""

    FREE = "free"
    """It has no such request (any more)."""
    HELD = "held"
    """A client of its own is getting the answer."""
    YIELDED = "yielded"
    """It had it, and has just let it go."""


@dataclass(frozen=True, slots=True)
class AskHolder:
    """Whether the gateway still has the request of this key; it lets it go unless a client is getting the answer, and
    even then if `takes_over`: the client says that it goes on elsewhere."""

    key_name: str
    takes_over: bool


@dataclass(frozen=True, slots=True)
class HolderReply:
    """The answer to AskHolder."""

    holding: Holding


def key_name(tenant: str, idempotency_key: str) -> str:
    """The key of the entry: keys of two tenants never meet, and nobody reads them in the bucket."""
    packed = f"{len(tenant)}:{tenant}{idempotency_key}".encode()
    return hashlib.blake2b(packed, digest_size=20, person=b"weir key").hexdigest()


def seed_of_key(tenant: str, idempotency_key: str) -> int:
    """Of a request that names none."""
    packed = f"{len(tenant)}:{tenant}{idempotency_key}".encode()
    return int.from_bytes(hashlib.blake2b(packed, digest_size=SEED_BYTES, person=b"weir seed").digest())
