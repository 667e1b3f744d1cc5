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

    def add(self, holder: Holder, work_s: float) -> None:
        """It has had so much. What nobody else wanted is not counted."""
        now_s = self._clock.now_s()
        if not self._others_ask_for_s(holder, now_s):
            return
        within_at_s = max(self._within_at_s.get(holder.tenant, now_s), now_s)
        self._within_at_s[holder.tenant] = within_at_s + work_s / self._share
        self._within_at_s.move_to_end(holder.tenant)
        if len(self._within_at_s) > _MAX_TENANTS:
            self._within_at_s.popitem(last=False)

    def wait_s(self, holder: Holder) -> float:
        """How long until it may have more, if nobody asks for anything until then; 0.0: now."""
        now_s = self._clock.now_s()
        debt_s = self._within_at_s.get(holder.tenant, now_s) - now_s - self._burst_s / self._share
        return max(0.0, min(debt_s, self._others_ask_for_s(holder, now_s)))

    def _others_ask_for_s(self, holder: Holder, now_s: float) -> float:
        """How much longer it counts that others have asked; 0.0: it does not."""
        _, at_s = self._before if self._newest[0] == holder.tenant else self._newest
        return max(0.0, at_s + _ASKED_LATELY_S - now_s) if holder.has_peers else 0.0
