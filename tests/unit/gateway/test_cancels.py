"""Which cancels are sent again, and until when; with a manual clock."""

from collections import Counter

import pytest
from tests.unit.gateway.fake_workers import CANCELLED, LENGTH, update, worker_error

from weir.core.clock import ManualClock
from weir.core.life import Attempt
from weir.wire.v1 import worker_pb2
from weir_gateway.workers.cancels import UnconfirmedCancels, cancel_command


class Rig:
    """Cancels at one worker, of which three are remembered, for a minute."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.counts = Counter[str]()
        self.moved: list[tuple[str, Attempt]] = []
        self.wanted: set[tuple[str, Attempt]] = set()
        self.cancels = UnconfirmedCancels(
            "decode-0",
            kept_s=60.0,
            max_entries=3,
            clock=self.clock,
            counts=self.counts,
            on_moved=lambda request_id, attempt: self.moved.append((request_id, attempt)),
            is_wanted=lambda request_id, attempt: (request_id, attempt) in self.wanted,
        )

    def ids(self) -> list[str]:
        return [command.cancel.request_id for command in self.cancels.commands()]


@pytest.mark.parametrize(
    "sent",
    [
        update("a", 3, finish=CANCELLED, dispatch=2),
        update("a", 3, [7], finish=LENGTH, dispatch=2),
        update("a", 3, handed_off=True, dispatch=2),
        update("a", 3, finish=CANCELLED, dispatch=3),
    ],
    ids=["cancelled", "finished", "handed off", "newer attempt"],
)
def test_an_end_of_the_attempt_or_of_a_newer_one_confirms(sent: worker_pb2.SequenceUpdate) -> None:
    rig = Rig()
    rig.cancels.note("a", Attempt(2))
    assert rig.cancels.try_confirm(sent)
    assert rig.ids() == []


@pytest.mark.parametrize(
    "sent",
    [
        update("a", 3, [7], dispatch=2),
        update("a", 3, finish=CANCELLED, dispatch=1),
        update("b", 3, finish=CANCELLED, dispatch=2),
    ],
    ids=["goes on", "older attempt", "another request"],
)
def test_nothing_else_confirms(sent: worker_pb2.SequenceUpdate) -> None:
    rig = Rig()
    rig.cancels.note("a", Attempt(2))
    assert not rig.cancels.try_confirm(sent)
    assert rig.ids() == ["a"]


def test_a_worker_that_gave_the_request_up_confirms_and_one_that_never_had_it_does_not() -> None:
    rig = Rig()
    rig.cancels.note("a", Attempt())
    assert not rig.cancels.try_confirm(worker_error("a", worker_pb2.WORKER_ERROR_REASON_UNKNOWN_REQUEST))
    assert rig.cancels.try_confirm(worker_error("a", worker_pb2.WORKER_ERROR_REASON_INTERNAL))


def test_the_newest_cancelled_attempt_is_sent() -> None:
    rig = Rig()
    assert rig.cancels.note("a", Attempt(2)) == cancel_command("a", Attempt(2))
    assert rig.cancels.note("a", Attempt(1)) == cancel_command("a", Attempt(2))
    assert rig.cancels.commands() == [cancel_command("a", Attempt(2))]


def test_of_too_many_the_oldest_are_forgotten_and_counted() -> None:
    rig = Rig()
    for request_id in "abcad":
        rig.cancels.note(request_id, Attempt())
    assert rig.ids() == ["c", "a", "d"]
    assert rig.counts["cancels_forgotten_total"] == 1


def test_what_is_older_than_a_worker_waits_for_a_gateway_is_not_sent_again() -> None:
    rig = Rig()
    rig.cancels.note("a", Attempt())
    rig.clock.advance(1.0)
    rig.cancels.note("b", Attempt())
    rig.clock.advance(59.0)
    assert rig.ids() == ["b"]
    assert rig.counts["cancels_forgotten_total"] == 0


def test_a_worker_that_goes_on_is_told_again_after_a_while() -> None:
    rig = Rig()
    assert rig.cancels.is_due("a", Attempt(), may_be_early=True, again_s=1.0)
    rig.cancels.note("a", Attempt())
    rig.clock.advance(0.9)
    assert not rig.cancels.is_due("a", Attempt(), may_be_early=True, again_s=1.0)
    rig.clock.advance(0.2)
    assert rig.cancels.is_due("a", Attempt(), may_be_early=True, again_s=1.0)


def test_what_runs_for_this_gateway_is_due_only_if_it_is_not_missed_elsewhere_in_time() -> None:
    rig = Rig()
    rig.wanted.add(("a", Attempt(2)))
    assert not rig.cancels.is_due("a", Attempt(2), may_be_early=True, again_s=1.0)
    assert rig.cancels.is_due("a", Attempt(2), may_be_early=False, again_s=1.0)
    assert rig.cancels.is_due("a", Attempt(1), may_be_early=True, again_s=1.0)


def test_a_cancel_covers_its_attempt_and_older_ones() -> None:
    rig = Rig()
    assert not rig.cancels.covers("a", Attempt(1))
    rig.cancels.note("a", Attempt(2))
    assert [rig.cancels.covers("a", Attempt(dispatch)) for dispatch in (1, 2, 3)] == [True, True, False]
