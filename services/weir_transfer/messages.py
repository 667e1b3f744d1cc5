"""What the core is asked, under which settings, what it answers, and what it refuses.

Beside these refusals it raises `weir.kv.arena.ownership.NotOwned` and `weir.core.errors.Overloaded`.
"""

from dataclasses import dataclass, field

from weir.core.life import Attempt
from weir.core.process import ProcessIdentity
from weir.kv.messages import Claims, HandedOff, HandOffReceipt

_MISSED_HEARTBEATS = 3
"""After so many a lease is suspect."""


@dataclass(frozen=True, slots=True)
class ArenaSettings:
    """A heartbeat is expected every `heartbeat_interval_ms`; after `lease_ttl_ms` of silence a process is killed.

    `keeps_prefixes`: full pages are kept and found again. `prefix_wait_ms`: how long a match waits for a prefix that
    another request computes. `adoption_wait_ms`: how long sequences of a worker that has ended wait for another one, 0:
    not at all; none is adopted more than `max_adoptions` times.
    """

    heartbeat_interval_ms: int
    lease_ttl_ms: int
    keeps_prefixes: bool = True
    prefix_wait_ms: int = 10_000
    adoption_wait_ms: int = 30_000
    max_adoptions: int = 3

    @property
    def adoption_wait_s(self) -> float:
        return self.adoption_wait_ms / 1000

    @property
    def suspect_after_s(self) -> float:
        return min(_MISSED_HEARTBEATS * self.heartbeat_interval_ms, self.lease_ttl_ms) / 1000

    @property
    def lease_ttl_s(self) -> float:
        return self.lease_ttl_ms / 1000


@dataclass(frozen=True, slots=True)
class LeaseRegistration:
    """A worker that wants a lease, or its lease (`lease_id` not 0) back."""

    worker_id: str
    role: str
    process: ProcessIdentity
    page_bytes: int
    model_digest: str
    lease_id: int = 0
    claims: Claims = field(default_factory=Claims)


@dataclass(frozen=True, slots=True)
class Attachment:
    """A lease in use by one stream; `handed_off` are the sequences that its worker does not know of yet."""

    lease_id: int
    number: int
    handed_off: tuple[HandedOff, ...]


@dataclass(frozen=True, slots=True)
class HandOffRequest:
    """Passes the sequence `request_id`, under `attempt`, in `slot`, to another worker; empty: to whichever can go on
    with it, under the next adoption.

    `hashes` are those of its first pages: computed, and free to serve others.
    """

    slot: int
    request_id: str
    attempt: Attempt
    to_worker_id: str
    hashes: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class MatchRequest:
    """A prompt with the `hashes` of its full pages. It needs `num_pages` pages and `num_slots` slots.

    `most_pages_ahead`: that it needs at a time behind its cached prefix; None: all.
    """

    hashes: tuple[bytes, ...]
    num_pages: int
    num_slots: int
    most_pages_ahead: int | None = None

    @property
    def num_matchable(self) -> int:
        """The page of the prompt's last token is computed, for its logits."""
        return max(0, min(len(self.hashes), self.num_pages - 1))

    def num_pages_behind(self, num_matched: int) -> int:
        """To acquire where so many are matched."""
        num_pages = max(0, self.num_pages - num_matched)
        return num_pages if self.most_pages_ahead is None else min(num_pages, self.most_pages_ahead)


@dataclass(frozen=True, slots=True)
class Announcement:
    """A sequence that is to be sent to the worker of `lease_id`."""

    lease_id: int
    sequence: HandedOff


@dataclass(frozen=True, slots=True)
class CommittedHandOff:
    """No announcement where an earlier call had committed the hand-off."""

    receipt: HandOffReceipt
    announcement: Announcement | None


class ArenaRefusal(Exception):
    """Nothing was changed. The message is for the log of the worker that asked."""


class AttachRefused(ArenaRefusal):
    """The worker cannot have this lease, now or later."""


class StaleAttachment(ArenaRefusal):
    """The call belongs to an attachment that has ended: attach again, then repeat it."""


class RecordMismatch(ArenaRefusal):
    """The slot's record is not of the sequence that was named."""


class ReceiverSilent(ArenaRefusal):
    """The receiver of a hand-off is silent or reconnects; it may be back in a moment."""


class AdoptionOff(ArenaRefusal):
    """Nobody goes on with what a worker leaves, now or later."""


class ReceiverGone(ArenaRefusal):
    """The receiver of a hand-off has no lease."""
