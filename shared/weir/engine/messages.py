"""What goes into an engine (commands) and what comes out of it (one report a turn). All frozen: they cross threads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from weir.core.attempt import Attempt
from weir.core.cost import StepCost
from weir.core.life import FinishReason
from weir.core.logprobs import TokenLogprobs
from weir.engine.load import EngineLoad
from weir.engine.plan import NO_LOAD, StepLoad
from weir.kv.records.record import SequenceParams
from weir.policy.seams import Policy


class SequenceKey(NamedTuple):
    """One attempt at one request."""

    request_id: str
    attempt: Attempt


class FailureReason(Enum):
    """Why a worker gave a sequence up. The first two are said by the shell alone."""

    UNKNOWN_REQUEST = "unknown_request"
    STALE_ATTEMPT = "stale_attempt"
    NO_CAPACITY = "no_capacity"
    HAND_OFF_REFUSED = "hand_off_refused"
    INTERNAL = "internal"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Failure:
    """A reason, and a sentence for people."""

    reason: FailureReason
    message: str


@dataclass(frozen=True, slots=True)
class UsedPages:
    """Pages that one sequence used, in the order of its positions; `token_ids` are computed in them from position 0 on.

    They may serve other sequences as a prefix under `prefix_seed`; empty: they may not.
    """

    page_ids: tuple[int, ...]
    token_ids: tuple[int, ...] = ()
    prefix_seed: bytes = b""


@dataclass(frozen=True, slots=True)
class PageBundle:
    """Pages and slots that change hands together. `page_ids` hold nothing that anybody wants."""

    page_ids: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    used: tuple[UsedPages, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.page_ids or self.slots or self.used)

    @property
    def all_page_ids(self) -> tuple[int, ...]:
        """Those that sequences used included; a page that two of them shared is named twice."""
        return (*self.page_ids, *(page_id for used in self.used for page_id in used.page_ids))


class SequenceLog(Protocol):
    """A sequence's record in the arena, as its writer sees it. What was written counts once it is published."""

    def begin(self, params: SequenceParams) -> None: ...

    def set_block_table(self, page_ids: Sequence[int]) -> None: ...

    def append_page(self, page_id: int) -> None: ...

    def append_token(self, token_id: int) -> None: ...

    def keep_logprobs(self, output_index: int, logprobs: TokenLogprobs) -> None: ...

    def publish(self, num_computed_tokens: int) -> None: ...

    def drop_pages(self, num_kept: int) -> None: ...

    def clear(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Arrival:
    """A sequence that comes to a worker: a prompt, or a handed-off sequence with its slot, its record and its pages.

    From here on the engine's thread is the record's only user.
    """

    params: SequenceParams
    slot: int | None = None
    log: SequenceLog | None = None
    output_token_ids: tuple[int, ...] = ()
    output_logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry an output token, where the request asks for them."""
    block_table: tuple[int, ...] = ()
    """Of a prompt: the pages of its cached prefix, which others read too."""
    num_computed_tokens: int = 0
    num_shared_pages: int = 0
    """The first pages of the block table that were others' before: giving them back may free nothing."""


@dataclass(frozen=True, slots=True)
class AddSequence:
    """Take a sequence."""

    arrival: Arrival


@dataclass(frozen=True, slots=True)
class CancelSequence:
    """End a sequence as cancelled, and free it. Unknown ones are ignored."""

    key: SequenceKey


@dataclass(frozen=True, slots=True)
class FailSequence:
    """End a sequence with an error, and free it. Unknown ones are ignored."""

    key: SequenceKey
    failure: Failure


@dataclass(frozen=True, slots=True)
class ForgetSequence:
    """The hand-off of this sequence is committed: its slot and pages belong to somebody else."""

    key: SequenceKey


@dataclass(frozen=True, slots=True)
class FailAllSequences:
    """End every sequence whose hand-off is not under way."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class GivePages:
    """Pages and slots for the pool."""

    bundle: PageBundle


@dataclass(frozen=True, slots=True)
class SetPolicy:
    """Make batches by this policy, from the next step on. It is the engine's own from here on."""

    policy: Policy


@dataclass(frozen=True, slots=True)
class SetCost:
    """This is what steps have cost of late."""

    cost: StepCost


Command = (
    AddSequence | CancelSequence | FailSequence | ForgetSequence | FailAllSequences | GivePages | SetPolicy | SetCost
)


@dataclass(frozen=True, slots=True)
class ChunkComputed:
    """A part of a prompt is in its pages: `num_tokens` from position `start` on."""

    key: SequenceKey
    start: int
    num_tokens: int
    page_ids: tuple[int, ...] = ()
    """Of all positions up to there."""


class TokenSampled(NamedTuple):
    """Output token number `index` (from 0), published in the sequence's record already."""

    key: SequenceKey
    index: int  # type: ignore[assignment]  # hides a method of tuples that nobody calls here
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class PromptScored:
    """How likely the prompt's tokens from number `first_index` on are; 0 has no place, so it begins with 1."""

    key: SequenceKey
    first_index: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class HandOffReady:
    """The prompt is computed and its first token drawn. The engine leaves slot and pages alone until it is told
    Forget (committed) or Fail (refused)."""

    key: SequenceKey
    slot: int
    page_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TakenOver:
    """A handed-off sequence joined this worker with these pages."""

    key: SequenceKey
    page_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SequenceEnded:
    """The last event of a sequence that ended here; its pages are in the pool again (those of a row that a static
    batch holds, once that batch has ended). Exactly one field is set."""

    key: SequenceKey
    reason: FinishReason | None = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class SequenceForgotten:
    """The last event of a sequence that was handed off."""

    key: SequenceKey


Event = ChunkComputed | PromptScored | TokenSampled | HandOffReady | TakenOver | SequenceEnded | SequenceForgotten


@dataclass(frozen=True, slots=True)
class PagesWanted:
    """What the pool would like, and the least that lets a sequence go on."""

    num_pages: int
    num_slots: int
    least_pages: int
    least_slots: int


@dataclass(frozen=True, slots=True)
class StepTiming:
    """One step on the wall clock (Unix nanoseconds, for spans), and how much it held."""

    step: int
    started_ns: int
    ended_ns: int
    num_sequences: int
    num_tokens: int
    load: StepLoad = NO_LOAD
    duration_s: float = 0.0
    """From its decision to its record: what the next step had to wait for."""


@dataclass(frozen=True, slots=True)
class EngineReport:
    """All that one turn of the engine has to tell."""

    events: tuple[Event, ...] = ()
    timing: StepTiming | None = None
    """None: no step ran in this turn."""
    wanted: PagesWanted | None = None
    num_gives: int = 0
    """Give commands taken so far: whoever gives pages knows by it whether `wanted` counts the last lot already."""
    surplus: PageBundle = PageBundle()
    """No longer the engine's; to be returned to the arena."""
    load: EngineLoad = field(default_factory=EngineLoad)
    counters: Mapping[str, int] = field(default_factory=dict)
    policy: str = ""
    """The name of the policy by which batches are made; empty: none was set."""
    integrity_errors: tuple[str, ...] = ()
    """Of the last check."""
    fatal: str = ""
    """Not empty: the engine has stopped for this reason."""
