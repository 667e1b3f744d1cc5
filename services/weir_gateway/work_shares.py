"""How much of a core's time each tenant has had of what all share, and who has to wait before he has more.

The virtual-scheduling form of the generic cell rate algorithm (ITU-T I.371), in seconds of work: work puts the moment
off from which a tenant is within its share again; up to `burst_s` of work are let in before that.
"""

from collections import OrderedDict

from weir.core.clock import Clock
from weir.core.shares import Holder

_MAX_TENANTS = 1024
"""Those that worked last."""
_ASKED_LATELY_S = 10.0


class WorkShares:
    """Holds nobody back who has no peers, or whose peers have not asked for anything lately: what nobody else wants is
    his."""

    def __init__(self, share: float, burst_s: float, clock: Clock) -> None:
        """`share`: seconds of work a second, of one tenant."""
        self._share = share
        self._burst_s = burst_s
        self._clock = clock
        self._within_at_s: OrderedDict[str, float] = OrderedDict()
        self._newest = self._before = ("", float("-inf"))
        """Who asked last, and who did before him, of two tenants; and when."""

    def note(self, tenant: str) -> None:
        """It asks for something, whatever that takes."""
        if tenant != self._newest[0]:
            self._before = self._newest
        self._newest = (tenant, self._clock.now_s())

    def add(self, tenant: str, work_s: float) -> None:
        """It has had so much."""
        now_s = self._clock.now_s()
        self._within_at_s[tenant] = max(self._within_at_s.get(tenant, now_s), now_s) + work_s / self._share
        self._within_at_s.move_to_end(tenant)
        if len(self._within_at_s) > _MAX_TENANTS:
            self._within_at_s.popitem(last=False)

    def wait_s(self, holder: Holder) -> float:
        """How long until it may have more, if it has had nothing until then; 0.0: now."""
        now_s = self._clock.now_s()
        _, others_at_s = self._before if self._newest[0] == holder.tenant else self._newest
        if not holder.has_peers or now_s - others_at_s > _ASKED_LATELY_S:
            return 0.0
        return max(0.0, self._within_at_s.get(holder.tenant, now_s) - now_s - self._burst_s / self._share)
