"""The typed messages of the control bus. `bus.codec` turns them into MessagePack and back, strictly.

Unknown fields are ignored, so that an older process understands a newer one; a missing or mistyped field is an error.
Every command is idempotent on (request_id, attempt): whoever gets no answer sends it again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from weir.bus.queue_report import QuotaLevel
from weir.core.cost import StepCost
from weir.core.life import NO_PREFERENCE, SchedulingParams

SCHEDULER_HASH_BYTES = 8
"""The scheduler knows pages by the first bytes of their hashes: a false match costs time, never a wrong token."""
MAX_HASHES = 100_000
"""In one KV event or snapshot: 800 kB, which the bus takes."""

LEADER_KEY = "leader"
"""Under which the leader's bucket has its LeaderRecord."""


class Outcome(Enum):
    """How a request ended, as its gateway saw it."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


class RefusalReason(Enum):
    """Why a request was not admitted, or was given up. The gateway maps each to an error of `core.errors`."""

    UNKNOWN_LANE = "unknown_lane"
    TOO_LARGE = "too_large"
    QUEUE_FULL = "queue_full"
    LANE_FORBIDDEN = "lane_forbidden"
    """Its tenant may not use that lane."""
    QUOTA = "quota"
    """Its tenant's rate or bound; says when it has room again."""
    SHED = "shed"
    """More waits than can be served, and others are more urgent."""
    DEADLINE = "deadline"
    """It cannot be met."""
    NO_WORKER = "no_worker"
    WAITED_TOO_LONG = "waited_too_long"
    CANCELLED = "cancelled"
    """Its own gateway gave it up before; the answer to a message that comes late or twice."""


@dataclass(frozen=True, slots=True)
class Submit:
    """A request that wants to be queued: lengths only, no tokens."""

    request_id: str
    gateway_id: str
    model: str
    lane: str
    """Empty: the default lane."""
    tenant: str
    num_prompt_tokens: int
    max_tokens: int
    deadline_ms: int
    """Time the client still waits, from now; 0: no deadline."""
    ttft_target_ms: int = 0
    """When the first token is due, from now; 0: the lane's target."""
    itl_target_ms: int = 0
    """Between two tokens; 0: the lane's target."""
    expected_output_tokens: int = 0
    """By the client; 0: none."""
    predicted_output_tokens: float = 0.0
    """By the gateway's predictor; 0.0: none."""
    output_score: float | None = None
    """Of a ranking predictor: higher is shorter."""
    page_hashes: bytes = b""
    """SCHEDULER_HASH_BYTES of each full page of the prompt, chained; empty in lists of held requests."""
    dispatch: int = 1
    """Rises with every time its gateway asks: it alone numbers them, and a newer one ends all that were before."""
    takes_partial: bool = False
    """At its deadline the client takes what there is: it is not refused because the whole would take longer."""
    lost_worker_id: str = ""
    """The worker that the dispatch before was lost with: nothing new goes there until it is heard again."""
    keep_ms: int = 0
    """How long workers keep its sequence after its gateway has gone, for another gateway to claim it; 0: not at all."""


@dataclass(frozen=True, slots=True)
class SubmitReply:
    """Queued, or refused with a reason, a sentence, and when to try again (0: never)."""

    epoch: int
    queued: bool
    reason: RefusalReason | None = None
    message: str = ""
    retry_after_ms: int = 0
    bound: str = ""
    """Of a tenant, that is reached: by its key in the limits file."""
    quota: QuotaLevel | None = None
    """Of a refused request's tenant, where it has one. Of what is queued the Grant has it."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request runs and what is reserved there."""

    dispatch: int
    """The Submit's. A gateway takes one placement of each dispatch, whoever else grants another."""
    prefill_worker_id: str
    prefill_address: str
    decode_worker_id: str
    decode_address: str
    num_reserved_pages: int
    scheduling: SchedulingParams = NO_PREFERENCE
    reason: str = ""
    """Why there: for the trace."""
    prefix_source: str = ""
    """HOST:PORT of the `Pages` of another host's arena that has more of the prompt's prefix; empty: none."""
    prefix_worker_id: str = ""
    """The prefill worker of that host that is to compute the full pages of the prompt; empty: they are there already,
    or another prompt's."""
    prefix_worker_address: str = ""

    @property
    def reading_worker_id(self) -> str:
        """The worker that computes most of the prompt."""
        return self.prefix_worker_id or self.prefill_worker_id

    @property
    def is_local(self) -> bool:
        """One worker both prefills and decodes."""
        return self.prefill_worker_id == self.decode_worker_id

    def names(self, worker_id: str) -> bool:
        return worker_id in (self.prefill_worker_id, self.decode_worker_id)

    def is_prefill_alone(self, worker_id: str) -> bool:
        """Whether the worker's part ends with the hand-off."""
        return worker_id == self.prefill_worker_id and not self.is_local


@dataclass(frozen=True, slots=True)
class Grant:
    """A request may start. `traceparent` in the headers is the queue span's."""

    epoch: int
    request_id: str
    placement: Placement
    quota: QuotaLevel | None = None
    """What is left of its tenant's, where it has any."""


@dataclass(frozen=True, slots=True)
class GrantReply:
    """False: the gateway does not hold the request any more, or under another placement or a newer dispatch; the
    scheduler frees the reservation, and the list of held requests says what there is."""

    accepted: bool


@dataclass(frozen=True, slots=True)
class Revoke:
    """The scheduler gives a request up that waits. One that was granted is ended by its gateway alone."""

    epoch: int
    request_id: str
    dispatch: int
    reason: RefusalReason
    message: str
    retry_after_ms: int = 0


@dataclass(frozen=True, slots=True)
class Cancel:
    """The client does not want the request any more. Leaves a tombstone, so that a late Submit is refused."""

    request_id: str
    gateway_id: str


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The first token of a granted request is there: its prefill worker has room for another.

    A hint. The scheduler gives a worker prompts only as deep as one or two steps, so that order stays its own; where
    this message is lost, `HeldRequest.is_prefilled` and the worker's own load say the same about a second later.
    """

    request_id: str
    gateway_id: str
    dispatch: int


@dataclass(frozen=True, slots=True)
class Finish:
    """A granted request ended; its reservation is free."""

    request_id: str
    gateway_id: str
    dispatch: int
    outcome: Outcome
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Ack:
    """Understood and done, now or before."""

    epoch: int


@dataclass(frozen=True, slots=True)
class HeldRequest:
    """One request that a gateway holds: what a scheduler needs to take it over."""

    submit: Submit
    placement: Placement | None
    """None: still queued."""
    is_prefilled: bool = False
    num_output_tokens: int = 0
    """That the gateway has by now."""
    is_migrating: bool = False
    """It is about to go on elsewhere, as a Migrate said."""


@dataclass(frozen=True, slots=True)
class Held:
    """Everything that a gateway holds, sent every second; also the sign that it lives.

    `sequence` rises with each list of a gateway, so that a late one is known and dropped. A list too long for one
    message goes out in `num_parts` messages of the same sequence; what it lacks is judged when all have come.
    """

    gateway_id: str
    sequence: int
    requests: tuple[HeldRequest, ...]
    part: int = 0
    num_parts: int = 1


def split_held(
    gateway_id: str, sequence: int, requests: Sequence[HeldRequest], *, max_requests: int = 500
) -> tuple[Held, ...]:
    """The messages of one list: at least one, each short enough for the bus."""
    starts = range(0, max(len(requests), 1), max_requests)
    return tuple(
        Held(gateway_id, sequence, tuple(requests[start : start + max_requests]), part, len(starts))
        for part, start in enumerate(starts)
    )


@dataclass(frozen=True, slots=True)
class HeldReply:
    """Requests that the scheduler took over because of this message, and those that it refuses."""

    epoch: int
    num_adopted: int
    refused_request_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LeaderChanged:
    """Gateways report at once what they hold, so that the new leader can place soon. Lost, it costs a second."""

    epoch: int


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker's entry in the registry, put anew every second: its parameters and its load."""

    worker_id: str
    role: str
    """prefill or decode."""
    model: str
    address: str
    """host:port of its Worker service."""
    host_id: str
    """Whoever shares this id shares an arena."""
    max_context_tokens: int
    page_tokens: int
    num_arena_pages: int
    """Pages of the host's arena that requests may reserve, counted once a host."""
    max_num_seqs: int
    num_running: int
    num_waiting: int
    is_draining: bool = False
    group: str = ""
    """The lanes that name this group have the worker to themselves; empty: any lane's."""
    serves_locally: bool = False
    """Whether it can prefill too, and serve a request alone."""
    max_num_batched_tokens: int = 0
    """Of a step; 0: not known."""
    num_own_pages: int = 0
    """Of a memory that no other worker shares; 0: it uses its host's arena."""
    cost: StepCost | None = None
    """Fitted to its own steps; None: too few yet."""
    most_num_seqs: int = 0
    """With which it was started, and over which no `max_num_seqs` goes; 0: not known."""
    most_num_batched_tokens: int = 0
    num_live: int = 0
    """Sequences that it has or is to get by hand-off."""
    is_drained: bool = False
    """It is draining, and has nothing left."""
    arena_address: str = ""
    """Of its transfer service, for who is on the same host; empty: not known."""
    pages_address: str = ""
    """HOST:PORT at which its transfer service offers pages to other hosts; empty: nowhere."""
    page_bytes: int = 0
    """Of its model, keys and values of `page_tokens`; 0: not known."""
    is_spare: bool = False
    """Drained to be there when more workers are wanted."""


@dataclass(frozen=True, slots=True)
class SetDrain:
    """Scheduler has a worker take nothing new, or take work again. A repeated one sets the grace period anew."""

    epoch: int
    is_draining: bool
    grace_ms: int = 0
    """What runs may go on for so long; what has not ended then is interrupted."""
    is_spare: bool = False
    """While it drains and is drained, it is a spare: the planner may have it take work again."""


@dataclass(frozen=True, slots=True)
class SetRole:
    """Scheduler has a worker drain and go on in a role. A repeated one changes nothing."""

    epoch: int
    role: str
    grace_ms: int


@dataclass(frozen=True, slots=True)
class WorkerAnswer:
    """A worker has begun to do what it was told."""

    worker_id: str
    """Under which it is found from then on."""
    refusal: str = ""
    """Why it does not. Empty: it does."""


@dataclass(frozen=True, slots=True)
class LeaderRecord:
    """Who schedules. Written anew every second; a record that stays as it is for a few seconds is that of a dead one.

    It has no time to live in the bucket, so that the next epoch is always known.
    """

    scheduler_id: str
    epoch: int
    is_released: bool = False
    """The leader left in order: the next one need not wait."""
    address: str = ""
    """HOST:PORT of its gRPC server; empty: not known."""
