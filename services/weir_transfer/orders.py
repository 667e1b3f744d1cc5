"""What the core is asked, and what it answers."""

from dataclasses import dataclass

from weir.core.attempt import Attempt
from weir.kv.messages import HandedOff, HandOffReceipt


@dataclass(frozen=True, slots=True)
class Attachment:
    """A lease in use by one stream; `handed_off` are the sequences that its worker does not know of yet."""

    lease_id: int
    number: int
    handed_off: tuple[HandedOff, ...]


@dataclass(frozen=True, slots=True)
class HandOffOrder:
    """What a worker asks for: its sequence `request_id`, under `attempt`, in `slot`, to another worker.

    `hashes` of its first pages, which are computed and may serve others.
    """

    slot: int
    request_id: str
    attempt: Attempt
    to_worker_id: str
    hashes: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class MatchOrder:
    """A prompt's prefix: the `hashes` of its full pages. The prompt needs `num_pages` pages and `num_slots` slots."""

    hashes: tuple[bytes, ...]
    num_pages: int
    num_slots: int

    @property
    def num_matchable(self) -> int:
        """The page of the prompt's last token is computed, for its logits."""
        return max(0, min(len(self.hashes), self.num_pages - 1))


@dataclass(frozen=True, slots=True)
class Announcement:
    """To be told to the worker of `lease_id`."""

    lease_id: int
    sequence: HandedOff


@dataclass(frozen=True, slots=True)
class CommittedHandOff:
    """No announcement where an earlier call had committed the hand-off."""

    receipt: HandOffReceipt
    announcement: Announcement | None


@dataclass(frozen=True, slots=True)
class PrefixSettings:
    """`is_on`: full pages are kept and found again. `wait_ms`: how long a request waits for a prefix that another one
    computes."""

    is_on: bool = True
    wait_ms: int = 10_000


@dataclass(slots=True)
class TransferCounters:
    """Since the start of this process."""

    handoffs_total: int = 0
    handoffs_repeated_total: int = 0
    handoff_pages_total: int = 0
    handoff_bytes_copied_total: int = 0
    fenced_total: int = 0
    orphaned_total: int = 0
    reclaimed_pages_total: int = 0
    reclaimed_slots_total: int = 0
    prefix_hit_pages_total: int = 0
    prefix_missed_pages_total: int = 0
    prefix_waits_total: int = 0
