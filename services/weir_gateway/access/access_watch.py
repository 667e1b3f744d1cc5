"""Follows the rules of access as the scheduler writes them."""

import asyncio
import logging

from weir.bus.configuration import ACCESS_KEY, AccessRules
from weir.bus.configuration_watch import ConfigurationWatch
from weir.bus.protocol import Bus
from weir.bus.subjects import Subjects
from weir_gateway.access.access_control import AccessControl

logger = logging.getLogger(__name__)


class AccessWatch:
    """Rules that cannot be decoded change nothing: the known ones stay in force."""

    def __init__(self, access: AccessControl) -> None:
        self._access = access
        self._watch = ConfigurationWatch(ACCESS_KEY, AccessRules, self._take)
        self._is_known = asyncio.Event()
        self._num_changes = 0

    async def follow(self, bus: Bus, subjects: Subjects) -> None:
        """Runs for ever: without changes, a gateway would go on letting in whose key was taken away."""
        await self._watch.follow(bus, subjects)

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
            "access_rules_malformed_total": float(self._watch.num_malformed),
            "access_rules_failures_total": float(self._watch.num_failures),
        }

    def _take(self, rules: AccessRules) -> None:
        if self._access.update(rules):
            self._num_changes += 1
            self._is_known.set()
            num_keys = sum(len(tenant.key_digests) for tenant in rules.tenants)
            logger.info(
                "rules of access: %d lanes, %d tenants, %d keys", len(rules.lanes), len(rules.tenants), num_keys
            )
