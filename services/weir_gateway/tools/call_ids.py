"""Names of calls, by which their results come back. They follow from the request alone, so that a client which comes
back, at whatever gateway, reads the same ones."""

import hashlib
from dataclasses import dataclass

_LONG_CHARS = 24
_SHORT_CHARS = 9


@dataclass(frozen=True, slots=True)
class CallIds:
    """Of one choice of a request. `is_short`: nine characters, as Mistral's templates want them back."""

    request_id: str
    choice: int = 0
    is_short: bool = False
    prefix: str = "call_"

    def of(self, index: int) -> str:
        """Of the call with this index in the choice."""
        packed = f"{self.request_id}/{self.choice}/{index}".encode()
        digest = hashlib.blake2b(packed, digest_size=_LONG_CHARS // 2).hexdigest()
        return digest[:_SHORT_CHARS] if self.is_short else f"{self.prefix}{digest}"
