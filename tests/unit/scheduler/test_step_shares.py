"""A lane with a share of the steps has prompts at prefill workers, however many urgent ones wait for them."""

from dataclasses import replace

import pytest
from tests.unit.scheduler.rig import Rig, make_limits, make_worker

from weir.scheduling.limits import CoreLimits


def limits_with(share: float) -> CoreLimits:
    plain = make_limits()
    lanes = tuple(replace(lane, guaranteed_step_share=share) if lane.name == "batch" else lane for lane in plain.lanes)
    return replace(plain, lanes=lanes)


def flooded(share: float) -> Rig:
    """Urgent prompts fill the one prefill worker (four of them), and more wait."""
    rig = Rig(limits_with(share)).start(make_worker("p", "prefill"), make_worker("d", "decode", seqs=32, pages=1000))
    for number in range(8):
        rig.submit(f"urgent{number}", "interactive")
    return rig


def granted(rig: Rig) -> list[str]:
    return [command.grant.request_id for command in rig.commands if hasattr(command, "grant")]


@pytest.mark.parametrize(("share", "is_granted"), [(0.25, True), (0.0, False)])
def test_a_lane_with_a_share_is_granted_past_urgent_prompts_that_wait(share: float, is_granted: bool) -> None:
    rig = flooded(share)
    rig.submit("patient", "batch", prompt=60)
    assert ("patient" in granted(rig)) == is_granted
    assert granted(rig)[:4] == [f"urgent{number}" for number in range(4)]


def test_it_has_no_more_there_than_its_share_and_the_next_when_that_is_read() -> None:
    rig = flooded(0.25)
    for number in range(3):
        rig.submit(f"patient{number}", "batch", prompt=60)
    assert [name for name in granted(rig) if name.startswith("patient")] == ["patient0"]
    rig.prefilled("patient0")
    assert [name for name in granted(rig) if name.startswith("patient")] == ["patient0", "patient1"]
    rig.prefilled("urgent0")
    assert granted(rig)[-1] == "urgent4", "the rest is the urgent lane's"


def test_a_share_that_comes_at_run_time_counts_for_what_waits_already() -> None:
    rig = flooded(0.0)
    rig.submit("patient", "batch")
    rig.core.set_limits(limits_with(0.25))
    rig.decide()
    assert granted(rig)[-1] == "patient"
