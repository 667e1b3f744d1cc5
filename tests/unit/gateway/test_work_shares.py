"""How much of a core's time each tenant may have."""

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from weir.core.clock import ManualClock
from weir_gateway.work_shares import WorkShares


class Tenant(NamedTuple):
    tenant: str
    has_peers: bool = True


A, B = Tenant("a"), Tenant("b")


@given(st.lists(st.floats(0.001, 2.0), min_size=1, max_size=40), st.floats(0.05, 1.0), st.floats(0.0, 2.0))
def test_who_waits_as_told_has_no_more_than_its_share_and_a_burst_and_one_piece_of_work(
    pieces_s: list[float], share: float, burst_s: float
) -> None:
    clock = ManualClock()
    shares = WorkShares(share, burst_s, clock)
    done_s = 0.0
    for work_s in pieces_s:
        shares.note(B.tenant)
        while (wait_s := shares.wait_s(A)) > 1e-9:
            clock.advance(wait_s)
            shares.note(B.tenant)
        done_s += work_s
        assert done_s <= share * clock.now_s() + burst_s + work_s + 1e-6
        shares.add(A, work_s)


def test_what_was_not_used_is_not_saved_up() -> None:
    clock = ManualClock()
    shares = WorkShares(0.5, 1.0, clock)
    clock.advance(1000)
    shares.note(B.tenant)
    shares.add(A, 3.0)
    assert shares.wait_s(A) == 4.0
    assert shares.wait_s(B) == 0.0


def test_what_nobody_else_wanted_is_not_held_against_a_tenant_later() -> None:
    clock = ManualClock()
    shares = WorkShares(0.5, 1.0, clock)
    shares.add(A, 100.0)
    shares.note(B.tenant)
    assert shares.wait_s(A) == 0.0


def test_nobody_waits_for_longer_than_others_have_asked_lately() -> None:
    clock = ManualClock()
    shares = WorkShares(0.5, 1.0, clock)
    shares.note(B.tenant)
    shares.add(A, 100.0)
    shares.note(A.tenant)
    shares.note(A.tenant)
    assert shares.wait_s(A) == 10.0
    assert shares.wait_s(Tenant("a", has_peers=False)) == 0.0
    clock.advance(4)
    assert shares.wait_s(A) == 6.0
    clock.advance(6)
    shares.note(A.tenant)
    assert shares.wait_s(A) == 0.0
