"""What one tenant may hold of room that all share."""

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from weir.core.shares import NOBODY, SharedRoom, has_share


class Peer(NamedTuple):
    tenant: str
    has_peers: bool = True


@given(size=st.integers(1, 1000), steps=st.lists(st.integers(1, 400)))
def test_alone_a_tenant_comes_to_four_fifths_in_steps_of_whatever_size(size: int, steps: list[int]) -> None:
    room, tenant = SharedRoom(size, num_sure=0), Peer("a")
    for step in steps:
        may = room.within_share(tenant, step)
        assert may == (5 * (room.num_taken + step) <= 4 * size)
        if may:
            room.take(tenant, step)
    assert room.num_of(tenant) == room.num_taken


@given(size=st.integers(25, 1000), num_tenants=st.integers(1, 6))
def test_whoever_comes_next_finds_room(size: int, num_tenants: int) -> None:
    room = SharedRoom(size, num_sure=0)
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
    room = SharedRoom(10, num_sure=0)
    assert room.within_share(NOBODY, 10)
    room.take(NOBODY, 10)
    assert not room.fits(1)


def test_what_is_given_back_can_be_taken_again() -> None:
    room = SharedRoom(10, num_sure=0)
    for tenant in (Peer("a"), Peer("b"), Peer("a")):
        room.take(tenant, 2)
    room.give_back(Peer("a"), 4)
    assert (room.num_of(Peer("a")), room.num_of(Peer("b")), room.num_taken) == (0, 2, 2)
    assert room.within_share(Peer("a"), 6)
