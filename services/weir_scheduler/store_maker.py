"""Makes what others keep in JetStream, since none of them may: gateways' and workers' buckets, the stream of events."""

import asyncio
import logging
from collections.abc import Callable
from typing import Never

from weir.bus.audit import AuditBounds, AuditStream
from weir.bus.endpoint import BusEndpoint
from weir.bus.keys import KEY_BUCKET_BYTES, KEY_TTL_S
from weir.bus.protocol import Bus, BusError
from weir.bus.responses import MAX_RESPONSES, RESPONSE_BUCKET_BYTES, RESPONSE_TTL_S, tenant_name
from weir.bus.stores import MakeResponses, StoreReply
from weir.bus.subjects import WORKER_TTL_S, Subjects

logger = logging.getLogger(__name__)

_AGAIN_S = 1.0
_TIMEOUT_S = 1.0
_MAKE_TIMEOUT_S = 3.0
"""Of two buckets, by a client that gives up on each after two seconds."""


class StoreMaker:
    """`knows_tenant`: whether there is a tenant of that name; of others nothing is made."""

    def __init__(self, bus: Bus, subjects: Subjects, knows_tenant: Callable[[str], bool]) -> None:
        self._bus = bus
        self._subjects = subjects
        self._knows_tenant = knows_tenant

    async def make_registry(self) -> None:
        """Without which nobody gets work. Raises BusError."""
        await self._bus.bucket(self._subjects.workers_bucket, ttl_s=WORKER_TTL_S)

    async def make(self) -> None:
        """What every stack has. Raises BusError."""
        await self.make_registry()
        await self._bus.bucket(self._subjects.keys_bucket, ttl_s=KEY_TTL_S, durable=True, max_bytes=KEY_BUCKET_BYTES)

    async def keep(self) -> Never:
        """Makes it again for ever, since a server may lose it."""
        is_well = True
        while True:
            try:
                async with asyncio.timeout(_MAKE_TIMEOUT_S):
                    await self.make()
            except (BusError, TimeoutError) as error:
                if is_well:
                    logger.warning("buckets cannot be made: %s; again", error or "no answer in time")
                is_well = False
            else:
                is_well = True
            await asyncio.sleep(_AGAIN_S)

    async def serve(self, endpoint: BusEndpoint) -> None:
        await endpoint.serve(self._subjects.make_responses, MakeResponses, self._on_responses)
        await endpoint.serve(self._subjects.make_audit, AuditBounds, self._on_audit)

    async def _on_responses(self, wanted: MakeResponses) -> StoreReply:
        if not self._knows_tenant(wanted.tenant):
            return StoreReply.refused(f"there is no tenant {wanted.tenant!r}")
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._bus.bucket(
                    self._subjects.responses_bucket(tenant_name(wanted.tenant)),
                    ttl_s=RESPONSE_TTL_S,
                    durable=True,
                    max_bytes=RESPONSE_BUCKET_BYTES,
                    max_entries=MAX_RESPONSES,
                )
        except (BusError, TimeoutError) as error:
            return StoreReply.refused(error)
        return StoreReply()

    async def _on_audit(self, bounds: AuditBounds) -> StoreReply:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await AuditStream(self._bus, self._subjects).make(bounds)
        except (BusError, TimeoutError) as error:
            return StoreReply.refused(error)
        return StoreReply()
