"""Who may wait, who is refused and why, and that saying it twice changes nothing."""

import pytest
from tests.unit.scheduler.rig import Rig, make_limits, make_worker

from weir.bus.messages import RefusalReason


def test_a_request_is_queued_and_granted_with_its_reservation() -> None:
    rig = Rig().start()
    reply = rig.submit("a", prompt=20, max_tokens=30)
    assert (reply.queued, reply.epoch) == (True, 7)
    placement = rig.placement("a")
    assert (placement.prefill_worker_id, placement.prefill_address) == ("p", "address-of-p")
    assert (placement.decode_worker_id, placement.decode_address) == ("d", "address-of-d")
    assert (placement.dispatch, placement.num_reserved_pages) == (1, 4)
    assert (rig.metric("granted"), rig.metric("reserved_pages"), rig.metric("queued")) == (1, 4, 0)


def test_a_grant_says_how_urgent_its_lane_is() -> None:
    rig = Rig().start()
    for lane in ("batch", "interactive", "", "standard"):
        rig.submit(f"in-{lane}", lane)
    priorities = {
        lane: rig.placement(f"in-{lane}").scheduling.lane_priority for lane in ("batch", "standard", "", "interactive")
    }
    assert priorities == {"batch": 0, "standard": 1, "": 1, "interactive": 2}


@pytest.mark.parametrize(
    ("changes", "reason", "words"),
    [
        ({"lane": "vip"}, RefusalReason.UNKNOWN_LANE, "'vip' is none of interactive, standard, batch"),
        ({"prompt": 1600, "max_tokens": 1}, RefusalReason.TOO_LARGE, r"101 pages\): the largest host holds 100 pages"),
        ({"prompt": 1, "max_tokens": 1500}, RefusalReason.TOO_LARGE, "and 1000 tokens of context"),
    ],
)
def test_what_can_never_start_is_refused_for_good(
    changes: dict[str, int | str], reason: RefusalReason, words: str
) -> None:
    context = 1000 if "context" in words else 2048
    rig = Rig().start(make_worker("p", "prefill", context=context), make_worker("d", "decode", context=context))
    reply = rig.submit("a", **changes)  # type: ignore[arg-type]
    assert (reply.queued, reply.reason, reply.retry_after_ms) == (False, reason, 0)
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(reply.message)
    assert rig.core.is_idle


def test_without_a_pair_of_workers_a_model_is_refused_for_now_also_where_none_was_seen() -> None:
    rig = Rig().start(make_worker("p", "prefill", host="h1"), make_worker("d", "decode", host="h2"))
    for reply in (rig.submit("a"), rig.submit("b", model="other")):
        assert (reply.reason, reply.retry_after_ms) == (RefusalReason.NO_WORKER, 2000)


def test_a_full_lane_refuses_with_a_hint_from_the_recent_rate_of_finishes() -> None:
    rig = Rig().start(make_worker("p", "prefill"), make_worker("d", "decode", seqs=1))
    rig.submit("running", "batch")
    for number in range(4):
        assert rig.submit(f"waiting-{number}", "batch").queued
    blind = rig.submit("too-many", "batch")
    assert (blind.reason, blind.retry_after_ms) == (RefusalReason.QUEUE_FULL, 1000)
    assert rig.submit("elsewhere", "standard").queued
    for number in range(8):
        rig.run(0.5)
        rig.finish(rig.granted[-1])
        rig.submit(f"refill-{number}", "batch")
    assert rig.metric("queued_batch") == 4
    # 8 finishes in 3.5 s and 4 ahead: about 1.75 s.
    assert rig.submit("again", "batch").retry_after_ms == pytest.approx(4 / (8 / 3.5) * 1000, abs=1)


def test_a_repeated_submit_gets_the_same_answer_in_every_state() -> None:
    rig = Rig().start(make_worker("p", "prefill"), make_worker("d", "decode", seqs=1))
    rig.submit("granted")
    rig.submit("queued")
    refused = rig.submit("refused", "vip")
    before = len(rig.granted)
    for _ in range(3):
        assert rig.submit("granted").queued
        assert rig.submit("queued").queued
        assert rig.submit("refused", "vip") == refused
    assert len(rig.granted) == before
    assert (rig.metric("submitted_total"), rig.metric("queued"), rig.metric("granted")) == (3, 1, 1)


def test_a_refusal_with_a_hint_holds_until_the_hint_is_over() -> None:
    rig = Rig().start(make_worker("p", "prefill"))
    refused = rig.submit("a")
    rig.put(make_worker("d", "decode"))
    assert rig.submit("a") == refused
    rig.run(2.0)
    assert rig.submit("a").queued


def test_an_early_cancel_refuses_the_late_submit() -> None:
    rig = Rig().start()
    rig.cancel("a")
    reply = rig.submit("a")
    assert (reply.queued, reply.reason) == (False, RefusalReason.CANCELLED)
    assert rig.core.is_idle


def test_tombstones_are_bounded_and_expire() -> None:
    rig = Rig(make_limits(max_tombstones=10, tombstone_ttl_s=5)).start()
    for number in range(30):
        rig.cancel(f"r{number}")
    assert rig.metric("tombstones") == 10
    rig.run(6)
    assert rig.metric("tombstones") == 0


def test_a_submit_after_the_end_is_refused_and_a_finish_may_come_twice() -> None:
    rig = Rig().start()
    rig.submit("a")
    rig.finish("a")
    rig.finish("a")
    assert not rig.submit("a").queued
    assert (rig.metric("ended_finished_total"), rig.metric("reserved_pages")) == (1, 0)


def test_while_gathering_requests_wait_and_afterwards_those_go_on_whose_models_have_no_worker_yet() -> None:
    rig = Rig()
    assert rig.submit("known").queued
    assert rig.submit("later", model="other").queued
    assert rig.granted == []
    rig.start()
    assert rig.granted == ["known"]
    assert rig.revoked == {}
    for role in ("prefill", "decode"):
        rig.put(make_worker(f"other-{role}", role, model="other"))
    rig.decide()
    assert rig.granted == ["known", "later"]
