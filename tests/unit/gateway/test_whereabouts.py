"""Whose word about a sequence counts, from its grant until another worker has it."""

import pytest

from weir.bus.messages import Placement
from weir_gateway.requests.whereabouts import Whereabouts

SPLIT = Placement(1, "p", "p:1", "d", "d:1", 4)
LOCAL = Placement(1, "d", "d:1", "d", "d:1", 4)


async def test_before_a_grant_every_worker_may_have_it_and_it_can_follow_to_none() -> None:
    where = Whereabouts()
    assert where.is_searched_at("d")
    assert [where.starts_at("d"), where.is_prefill("d"), where.is_split, where.is_lost_at_decode] == [False] * 4
    with pytest.raises(ValueError, match="granted nowhere"):
        where.follow("other", "other:1")


async def test_a_prefill_workers_part_ends_with_the_hand_off_unless_it_decodes_too() -> None:
    where = Whereabouts()
    where.grant(SPLIT)
    assert [where.is_prefill(one) for one in ("p", "d")] == [True, False]
    assert [where.is_searched_at(one) for one in ("p", "d", "other")] == [False, False, True]
    where.grant(LOCAL)
    assert where.starts_at("d")
    assert not where.is_prefill("d")


async def test_what_a_lost_worker_lacks_another_one_may_have_and_the_first_to_say_so_has_it() -> None:
    where = Whereabouts()
    where.grant(SPLIT)
    where.lose("d")
    adopted = where.look_for()
    assert where.is_lost_at_decode
    assert where.is_searched_at("d")
    where.find("other")
    where.find("late")
    where.follow(adopted.result(), "other:1")
    where.end_search()
    assert where.placement is not None
    assert (where.placement.prefill_worker_id, where.placement.decode_worker_id) == ("p", "other")
    assert (where.lost_worker_id, where.is_searched_at("d"), where.is_searched_at("other")) == ("", True, False)


async def test_a_local_sequence_takes_both_parts_along() -> None:
    where = Whereabouts()
    where.grant(LOCAL)
    where.lose("d")
    where.look_for()
    where.follow("d", "d:2")  # emptied, and given it back
    assert where.placement is not None
    assert (where.placement.prefill_address, where.placement.decode_address) == ("d:2", "d:2")
    assert where.lost_worker_id == "d"


async def test_a_claimed_sequence_is_that_of_the_first_worker_that_has_it() -> None:
    where = Whereabouts()
    where.look_for(is_claim=True)
    assert where.is_of_another_claim("first")
    where.grant(LOCAL)
    where.end_search()
    assert [where.is_of_another_claim(one) for one in ("d", "second")] == [False, True]
    where.leave()
    assert not where.is_of_another_claim("second")
