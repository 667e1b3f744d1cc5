"""SLOs of a run from the limits of its lanes."""

import math

from weir.scheduling.limits.core_limits import CoreLimits, LaneLimits
from weir.sim.results.metrics import Slo
from weir.sim.results.slos import slo_from_ms, slos_of

LANES = (
    LaneLimits("interactive", 10, 1.0, ttft_slo_ms=250, itl_slo_ms=50),
    LaneLimits("standard", 10, 1.0, ttft_slo_ms=900),
    LaneLimits("batch", 10, 1.0),
)


def test_a_lane_has_its_own_slo_where_it_names_one_and_the_default_for_the_rest() -> None:
    slos = slos_of(CoreLimits(lanes=LANES), Slo(ttft_s=5.0, tpot_s=0.1))
    assert slos.of("interactive") == Slo(ttft_s=0.25, worst_gap_s=0.05, tpot_s=0.1)
    assert slos.of("standard") == Slo(ttft_s=0.9, tpot_s=0.1)
    assert slos.of("batch") == Slo(ttft_s=5.0, tpot_s=0.1)


def test_a_request_without_a_lane_is_asked_what_the_default_lane_is() -> None:
    assert slos_of(CoreLimits(lanes=LANES, default_lane="standard"), Slo()).of("") == Slo(ttft_s=0.9)
    assert slos_of(CoreLimits(lanes=LANES, default_lane="batch"), Slo()).of("") == Slo()


def test_zero_milliseconds_ask_for_nothing() -> None:
    assert slo_from_ms(300, 0, 0, 0) == Slo(ttft_s=0.3)
    assert slo_from_ms(0, 40, 20, 1000) == Slo(math.inf, 0.04, 0.02, 1.0)
