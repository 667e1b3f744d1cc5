"""The three seams of a policy, and what each may know. All of it plain data; time is the caller's.

Order       scheduler: which request of one tenant (in one lane, for one model) is next
Gate        batcher, once a step: who of those that wait may join, who of the batch is paused
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
    """As known when the request was queued, or when an order that reads it came; at least 1."""
    max_tokens: int
    ttft_deadline_s: float
    """When its first token is due; infinite: no target."""
    predicted_output_tokens: float | None = None
    output_score: float | None = None
    """From a ranking predictor: higher is shorter. Comparable between requests of one predictor only."""


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
        """Who is next. Asked again without a change, at the same time, the answer is the same. Times never go back."""
        ...

    def take(self, request_id: str, now_s: float) -> None:
        """The request that `try_peek` named starts now: it leaves the queue, and the policy may learn from it."""
        ...


class Order(Protocol):
    """Makes a queue for each tenant; what tenants share (running means, say) is the order's own."""

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
    num_output_tokens: int
    """So far."""
    waits_since_s: float
    """When it came, or a step with it ended last."""
    predicted_output_tokens: float | None = None
    lane_priority: int = 0
    """Higher is more urgent. Nobody is paused for the sake of a lower lane."""
    num_missing_tokens: int = 0
    """Room in pages that a waiting sequence takes to join."""
    max_output_tokens: int = 0
    """By its own stop rules; 0: unknown."""


@dataclass(frozen=True, slots=True)
class BatchView:
    """`waiting` in the order in which they would join, `running` in the order of the batch, the paused included.

    Nobody may be in both.
    """

    waiting: Sequence[Member]
    running: Sequence[Member]
    max_running: int
    """Sequences that may be computed in a step: those of the batch that are not paused, and those that join."""
    num_pool_tokens: int
    """Room in all pages of the worker."""
    num_free_tokens: int
    """Room in its free pages."""


@dataclass(frozen=True, slots=True)
class GateDecision:
    """`joining`: indices into `waiting`, in the order in which they join, as far as there are pages; `paused`: indices
    into `running`, not computed in this step (their pages stay)."""

    joining: Sequence[int]
    paused: Collection[int] = ()


class Gate(Protocol):
    """While something waits or is paused, it may leave a step empty for its maximum wait at the longest."""

    def decide(self, view: BatchView, now_s: float) -> GateDecision: ...

    @property
    def next_deadline_s(self) -> float | None:
        """When to ask again although nothing has happened; None: only when something has."""
        ...


class Decode(NamedTuple):
    """A sequence of the batch whose next token is sampled in each step."""

    num_context_tokens: int
    last_token_at_s: float
    itl_target_s: float
    """0: none, the policy's default."""


@dataclass(frozen=True, slots=True)
class StepView:
    """`decodes` and `prefills` in the order of the batch. A prefill is a sequence with more than one token to compute:
    how many it has left is all that a budget needs."""

    now_s: float
    max_tokens: int
    decodes: Sequence[Decode]
    prefills: Sequence[int]
    page_use: float
    """Share of the pages that sequences use, in [0, 1]."""
    num_free_tokens: int
    """Room in free pages."""
    cost: StepCost | None = None
    """What steps of this worker have cost of late; None: unknown yet."""


@dataclass(frozen=True, slots=True)
class StepShare:
    """`decodes`: indices of those that run. `num_prefill_tokens`: for all prefills together, in their order.

    If anything can be computed, something must be.
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
    """One of each seam under a name; made anew for each user, since they hold state."""

    name: str
    order: Order
    gate: Gate | None
    """None: whoever waits joins while there is room."""
    step_budget: StepBudget | None
    """None: decodes first, then prompts in order, up to the budget."""
    is_preemptive: bool = False
    """Whether a running request may be paused for one of better rank (within a lane). Its gate decides who; the
    scheduler grants beyond a worker's slots to a request that outranks one that runs there."""
    reads_cache: bool = True
    """Whether its order reads `num_uncached_tokens`. If not, that is the whole prompt of requests that are queued under
    it: what of them is cached is looked up when they are placed, or when a policy that reads it takes over."""
