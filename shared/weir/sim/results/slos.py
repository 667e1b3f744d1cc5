"""SLOs of a run from the limits that its scheduler works under."""

import math
from dataclasses import replace

from weir.scheduling.limits.core_limits import CoreLimits
from weir.sim.results.metrics import Slo, Slos


def slos_of(limits: CoreLimits, default: Slo) -> Slos:
    """Each lane's own TTFT and ITL (as the bound on the worst gap) where it has them, else the default's."""
    by_lane = {}
    for lane in limits.lanes:
        slo = default
        if lane.ttft_slo_ms:
            slo = replace(slo, ttft_s=lane.ttft_slo_ms / 1e3)
        if lane.itl_slo_ms:
            slo = replace(slo, worst_gap_s=lane.itl_slo_ms / 1e3)
        if slo != default:
            by_lane[lane.name] = slo
    if limits.default_lane in by_lane:
        by_lane[""] = by_lane[limits.default_lane]
    return Slos(default, by_lane)


def slo_from_ms(ttft_ms: float, gap_ms: float, tpot_ms: float, latency_ms: float) -> Slo:
    """0: not asked."""
    return Slo(*(value / 1e3 if value else math.inf for value in (ttft_ms, gap_ms, tpot_ms, latency_ms)))
