"""Cancels that a worker has not confirmed: whatever stream may have lost them, the next one carries them again.

cancel ──> noted ── the worker reports that the attempt, or a newer one, has ended there ──> confirmed
             ├───── `kept_s` have passed ─────────────> forgotten: the worker has given the gateway up long ago
             └───── `max_entries` newer ones ─────────> forgotten, and counted: the request may go on
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable

from weir.core.clock import Clock
from weir.core.life import Attempt
from weir.rpc.conversions import attempt_from_pb, attempt_to_pb
from weir.wire.v1 import worker_pb2

logger = logging.getLogger(__name__)


class UnconfirmedCancels:
    """The Cancels to one worker, each with the newest attempt that it is for."""

    def __init__(
        self,
        worker_id: str,
        *,
        kept_s: float,
        max_entries: int,
        clock: Clock,
        counts: Counter[str],
        on_moved: Callable[[str, Attempt], None],
        is_wanted: Callable[[str, Attempt], bool],
    ) -> None:
        """`on_moved`: another worker of the same memory may go on with what was cancelled here. `is_wanted`: whether
        an attempt runs for this gateway, perhaps at another worker as far as it knows."""
        self._worker_id = worker_id
        self._kept_s = kept_s
        self._max_entries = max_entries
        self._clock = clock
        self._counts = counts
        self._on_moved = on_moved
        self._is_wanted = is_wanted
        self._entries: OrderedDict[str, tuple[Attempt, float]] = OrderedDict()  # with when it was sent; oldest first

    def __len__(self) -> int:
        return len(self._entries)

    def covers(self, request_id: str, attempt: Attempt) -> bool:
        return request_id in self._entries and self._entries[request_id][0] >= attempt

    def note(self, request_id: str, attempt: Attempt) -> worker_pb2.ServeRequest:
        """Returns the command, to be sent now if there is a stream."""
        before, _ = self._entries.pop(request_id, (attempt, 0.0))
        self._entries[request_id] = max(before, attempt), self._clock.now_s()
        self.forget_old()
        if len(self._entries) > self._max_entries:
            forgotten_id, _ = self._entries.popitem(last=False)
            logger.warning(
                "the cancel of request %s at %s is forgotten: %d newer ones are not confirmed",
                forgotten_id,
                self._worker_id,
                self._max_entries,
            )
            self._counts["cancels_forgotten_total"] += 1
        return cancel_command(request_id, max(before, attempt))

    def is_due(self, request_id: str, attempt: Attempt, *, may_be_early: bool, again_s: float) -> bool:
        """Whether a worker that goes on with what nobody asked it for is to be told that nobody wants it; again only
        after `again_s`. `may_be_early`: it may have got from another worker what is wanted, and this gateway has yet to
        miss that one."""
        if may_be_early and self._is_wanted(request_id, attempt):
            return False
        entry = self._entries.get(request_id)
        return entry is None or self._clock.now_s() - entry[1] >= again_s

    def try_confirm(self, update: worker_pb2.SequenceUpdate) -> bool:
        """Whether the update shows that what was cancelled has ended at the worker. UNKNOWN_REQUEST does not: a worker
        that does not know the request yet may still get it, and has not got the Cancel either."""
        entry = self._entries.get(update.request_id)
        if entry is None or attempt_from_pb(update.attempt) < entry[0]:
            return False
        is_unknown = update.error.reason == worker_pb2.WORKER_ERROR_REASON_UNKNOWN_REQUEST
        has_ended = bool(update.finish_reason) or update.handed_off or update.HasField("error")
        if has_ended and not is_unknown:
            del self._entries[update.request_id]
            if update.handed_off and update.HasField("error"):
                self._on_moved(update.request_id, entry[0])
            return True
        return False

    def lose_worker(self) -> None:
        """It may have ended before it got them."""
        for request_id, (attempt, _) in list(self._entries.items()):
            self._on_moved(request_id, attempt)

    def commands(self) -> list[worker_pb2.ServeRequest]:
        """To be sent on a new stream."""
        self.forget_old()
        return [cancel_command(request_id, attempt) for request_id, (attempt, _) in self._entries.items()]

    def forget_old(self) -> None:
        until_s = self._clock.now_s() - self._kept_s
        while self._entries and next(iter(self._entries.values()))[1] <= until_s:
            self._entries.popitem(last=False)


def cancel_command(request_id: str, attempt: Attempt) -> worker_pb2.ServeRequest:
    return worker_pb2.ServeRequest(cancel=worker_pb2.Cancel(request_id=request_id, attempt=attempt_to_pb(attempt)))
