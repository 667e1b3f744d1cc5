"""The keys' bucket and the other gateways, over the bus."""

import logging
from collections import Counter

from weir.bus.codec import MalformedMessage, decode, encode
from weir.bus.endpoint import BusEndpoint
from weir.bus.keys import AskHolder, HolderReply, Holding, KeyRecord
from weir.bus.protocol import (
    BucketFull,
    Bus,
    BusError,
    BusTimeout,
    BusUnavailable,
    KeyConflict,
    KvBucket,
    NoResponder,
)
from weir.bus.subjects import Subjects
from weir.core.errors import Overloaded, Unavailable
from weir_gateway.keys.claims import Claim

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = 2.0
_FULL_RETRY_S = 60.0
_ASK_S = 1.0
_NUM_ASKS = 2


class KeyStore:
    """A `KeyPort`: what cannot be read or written now is Unavailable at once, since without the bucket no promise about
    a key can be kept."""

    def __init__(self, bus: Bus, endpoint: BusEndpoint, subjects: Subjects) -> None:
        self._bus = bus
        self._endpoint = endpoint
        self._subjects = subjects
        self._counts: Counter[str] = Counter()
        self._opened: KvBucket | None = None

    async def try_get(self, key_name: str) -> Claim | None:
        try:
            entry = await (await self._bucket()).get(key_name)
            return None if entry is None else Claim(decode(KeyRecord, entry.value or b""), entry.revision)
        except BusError as error:
            raise self._unavailable(error) from error
        except MalformedMessage as error:
            self._counts["malformed"] += 1
            logger.warning("the entry of key %s: %s", key_name, error)
            message = "what is kept of this key cannot be read; use another one"
            raise Unavailable(message, retry_after_s=_FULL_RETRY_S) from error

    async def write(self, key_name: str, record: KeyRecord, revision: int) -> int:
        try:
            return await (await self._bucket()).update(key_name, encode(record), revision=revision)
        except KeyConflict:
            self._counts["conflicts"] += 1
            raise
        except BucketFull as error:
            self._counts["refused_full"] += 1
            message = "no more idempotency keys can be kept now; try again later, or send the request without one"
            raise Overloaded(message, retry_after_s=_FULL_RETRY_S) from error
        except BusError as error:
            raise self._unavailable(error) from error

    async def ask(self, gateway_id: str, question: AskHolder) -> Holding | None:
        """A gateway that is silent counts as dead, as one that nobody listens for: if it lives, it is told by the
        scheduler that the request is another's."""
        for _ in range(_NUM_ASKS):
            try:
                subject = self._subjects.key(gateway_id)
                reply = await self._endpoint.ask(subject, question, HolderReply, timeout_s=_ASK_S)
            except NoResponder:
                return None
            except BusTimeout:
                continue
            except BusError as error:
                raise self._unavailable(error) from error
            else:
                return reply.holding
        self._counts["silent_gateways"] += 1
        return None

    def metrics(self) -> dict[str, float]:
        names = ("malformed", "conflicts", "refused_full", "silent_gateways")
        return {f"keys_{name}_total": float(self._counts[name]) for name in names}

    async def _bucket(self) -> KvBucket:
        """Raises BusError."""
        if not self._bus.is_connected:
            raise BusUnavailable("the bus is away")
        if self._opened is None:
            self._opened = await self._bus.open_bucket(self._subjects.keys_bucket)
        return self._opened

    def _unavailable(self, error: BusError) -> Unavailable:
        message = f"idempotency keys cannot be looked up now ({error}); try again, or send the request without one"
        return Unavailable(message, retry_after_s=_RETRY_AFTER_S)
