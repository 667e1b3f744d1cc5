"""Lanes, order inside them, and what a grant needs to be free."""

import dataclasses

from tests.unit.scheduler.rig import Rig, make_limits, make_worker

from weir.bus.messages import RefusalReason


def one_at_a_time() -> Rig:
    rig = Rig().start(make_worker("p", "prefill"), make_worker("d", "decode", seqs=1))
    rig.submit("first", "batch")
    return rig


def drain(rig: Rig) -> list[str]:
    """The order in which what waits is granted, one at a time."""
    before = len(rig.granted)
    while rig.metric("granted"):
        rig.finish(rig.granted[-1])
    return rig.granted[before:]


def test_lanes_are_served_in_strict_order_and_each_first_come_first_served() -> None:
    rig = one_at_a_time()
    for number in range(3):
        for lane in ("batch", "standard", "interactive"):
            rig.submit(f"{lane}-{number}", lane)
    assert drain(rig) == [f"{lane}-{number}" for lane in ("interactive", "standard", "batch") for number in range(3)]


def test_a_request_without_lane_waits_in_the_default_one() -> None:
    rig = one_at_a_time()
    rig.submit("b", "batch")
    rig.submit("none")
    rig.submit("i", "interactive")
    assert drain(rig) == ["i", "none", "b"]


def test_a_cancelled_request_leaves_its_queue() -> None:
    rig = one_at_a_time()
    for name in "abc":
        rig.submit(name)
    rig.cancel("b")
    assert drain(rig) == ["a", "c"]


def test_nobody_overtakes_a_large_request_that_waits_for_pages() -> None:
    rig = Rig().start(make_worker("p", "prefill", pages=10), make_worker("d", "decode", pages=10))
    rig.submit("small", prompt=16, max_tokens=16)
    rig.submit("large", "interactive", prompt=144, max_tokens=16)
    rig.submit("tiny", "batch", prompt=1, max_tokens=1)
    assert rig.granted == ["small"]
    rig.finish("small")
    assert rig.granted == ["small", "large"]
    rig.finish("large")
    assert rig.granted == ["small", "large", "tiny"]


def test_a_model_whose_workers_are_full_holds_up_no_other_model() -> None:
    rig = Rig().start(
        make_worker("p", "prefill"),
        make_worker("d", "decode", seqs=1),
        make_worker("p2", "prefill", host="h2", model="other"),
        make_worker("d2", "decode", host="h2", model="other"),
    )
    rig.submit("a")
    rig.submit("b", "interactive")
    rig.submit("c", "batch", model="other")
    assert rig.granted == ["a", "c"]


def test_decode_slots_are_reserved_before_prefill_starts() -> None:
    rig = Rig().start(make_worker("p", "prefill"), make_worker("d", "decode", seqs=2))
    for name in "abc":
        rig.submit(name)
        rig.prefilled(name)
    assert rig.granted == ["a", "b"]
    rig.finish("a")
    assert rig.granted == ["a", "b", "c"]


def test_the_pages_of_a_host_are_shared_by_all_its_decode_workers() -> None:
    rig = Rig().start(
        make_worker("p", "prefill", pages=10),
        make_worker("d1", "decode", pages=10),
        make_worker("d2", "decode", pages=10),
    )
    for name in ("a", "b", "c"):
        rig.submit(name, prompt=60, max_tokens=4)
    assert rig.granted == ["a", "b"]
    assert {rig.placement(name).decode_worker_id for name in ("a", "b")} == {"d1", "d2"}
    assert rig.metric("reserved_pages") == 8


def test_with_overcommit_more_pages_are_reserved_than_there_are_but_no_request_alone_is_larger_than_the_arena() -> None:
    rig = Rig(make_limits(page_overcommit=2.5))
    rig.start(make_worker("p", "prefill", pages=10), make_worker("d", "decode", pages=10, seqs=99))
    reply = rig.submit("never", prompt=160, max_tokens=16)
    assert (reply.queued, reply.reason) == (False, RefusalReason.TOO_LARGE)
    for number in range(5):
        rig.submit(f"r{number}", prompt=64, max_tokens=16)
        rig.prefilled(f"r{number}")
    rig.submit("one-too-many", prompt=1, max_tokens=1)
    assert rig.granted == [f"r{number}" for number in range(5)]
    assert rig.metric("reserved_pages") == 25


def test_a_prefill_worker_is_given_a_bounded_number_of_prompts_and_tokens() -> None:
    rig = Rig().start(make_worker("p", "prefill"), make_worker("d", "decode", seqs=99))
    for number in range(6):
        rig.submit(f"short-{number}", prompt=8)
    assert rig.metric("prefills_in_flight") == 4
    for number in range(6):
        rig.prefilled(f"short-{number}")
        rig.prefilled(f"short-{number}")
    assert (rig.metric("prefills_in_flight"), rig.metric("granted")) == (0, 6)
    rig.submit("long", prompt=400)
    rig.submit("next", prompt=1)
    assert rig.granted[-1] == "long"
    rig.prefilled("long")
    assert rig.granted[-1] == "next"


def test_an_urgent_request_does_not_wait_for_what_the_worker_was_given_of_less_urgent_lanes() -> None:
    rig = Rig().start(make_worker("p", "prefill"), make_worker("d", "decode", seqs=99))
    for number in range(10):
        rig.submit(f"bulk-{number}", prompt=100)
    for number in range(3):
        rig.submit(f"urgent-{number}", "interactive", prompt=100)
    assert rig.granted == ["bulk-0", "bulk-1", "urgent-0", "urgent-1"], "of its own lane a bounded number"
    rig.prefilled("bulk-0")
    assert len(rig.granted) == 4, "what is more urgent counts against bulk"
    rig.prefilled("urgent-1")
    assert rig.granted[-1] == "urgent-2"


def test_without_the_hint_the_workers_own_load_frees_its_place() -> None:
    rig = Rig().start(make_worker("p", "prefill", running=2), make_worker("d", "decode", seqs=99))
    for number in range(5):
        rig.submit(f"r{number}", prompt=8)
    rig.put(make_worker("p", "prefill", running=0))
    rig.decide()
    assert rig.metric("prefills_in_flight") == 4, "these grants may still be on their way"
    rig.clock.advance(1.5)
    rig.put(make_worker("p", "prefill", running=2, waiting=1))
    rig.decide()
    assert rig.granted[-1] == "r4"
    assert rig.metric("prefills_in_flight") == 4


def test_prompts_go_where_the_fewest_tokens_wait_and_decode_stays_on_that_host() -> None:
    workers = [
        make_worker(f"{role[0]}{host}", role, host=f"h{host}") for host in (1, 2) for role in ("prefill", "decode")
    ]
    rig = Rig().start(*workers)
    rig.submit("a", prompt=100)
    rig.submit("b", prompt=50)
    rig.submit("c", prompt=20)
    rig.submit("d", prompt=40)
    places = [(rig.placement(name).prefill_worker_id, rig.placement(name).decode_worker_id) for name in "abcd"]
    assert places == [("p1", "d1"), ("p2", "d2"), ("p2", "d2"), ("p2", "d2")]


def test_a_draining_worker_gets_nothing_new_and_its_reservations_still_count() -> None:
    rig = Rig().start(
        make_worker("p", "prefill", pages=10),
        make_worker("d1", "decode", pages=10),
    )
    rig.submit("a", prompt=60, max_tokens=4)
    rig.put(make_worker("d1", "decode", pages=10, draining=True), make_worker("d2", "decode", pages=10))
    rig.submit("b", prompt=60, max_tokens=4)
    rig.submit("c", prompt=60, max_tokens=4)
    assert rig.placement("b").decode_worker_id == "d2"
    assert rig.granted == ["a", "b"]


def test_who_waits_past_its_deadline_or_the_lanes_limit_is_given_up() -> None:
    rig = one_at_a_time()
    rig.submit("hasty", "standard", deadline_ms=5000)
    rig.submit("patient", "standard")
    rig.submit("slack", "standard", deadline_ms=500_000)
    rig.run(6)
    revoke = rig.revoked["hasty"]
    assert (revoke.reason, revoke.dispatch, revoke.epoch) == (RefusalReason.WAITED_TOO_LONG, 1, 7)
    assert list(rig.revoked) == ["hasty"]
    rig.run(25)
    assert list(rig.revoked) == ["hasty", "patient", "slack"]


def test_a_request_that_no_remaining_worker_can_hold_does_not_block_the_lane() -> None:
    rig = Rig().start(make_worker("p", "prefill", pages=50), make_worker("d", "decode", pages=50, seqs=1))
    rig.submit("running")
    rig.submit("large", prompt=600, max_tokens=16)
    rig.submit("small", "batch")
    rig.put(make_worker("p", "prefill", pages=10), make_worker("d", "decode", pages=10, seqs=1))
    rig.finish("running")
    assert rig.revoked["large"].reason is RefusalReason.NO_WORKER
    assert rig.granted[-1] == "small"


def test_what_a_gateway_declines_is_free_again() -> None:
    rig = one_at_a_time()
    rig.submit("next")
    placement = rig.placement("first")
    rig.core.grant_answered("first", dataclasses.replace(placement, decode_worker_id="other"), accepted=False)
    rig.decide()
    assert rig.granted == ["first"], "an answer to another grant says nothing"
    rig.core.grant_answered("first", placement, accepted=True)
    rig.decide()
    assert rig.granted == ["first"]
    rig.forget("first")
    rig.core.grant_answered("first", placement, accepted=False)
    rig.decide()
    assert rig.granted == ["first", "next"]
