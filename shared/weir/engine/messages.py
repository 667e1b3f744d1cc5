"""What goes into an engine (commands) and what comes out of it (reports of events). All frozen: they cross threads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from weir.core.cost import StepCost
from weir.core.life import Attempt, FinishReason
from weir.core.sampling import TokenLogprobs
from weir.engine.plan import NO_LOAD, StepLoad
from weir.engine.waits import NO_WAITS, SequenceWaits
from weir.grammar.masks import GrammarState
from weir.kv.records.record import SequenceParams, SequenceSnapshot
from weir.policy.seams import Policy


class SequenceKey(NamedTuple):
    """One attempt at one request."""

    request_id: str
    attempt: Attempt

    @classmethod
    def of(cls, params: SequenceParams) -> "SequenceKey":
        return cls(params.request_id, params.attempt)


class FailureReason(Enum):
    """Why a worker gave a sequence up. The first two come from its shell, never from the engine."""

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
    """Pages that one sequence used, in the order of its positions, from its page number `first_page` on. All its pages,
    from 0 on, hold `token_ids`. They may serve others as a prefix under `prefix_seed`; empty: they may not."""

    page_ids: tuple[int, ...]
    token_ids: tuple[int, ...] = ()
    prefix_seed: bytes = b""
    first_page: int = 0


@dataclass(frozen=True, slots=True)
class PageBundle:
    """Pages and slots that change hands together. What `page_ids` hold is of no use to anybody."""

    page_ids: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    used: tuple[UsedPages, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.page_ids or self.slots or self.used)

    @property
    def all_page_ids(self) -> tuple[int, ...]:
        """Also those that sequences used; a page that two of them shared is there twice."""
        return (*self.page_ids, *(page_id for used in self.used for page_id in used.page_ids))


class SequenceLog(Protocol):
    """A sequence's record in the arena, as the engine changes it. Changes count once they are published."""

    def begin(self, params: SequenceParams, output_token_ids: Sequence[int] = ()) -> None: ...

    def set_block_table(self, page_ids: Sequence[int], first_page: int = 0) -> None: ...

    def append_page(self, page_id: int) -> None: ...

    def append_token(self, token_id: int) -> None: ...

    def keep_logprobs(self, output_index: int, logprobs: TokenLogprobs) -> None: ...

    def publish(self, num_computed_tokens: int) -> None: ...

    def drop_pages(self, num_kept: int) -> None: ...

    def drop_first_pages(self, first_page: int) -> None: ...

    def end(self, reason: FinishReason) -> None: ...

    def clear(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Arrival:
    """A sequence that comes to a worker: a prompt, perhaps with output that an earlier dispatch has sampled, or a
    handed-off sequence with its slot, its record and its pages. Once it is posted, the engine's thread alone uses the
    record."""

    params: SequenceParams
    slot: int | None = None
    log: SequenceLog | None = None
    output_token_ids: tuple[int, ...] = ()
    output_logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry for each output token, where the request asks for them."""
    block_table: tuple[int, ...] = ()
    """A prompt has the pages of its cached prefix, which others use too."""
    num_computed_tokens: int = 0
    num_shared_pages: int = 0
    """The first pages of the block table, which others may use too: giving them back may free nothing."""
    first_page: int = 0
    """What is before it in the block table is not the sequence's any more."""
    finish_reason: FinishReason | None = None
    """It has ended already: its client is to be told, and nothing is to be computed."""
    grammar: GrammarState | None = None
    """Of a sequence whose parameters have a grammar, after its output; the engine's from then on."""
    prefix_source: str = ""
    """Where more of a prompt's prefix is, or is expected; not for the engine."""
    prefix_is_expected: bool = False

    @classmethod
    def of_record(cls, slot: int, log: SequenceLog, snapshot: SequenceSnapshot) -> "Arrival":
        """What the record in this slot holds, `log`, which goes on from `snapshot`."""
        return cls(
            params=snapshot.params,
            slot=slot,
            log=log,
            output_token_ids=snapshot.output_token_ids,
            output_logprobs=snapshot.output_logprobs,
            block_table=snapshot.block_table,
            num_computed_tokens=snapshot.num_computed_tokens,
            first_page=snapshot.first_page,
            finish_reason=snapshot.finish_reason,
        )


@dataclass(frozen=True, slots=True)
class AddSequence:
    """One that is in the engine already is ignored."""

    arrival: Arrival


@dataclass(frozen=True, slots=True)
class CancelSequence:
    """Ends a sequence as cancelled, and frees it. Unknown ones are ignored."""

    key: SequenceKey


@dataclass(frozen=True, slots=True)
class FailSequence:
    """Ends a sequence with an error, and frees it. Unknown ones are ignored."""

    key: SequenceKey
    failure: Failure


@dataclass(frozen=True, slots=True)
class ForgetSequence:
    """The hand-off of this sequence is committed: its slot and pages belong to another worker. `is_adoption`: to one
    that goes on with it in the place of this one."""

    key: SequenceKey
    is_adoption: bool = False


@dataclass(frozen=True, slots=True)
class HandOverSequences:
    """Every sequence that another worker can go on with from its record is to be handed over: each is a HandOffReady.
    `with_preempted`: also those without pages of their own, which are computed again there."""

    with_preempted: bool = False


@dataclass(frozen=True, slots=True)
class TakeBackSequence:
    """Nobody took this sequence over: it goes on here. Unknown ones are ignored."""

    key: SequenceKey


@dataclass(frozen=True, slots=True)
class ReleaseEnds:
    """The clients of these sequences know how they ended: nobody needs their records any more. Unknown ones are
    ignored."""

    keys: tuple[SequenceKey, ...]


@dataclass(frozen=True, slots=True)
class FailAllSequences:
    """Ends every sequence whose hand-off is not under way."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class GivePages:
    """Pages and slots from the arena, for the pool."""

    bundle: PageBundle


@dataclass(frozen=True, slots=True)
class SetArenaSilent:
    """Whether the arena leaves what the engine wants without any answer: then nobody's waiting for a page counts."""

    is_silent: bool


@dataclass(frozen=True, slots=True)
class SetPolicy:
    """Batches follow this policy from the next step on. The engine owns it once it is posted."""

    policy: Policy


@dataclass(frozen=True, slots=True)
class SetCost:
    """What steps have cost of late."""

    cost: StepCost


@dataclass(frozen=True, slots=True)
class SetBounds:
    """From the next step on. Both bounds are at most those that the engine was made with; what runs over them goes on.

    `step_shares`: guaranteed of the prompt tokens of a step, by lane priority from 0 on. Empty: none is.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    step_shares: tuple[float, ...] = ()


Command = (
    AddSequence
    | CancelSequence
    | FailSequence
    | ForgetSequence
    | HandOverSequences
    | TakeBackSequence
    | FailAllSequences
    | ReleaseEnds
    | GivePages
    | SetArenaSilent
    | SetPolicy
    | SetCost
    | SetBounds
)


@dataclass(frozen=True, slots=True)
class ChunkComputed:
    """A part of a prompt is in its pages: `num_tokens` from position `start` on. `page_ids`: of all positions up to the
    end of this part; the first ones may have been given back."""

    key: SequenceKey
    start: int
    num_tokens: int
    page_ids: tuple[int, ...] = ()


class TokenSampled(NamedTuple):
    """Output token number `index` (from 0), published in the sequence's record already."""

    key: SequenceKey
    index: int  # type: ignore[assignment]  # hides a method of tuples that nobody calls here
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class PromptScored:
    """How likely the prompt's tokens from number `first_index` on are. Token 0 follows nothing, so the first is 1."""

    key: SequenceKey
    first_index: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class HandOffReady:
    """Another worker can go on with it from its record: the prompt is computed and its first token sampled, or it runs
    and was to be handed over. The engine leaves slot and pages alone until ForgetSequence (the hand-off is committed),
    FailSequence or TakeBackSequence (it is refused) comes. `page_ids`: what it holds, from its page `first_page` on."""

    key: SequenceKey
    slot: int
    page_ids: tuple[int, ...]
    first_page: int = 0


@dataclass(frozen=True, slots=True)
class TakenOver:
    """A handed-off sequence came to this worker with these pages."""

    key: SequenceKey
    page_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SequenceEnded:
    """The last event of a sequence that ended here; its pages are in the pool again (those of a row that a static
    batch holds, once that batch has ended). Either `reason` or `failure` is set."""

    key: SequenceKey
    reason: FinishReason | None = None
    failure: Failure | None = None
    is_kept: bool = False
    """Its slot and record stay until ReleaseEnds names it, or until their room is needed."""
    waits: SequenceWaits = NO_WAITS


@dataclass(frozen=True, slots=True)
class SequenceForgotten:
    """The last event of a sequence that was handed off; `is_adoption` as in ForgetSequence."""

    key: SequenceKey
    is_adoption: bool = False


Event = ChunkComputed | PromptScored | TokenSampled | HandOffReady | TakenOver | SequenceEnded | SequenceForgotten


@dataclass(frozen=True, slots=True)
class PagesWanted:
    """What the pool asks the arena for, and the least that lets a sequence go on."""

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
    mean_others: float = 0.0
    """Other workers of the machine that computed meanwhile."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Sequences in the batch (`num_running`) and before it, and what the pool holds. Each is a gauge of a worker."""

    num_running: int = 0
    num_waiting: int = 0
    num_held_pages: int = 0
    num_free_pages: int = 0
    num_used_pages: int = 0
    """In block tables, but for those that were given back."""
    num_filled_pages: int = 0
    """Those of the used ones that hold at least one computed token."""
    num_kept_ends: int = 0
    """Ended sequences whose records are kept until their clients know."""
    max_step_tokens: int = 0
    """Prompt tokens that a step gets at most at the moment, so that it lasts about as long as its target."""

    @property
    def page_waste(self) -> float:
        """Share of the used pages that hold no token yet, in [0, 1]."""
        return 1 - self.num_filled_pages / self.num_used_pages if self.num_used_pages else 0.0


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What has happened since the last report."""

    events: tuple[Event, ...] = ()
    timing: StepTiming | None = None
    """None: no step ran."""
    wanted: PagesWanted | None = None
    num_gives: int = 0
    """GivePages commands taken so far: by it whoever gives pages sees whether `wanted` counts the last bundle."""
    surplus: PageBundle = PageBundle()
    """No longer the engine's; to be returned to the arena."""
    load: EngineLoad = field(default_factory=EngineLoad)
    counters: Mapping[str, int] = field(default_factory=dict)
    integrity_errors: tuple[str, ...] = ()
    """What the last check found."""
    fatal: str = ""
    """Not empty: the engine has stopped for this reason."""
