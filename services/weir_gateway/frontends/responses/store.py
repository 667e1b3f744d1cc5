"""Answers that a later request may go on from, in buckets that every gateway of the stack shares; one a tenant."""

import asyncio
import json
import logging
import re
from collections import Counter

from weir.bus.codec import MalformedMessage, decode, encode
from weir.bus.endpoint import BusEndpoint
from weir.bus.protocol import BucketMissing, Bus, BusError, BusUnavailable, KvBucket, KvEntry
from weir.bus.responses import (
    MAX_RESPONSE_BYTES,
    ResponseRecord,
    tenant_name,
)
from weir.bus.stores import MakeResponses, ask_to_make
from weir.bus.subjects import Subjects
from weir.core.errors import Unavailable
from weir_gateway.frontends.json_parts import dump
from weir_gateway.frontends.openai.messages import Turn
from weir_gateway.frontends.responses.turns import turns_from_json, turns_to_json

logger = logging.getLogger(__name__)

_RESPONSE_ID = re.compile(r"resp_([0-9a-f]{32})")
_RETRY_AFTER_S = 2.0


class ResponseStore:
    """What cannot be read now is Unavailable at once; what cannot be kept is not, and its answer says so.

    An operation takes `timeout_s` at most: an answer is complete before it is kept, and its client waits for it.
    """

    def __init__(self, bus: Bus, endpoint: BusEndpoint, subjects: Subjects, *, timeout_s: float = 2.0) -> None:
        self._bus = bus
        self._endpoint = endpoint
        self._subjects = subjects
        self._timeout_s = timeout_s
        self._buckets: dict[str, KvBucket] = {}
        """By tenant: as many as the limits file has, or had."""
        self._counts: Counter[str] = Counter()

    async def try_get(self, tenant: str, response_id: str) -> "KeptResponse | None":
        """None: the tenant has no such answer, or has it no more. Raises Unavailable."""
        key = _try_find_key(response_id)
        if key is None:
            return None
        try:
            async with asyncio.timeout(self._timeout_s):
                entry = await self._get(tenant, key)
            return None if entry is None else KeptResponse(decode(ResponseRecord, entry.value or b""))
        except (BusError, TimeoutError) as error:
            raise _unavailable(error) from error
        except MalformedMessage as error:
            self._counts["malformed"] += 1
            logger.warning("what is kept of %s cannot be read: %s", response_id, error)
            return None

    async def try_keep(self, tenant: str, response_id: str, response: bytes, turns: tuple[Turn, ...]) -> bool:
        """`response`: JSON; `turns`: the conversation up to and with the answer. False: it is too large, or is
        not taken."""
        key, packed_turns = _try_find_key(response_id), dump(turns_to_json(turns)).encode()
        if key is None:
            return self._lost(response_id, "nobody could look up that id: it is not resp_ and 32 digits of 0-9 a-f")
        if len(response) + len(packed_turns) > MAX_RESPONSE_BYTES:
            self._counts["too_large"] += 1
            return False
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._put(tenant, key, encode(ResponseRecord(response, packed_turns)))
        except (BusError, TimeoutError) as error:
            return self._lost(response_id, _shown(error))
        self._counts["kept"] += 1
        return True

    async def delete(self, tenant: str, response_id: str) -> bool:
        """False: the tenant has no such answer. Raises Unavailable."""
        if await self.try_get(tenant, response_id) is None:
            return False
        try:
            async with asyncio.timeout(self._timeout_s):
                await (await self._bucket(tenant)).delete(_try_find_key(response_id) or "")
        except (BusError, TimeoutError) as error:
            raise _unavailable(error) from error
        return True

    def metrics(self) -> dict[str, float]:
        return {
            f"responses_{name}_total": float(self._counts[name]) for name in ("kept", "too_large", "lost", "malformed")
        }

    def _lost(self, response_id: str, why: str) -> bool:
        self._counts["lost"] += 1
        logger.warning("the answer %s is not kept: %s", response_id, why)
        return False

    async def _get(self, tenant: str, key: str) -> KvEntry | None:
        """Raises BusError."""
        try:
            return await (await self._bucket(tenant)).get(key)
        except BucketMissing:  # nothing was ever kept of this tenant
            return None

    async def _put(self, tenant: str, key: str, value: bytes) -> None:
        """Has the scheduler make the bucket unless it is there. Raises BusError."""
        try:
            await (await self._bucket(tenant)).put(key, value)
        except BucketMissing:
            await ask_to_make(self._endpoint, self._subjects.make_responses, MakeResponses(tenant))
            await (await self._bucket(tenant)).put(key, value)

    async def _bucket(self, tenant: str) -> KvBucket:
        """Raises BusError."""
        if not self._bus.is_connected:
            raise BusUnavailable("the bus is away")
        if tenant not in self._buckets:
            name = self._subjects.responses_bucket(tenant_name(tenant))
            self._buckets[tenant] = await self._bus.open_bucket(name)
        return self._buckets[tenant]


class KeptResponse:
    """One answer from the store. Raises MalformedMessage for what no gateway has written."""

    def __init__(self, record: ResponseRecord) -> None:
        try:
            self.turns = turns_from_json(json.loads(record.turns))
        except (ValueError, TypeError) as error:
            raise MalformedMessage("turns", str(error)) from error
        self.response = record.response
        """JSON."""


def _try_find_key(response_id: str) -> str | None:
    """Nothing else of what a client sends becomes a key of a bucket."""
    match = _RESPONSE_ID.fullmatch(response_id)
    return None if match is None else match[1]


def _unavailable(error: BusError | TimeoutError) -> Unavailable:
    message = f"kept answers cannot be looked up now ({_shown(error)}); try again"
    return Unavailable(message, retry_after_s=_RETRY_AFTER_S)


def _shown(error: BusError | TimeoutError) -> str:
    return str(error) or "no answer in time"
