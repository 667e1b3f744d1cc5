"""The three seams of a policy, and what each may know. All of it plain data; time is the caller's.

Order       scheduler: which request of one tenant (in one lane, of one model) is next
Gate        batcher, once a step: who of those that wait may join, who of the batch sits this step out
StepBudget  batcher, once a step: which decodes run, and how many prompt tokens beside them
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from weir.core.cost import StepCost


class Waiting(NamedTuple):
    """What an Order may know of a request. Never the true output length: a policy that wants it gets a prediction."""

    request_id: str
    arrived_at_s: float
    num_prompt_tokens: int
    num_uncached_tokens: int
    """As it was known when the request was queued; at least 1."""
    max_tokens: int
    ttft_deadline_s: float
    """When its first token is due; infinite: no target."""
    predicted_output_tokens: float | None = None
    output_score: float | None = None
    """Of a ranking predictor: higher is shorter. Comparable between requests of one predictor only."""


class OrderQueue(Protocol):
    """The waiting requests of one tenant in a policy's order. Ties go by arrival time, then by id: what a queue does
    never depends on the order in which requests of the same instant were added."""

    def __len__(self) -> int: ...

    def ids(self) -> list[str]:
        """In no order."""
        ...

    def add(self, request: Waiting) -> None:
        """Raises ValueError if it is in the queue."""
        ...

    def discard(self, request_id: str) -> None:
        """Unknown ones are ignored."""
        ...

    def try_peek(self, now_s: float) -> str | None:
        """Who is next. Asked again without a change, at the same time, it says the same. Times never go back."""
        ...

    def take(self, request_id: str, now_s: float) -> None:
        """The request that `try_peek` named starts now: out of the queue, and the policy learns that it was served."""
        ...


class Order(Protocol):
    """Makes queues, one a tenant; what tenants share (running means, say) is the order's own."""

    def new_queue(self) -> OrderQueue: ...

    def rank(self, request: Waiting) -> float:
        """Lower goes first where requests of several queues meet: at a worker whose policy is preemptive."""
        ...

    def finished(self, request: Waiting, num_output_tokens: int, now_s: float) -> None:
        """A request of any of its queues has ended with this many tokens; policies that learn, learn from it."""
        ...


class Member(NamedTuple):
    """A sequence as a Gate sees it."""

    request_id: str
    num_prompt_tokens: int
    num_emitted_tokens: int
    waits_since_s: float
    """When it came, or was last served."""
    predicted_output_tokens: float | None = None
    lane_priority: int = 0
    """Higher is more urgent. Nobody rests for the sake of a lower lane."""
    num_missing_tokens: int = 0
    """Of one that waits: room in pages that it takes to join."""
    max_output_tokens: int = 0
    """By its own bound; 0: not told."""


@dataclass(frozen=True, slots=True)
class BatchView:
    """`waiting` in the order in which they would join, `running` in the order of the batch, those that rest included.

    Nobody may be in both.
    """

    waiting: Sequence[Member]
    running: Sequence[Member]
    num_places: int
    """Sequences that may be computed in a step: those of the batch that do not rest, and those that join."""
    num_pool_tokens: int
    """What all pages of the worker hold."""
    num_free_tokens: int
    """Room in free pages."""


@dataclass(frozen=True, slots=True)
class GateDecision:
    """`joining`: indices into `waiting`, in the order in which they join, as far as there are pages; `paused`: indices
    into `running`, not computed in this step (their pages stay)."""

    joining: Sequence[int]
    paused: Collection[int] = ()


class Gate(Protocol):
    """Computes nothing for its maximum wait at the longest while something waits or rests."""

    def decide(self, view: BatchView, now_s: float) -> GateDecision: ...

    @property
    def next_deadline_s(self) -> float | None:
        """When to ask again although nothing has happened; None: only when something has."""
        ...


class Decode(NamedTuple):
    """A sequence of the batch that draws one token a step."""

    num_context_tokens: int
    last_token_at_s: float
    itl_target_s: float
    """0: none, the policy's default."""
    arrived_at_s: float = 0.0
    num_emitted_tokens: int = 0


class Prefill(NamedTuple):
    """A sequence of the batch with more than one token to compute."""

    num_left_tokens: int
    num_before_tokens: int
    arrived_at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepView:
    """`decodes` and `prefills` in the order of the batch."""

    now_s: float
    max_tokens: int
    decodes: Sequence[Decode]
    prefills: Sequence[Prefill]
    page_use: float
    """Share of the pages that sequences use, in [0, 1]."""
    num_free_tokens: int
    """Room in free pages."""
    cost: StepCost | None = None
    """What steps of this worker have cost of late; None: it is not known yet."""


@dataclass(frozen=True, slots=True)
class StepShare:
    """`decodes`: indices of those that run. `num_prefill_tokens`: for all prefills together, in their order.

    Work-conserving: if anything can be computed, something is.
    """

    decodes: Sequence[int]
    num_prefill_tokens: int


class StepBudget(Protocol):
    """Fills a step of at most `max_tokens`."""

    def plan(self, view: StepView) -> StepShare: ...

    def stepped(self, duration_s: float, share: StepShare) -> None:
        """The planned step ran, and took this long."""
        ...


@dataclass(frozen=True, slots=True)
class Policy:
    """A name for one of each; made anew for each user, since they hold state."""

    name: str
    order: Order
    gate: Gate | None
    """None: open, whoever has a place joins."""
    step_budget: StepBudget | None
    """None: decodes first, then prompts in order, up to the budget."""
    is_preemptive: bool = False
    """Whether a request of better rank may take a running one's place in the batch (within a lane). Its gate says who
    rests; the scheduler grants over a worker's places to a request that outranks somebody there."""
