"""Which cancels are said again, and until when; with a clock that is turned by hand."""

from collections import Counter

import pytest
from tests.unit.gateway.fake_workers import CANCELLED, LENGTH, update, worker_error

from weir.core.attempt import Attempt
from weir.core.clock import ManualClock
from weir.wire.v1 import worker_pb2
from weir_gateway.workers.cancels import UnconfirmedCancels
from weir_gateway.workers.wire import cancel_command


class Book:
    """Cancels at one worker, of which three are remembered, for a minute."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.counts = Counter[str]()
        self.cancels = UnconfirmedCancels("decode-0", kept_s=60.0, max_entries=3, clock=self.clock, counts=self.counts)

    def ids(self) -> list[str]:
        return [command.cancel.request_id for command in self.cancels.commands()]


@pytest.mark.parametrize(
    "said",
    [
        update("a", 3, finish=CANCELLED, dispatch=2),
        update("a", 3, [7], finish=LENGTH, dispatch=2),
        update("a", 3, handed_off=True, dispatch=2),
        update("a", 3, finish=CANCELLED, dispatch=3),
    ],
    ids=["cancelled", "finished", "handed off", "newer attempt"],
)
def test_an_end_of_the_attempt_or_of_a_newer_one_confirms(said: worker_pb2.SequenceUpdate) -> None:
    book = Book()
    book.cancels.note("a", Attempt(2))
    assert book.cancels.try_confirm(said)
    assert book.ids() == []


@pytest.mark.parametrize(
    "said",
    [
        update("a", 3, [7], dispatch=2),
        update("a", 3, finish=CANCELLED, dispatch=1),
        update("b", 3, finish=CANCELLED, dispatch=2),
    ],
    ids=["goes on", "older attempt", "another request"],
)
def test_nothing_else_confirms(said: worker_pb2.SequenceUpdate) -> None:
    book = Book()
    book.cancels.note("a", Attempt(2))
    assert not book.cancels.try_confirm(said)
    assert book.ids() == ["a"]


def test_a_worker_that_gave_the_request_up_confirms_and_one_that_has_not_heard_of_it_does_not() -> None:
    book = Book()
    book.cancels.note("a", Attempt())
    assert not book.cancels.try_confirm(worker_error("a", worker_pb2.WORKER_ERROR_REASON_UNKNOWN_REQUEST))
    assert book.cancels.try_confirm(worker_error("a", worker_pb2.WORKER_ERROR_REASON_INTERNAL))


def test_the_newest_cancelled_attempt_is_said() -> None:
    book = Book()
    assert book.cancels.note("a", Attempt(2)) == cancel_command("a", Attempt(2))
    assert book.cancels.note("a", Attempt(1)) == cancel_command("a", Attempt(2))
    assert book.cancels.commands() == [cancel_command("a", Attempt(2))]


def test_of_too_many_the_oldest_are_forgotten_and_counted() -> None:
    book = Book()
    for request_id in "abcad":
        book.cancels.note(request_id, Attempt())
    assert book.ids() == ["c", "a", "d"]
    assert book.counts["cancels_forgotten_total"] == 1


def test_what_is_older_than_a_worker_waits_for_a_gateway_is_not_said_again() -> None:
    book = Book()
    book.cancels.note("a", Attempt())
    book.clock.advance(1.0)
    book.cancels.note("b", Attempt())
    book.clock.advance(59.0)
    assert book.ids() == ["b"]
    assert book.counts["cancels_forgotten_total"] == 0


def test_a_cancel_was_said_lately_for_a_while() -> None:
    book = Book()
    assert not book.cancels.was_sent_within("a", 1.0)
    book.cancels.note("a", Attempt())
    book.clock.advance(0.9)
    assert book.cancels.was_sent_within("a", 1.0)
    book.clock.advance(0.2)
    assert not book.cancels.was_sent_within("a", 1.0)
