"""Three lanes before a worker with one slot, so that what waits is served one after the other."""

from tests.unit.scheduler.rig import Rig, make_worker

from weir.scheduling.limits import CoreLimits, LaneLimits

LANES = (LaneLimits("high", 100, 60.0), LaneLimits("middle", 100, 60.0), LaneLimits("low", 100, 60.0))
LIMITS = CoreLimits(lanes=LANES, default_lane="high", slot_overcommit=0.0)


def busy_rig(limits: CoreLimits = LIMITS) -> Rig:
    """One slot, and it is taken."""
    rig = Rig(limits).start(make_worker("p", "prefill", pages=1000), make_worker("d", "decode", pages=1000, seqs=1))
    rig.submit("running")
    return rig


def drain(rig: Rig) -> list[str]:
    before = len(rig.granted)
    while rig.metric("granted"):
        rig.finish(rig.granted[-1])
    return rig.granted[before:]
