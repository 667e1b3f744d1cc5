"""Follows the rules of access as the scheduler writes them."""

import asyncio
import logging

from weir.bus.codec import MalformedMessage, decode
from weir.bus.configuration import ACCESS_KEY, AccessRules
from weir.bus.protocol import Bus, BusError, KvEntry
from weir.bus.subjects import Subjects
from weir_gateway.access.access_control import AccessControl

logger = logging.getLogger(__name__)

_RETRY_S = 0.5


class AccessWatch:
    """Rules that cannot be decoded change nothing: the known ones stay in force."""

    def __init__(self, access: AccessControl) -> None:
        self._access = access
        self._is_known = asyncio.Event()
        self._num_malformed = 0
        self._num_changes = 0
        self._num_failures = 0

    async def follow(self, bus: Bus, subjects: Subjects) -> None:
        """Runs for ever: without changes, a gateway would go on letting in whose key was taken away."""
        while True:
            try:
                await self._watch(bus, subjects)
            except BusError as error:
                logger.debug("the rules of access cannot be followed: %s; again", error)
            except Exception:  # the boundary of a task that nobody awaits
                self._num_failures += 1
                if self._num_failures == 1:
                    logger.exception("following the rules of access failed (further failures are only counted); again")
            await asyncio.sleep(_RETRY_S)

    async def wait_known(self, timeout_s: float) -> bool:
        """Whether the rules are known by then."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_known.wait()
        except TimeoutError:
            return False
        return True

    def metrics(self) -> dict[str, float]:
        return {
            "access_rules_known": float(self._is_known.is_set()),
            "access_rules_changes_total": float(self._num_changes),
            "access_rules_malformed_total": float(self._num_malformed),
            "access_rules_failures_total": float(self._num_failures),
        }

    async def _watch(self, bus: Bus, subjects: Subjects) -> None:
        """Raises BusError."""
        bucket = await bus.bucket(subjects.configuration_bucket, durable=True)
        async for entry in bucket.watch():
            if entry.key == ACCESS_KEY:
                self._take(entry)

    def _take(self, entry: KvEntry) -> None:
        if entry.value is None:
            logger.warning("the rules of access were deleted from the bucket; those that are known go on")
            return
        try:
            rules = decode(AccessRules, entry.value)
        except MalformedMessage as error:
            self._num_malformed += 1
            logger.error("malformed rules of access, those that are known go on: %s", error)
            return
        if self._access.update(rules):
            self._num_changes += 1
            self._is_known.set()
            num_keys = sum(len(tenant.key_digests) for tenant in rules.tenants)
            logger.info(
                "rules of access: %d lanes, %d tenants, %d keys", len(rules.lanes), len(rules.tenants), num_keys
            )
