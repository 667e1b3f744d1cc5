"""What one tenant may hold of room that all share."""

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weir.core.errors import Overloaded, QuotaExceeded
from weir.core.shares import NOBODY, SharedRoom, has_share


class Peer(NamedTuple):
    tenant: str
    has_peers: bool = True


@given(size=st.integers(1, 1000), steps=st.lists(st.integers(1, 400)))
def test_alone_a_tenant_comes_to_four_fifths_in_steps_of_whatever_size(size: int, steps: list[int]) -> None:
    room, tenant = SharedRoom(size, 0, "seats"), Peer("a")
    for step in steps:
        may = room.within_share(tenant, step)
        assert may == (5 * (room.num_taken + step) <= 4 * size)
        if may:
            room.take(tenant, step)
    assert room.num_of(tenant) == room.num_taken


@given(size=st.integers(25, 1000), num_tenants=st.integers(1, 6))
def test_whoever_comes_next_finds_room(size: int, num_tenants: int) -> None:
    room = SharedRoom(size, 0, "seats")
    for number in range(num_tenants):
        tenant, num_left = Peer(f"t{number}"), room.size - room.num_taken
        while room.within_share(tenant, 1):
            assert room.fits(1)
            room.take(tenant, 1)
        assert room.num_of(tenant) == 4 * num_left // 5
        assert size - room.num_taken >= num_left // 5


def test_what_is_sure_and_who_has_no_peers() -> None:
    assert has_share(num_own=1, num=1, num_left=1, num_sure=2)
    assert not has_share(num_own=2, num=1, num_left=1, num_sure=2)
    room = SharedRoom(10, 0, "seats")
    assert room.within_share(NOBODY, 10)
    room.take(NOBODY, 10)
    assert not room.fits(1)


def test_what_is_given_back_can_be_taken_again() -> None:
    room = SharedRoom(10, 0, "seats")
    for tenant in (Peer("a"), Peer("b"), Peer("a")):
        room.take(tenant, 2)
    room.give_back(Peer("a"), 4)
    assert (room.num_of(Peer("a")), room.num_of(Peer("b")), room.num_taken) == (0, 2, 2)
    assert room.within_share(Peer("a"), 6)


def test_what_is_held_is_taken_meanwhile_and_who_may_have_no_more_is_told_why() -> None:
    room, a = SharedRoom(10, 0, "seats"), Peer("a")
    with room.held(a, 6), room.held(Peer("b", has_peers=False), 3):
        with pytest.raises(QuotaExceeded) as over, room.held(a, 1):
            pass
        with pytest.raises(Overloaded) as full, room.held(a, 2):
            pass
        assert room.num_taken == 9
    assert room.num_taken == 0
    assert over.value.message == ("tenant a: it has 6 of the 10 seats, which is its share of them; try again later")
    assert (over.value.tenant, over.value.bound, over.value.retry_after_s) == ("a", "tenant_share", 1.0)
    assert full.value.message == "9 of the 10 seats are taken; try again later"
    assert (type(full.value), full.value.retry_after_s) == (Overloaded, 1.0)
    with pytest.raises(RuntimeError), room.held(a, 1):
        raise RuntimeError
    assert room.num_taken == 0
