"""How a worker makes batches by a setting of its own, where no policy decides. Continuous batching needs no rule here.

When sequences join (gates that other ways of serving are measured with):

    continuous   whenever there is room: every step, what has ended is gone and what waits joins; no gate at all
    static       when the batch has ended, up to a full one of what waits then; nobody joins until all of it has ended
    static-hold  the same, and rows that have ended are computed on to the end of the batch, as a padded batch does
    dynamic      as static, but a batch starts only when it is full, or a window after the first sequence began to wait

A dynamic batch runs to its end like a static one, because that is what a server does that collects requests in front of
a model which answers whole batches; letting the window's sequences join a running batch would be continuous batching
with a delay.

Prefill batches: where prompts are long and answers very short, prefill a batch of prompts, then decode it whole.

    mixed     what a worker does otherwise: each step has the decodes and a part of some prompt beside them
    prefill   prompts join and are computed, nobody decodes, until none is left or the batch is large enough
    decode    the batch decodes to its end together, nobody joins

A worker goes from `mixed` to prefill batches when, over a window, more than `enter_share` of the tokens computed were
prompts' and answers had fewer than `max_mean_output` tokens in the mean; back when the share is below `leave_share`.
(LightLLM merges prefills only every few decode steps for the same reason; the switch with hysteresis is Weir's.)
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from weir.core.sampling import SamplingParams
from weir.engine.memory.pages import PagePool
from weir.engine.messages import PageBundle
from weir.engine.plan import ChunkPlan, SampleSpec
from weir.engine.sequence import Sequence
from weir.kv.geometry import num_pages_for
from weir.policy.seams import BatchView, Gate, GateDecision, StepShare, StepView

_GREEDY = SamplingParams(temperature=0.0)
_NOBODY = GateDecision(())


class Batching(Enum):
    """The rules, as the drawing above names them."""

    CONTINUOUS = "continuous"
    STATIC = "static"
    STATIC_HOLD = "static-hold"
    DYNAMIC = "dynamic"


@dataclass(frozen=True, slots=True)
class JoinSettings:
    """`window_s` is for dynamic batching alone."""

    batching: Batching = Batching.CONTINUOUS
    window_s: float = 0.05

    @property
    def holds_rows(self) -> bool:
        return self.batching is Batching.STATIC_HOLD


def make_gate(settings: JoinSettings) -> Gate | None:
    """None: whoever waits joins while there is room."""
    match settings.batching:
        case Batching.CONTINUOUS:
            return None
        case Batching.STATIC | Batching.STATIC_HOLD:
            return StaticGate()
        case Batching.DYNAMIC:
            return DynamicGate(settings.window_s)


class StaticGate:
    """Lets nobody join before the batch has ended."""

    def decide(self, view: BatchView, now_s: float) -> GateDecision:
        del now_s
        return _NOBODY if view.running else _first(view)

    @property
    def next_deadline_s(self) -> float | None:
        return None


class DynamicGate:
    """Lets nobody join before the batch has ended, and the next one is full or its window over.

    The window begins when the first of those that wait is seen, so it runs while a batch does.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._first_waits_since_s: float | None = None
        self._next_deadline_s: float | None = None

    def decide(self, view: BatchView, now_s: float) -> GateDecision:
        self._next_deadline_s = None
        num_waiting = len(view.waiting)
        if num_waiting == 0:
            self._first_waits_since_s = None
            return _NOBODY
        if self._first_waits_since_s is None:
            self._first_waits_since_s = now_s
        if view.running:
            return _NOBODY
        ends_at_s = self._first_waits_since_s + self._window_s
        if num_waiting < view.max_running and now_s < ends_at_s:
            self._next_deadline_s = ends_at_s
            return _NOBODY
        if num_waiting > view.max_running:
            self._first_waits_since_s = now_s  # of those that are left over
        else:
            self._first_waits_since_s = None
        return _first(view)

    @property
    def next_deadline_s(self) -> float | None:
        return self._next_deadline_s


def _first(view: BatchView) -> GateDecision:
    return GateDecision(range(min(view.max_running, len(view.waiting))))


class HeldRows:
    """Rows of a static batch whose sequences have ended, computed on until the batch has ended: each its last token
    again and again, at its last length, which is as cheap as a held row can be."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._rows: list[tuple[ChunkPlan, tuple[int, ...]]] = []  # chunk, all pages that it holds

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, sequence: Sequence) -> None:
        """Takes slot and pages of a sequence that has ended after at least one computed token."""
        assert sequence.slot is not None, "only a sequence with a slot was computed"
        end = sequence.num_computed
        chunk = ChunkPlan(
            slot=sequence.slot,
            start=end - 1,
            token_ids=(sequence.token_ids[end - 1],),
            block_table=sequence.block_table[: num_pages_for(end)],
            sample=SampleSpec(_GREEDY, output_index=0),
        )
        self._rows.append((chunk, sequence.held_pages))

    def chunks(self) -> Iterator[ChunkPlan]:
        """One token each; what is sampled for them is dropped."""
        return (chunk for chunk, _ in self._rows)

    def release(self) -> bool:
        """Frees everything. False: there was nothing."""
        rows, self._rows = self._rows, []
        for chunk, page_ids in rows:
            self._pool.put_back(chunk.slot, page_ids)
        return bool(rows)

    @property
    def bundle(self) -> PageBundle:
        """All pages and slots of the rows."""
        return PageBundle(
            tuple(page_id for _, page_ids in self._rows for page_id in page_ids),
            tuple(chunk.slot for chunk, _ in self._rows),
        )


@dataclass(frozen=True, slots=True)
class PrefillBatchSettings:
    """`max_batch_tokens`: prompt tokens that are computed before their answers are decoded."""

    window_s: float = 10.0
    enter_share: float = 0.9
    leave_share: float = 0.8
    max_mean_output: float = 30.0
    max_batch_tokens: int = 8192

    def __post_init__(self) -> None:
        if not 0 <= self.leave_share <= self.enter_share <= 1:
            raise ValueError(
                f"leave_share {self.leave_share}, enter_share {self.enter_share}: must be in order, in [0, 1]"
            )
        if self.window_s <= 0 or self.max_batch_tokens < 1:
            raise ValueError(f"window_s {self.window_s}, max_batch_tokens {self.max_batch_tokens}: must be above 0")


class PrefillPhase(Enum):
    """What the steps of a worker hold at the moment."""

    MIXED = "mixed"
    PREFILL = "prefill"
    DECODE = "decode"


class _StepTokens(NamedTuple):
    at_s: float
    num_prefill: int
    num_decode: int


class PrefillBatches:
    """A gate and a step budget in one. In the mixed phase it decides as a worker without a policy does."""

    def __init__(self, settings: PrefillBatchSettings) -> None:
        self._settings = settings
        self.phase = PrefillPhase.MIXED
        self._steps: deque[_StepTokens] = deque()
        self._num_prefill = 0
        self._num_decode = 0
        self._outputs: deque[tuple[float, int]] = deque()
        self._sum_outputs = 0
        self._num_batch_tokens = 0
        self._now_s = 0.0

    def ended(self, num_output_tokens: int) -> None:
        """A sequence has ended by itself with so many tokens. Only while this is the gate: `decide` forgets them."""
        self._outputs.append((self._now_s, num_output_tokens))
        self._sum_outputs += num_output_tokens

    def decide(self, view: BatchView, now_s: float) -> GateDecision:
        self._forget(now_s)
        self._switch()
        if self.phase is PrefillPhase.DECODE and view.running:
            return GateDecision(())
        if self.phase is PrefillPhase.DECODE:
            self.phase, self._num_batch_tokens = PrefillPhase.PREFILL, 0
        num_free = max(0, view.max_running - len(view.running))
        num_joining = min(num_free, len(view.waiting))
        if self.phase is PrefillPhase.PREFILL and self._num_batch_tokens >= self._settings.max_batch_tokens:
            num_joining = 0
        return GateDecision(range(num_joining))

    @property
    def next_deadline_s(self) -> float | None:
        return None

    def plan(self, view: StepView) -> StepShare:
        if self.phase is PrefillPhase.PREFILL and not view.prefills:
            self.phase = PrefillPhase.DECODE
        decodes = range(0 if self.phase is PrefillPhase.PREFILL else min(len(view.decodes), view.max_tokens))
        share = StepShare(decodes, min(sum(view.prefills), view.max_tokens - len(decodes)))
        self._note(view.now_s, share)
        return share

    def stepped(self, duration_s: float, share: StepShare) -> None:
        """Tokens are counted when they are planned."""

    def _note(self, now_s: float, share: StepShare) -> None:
        self._steps.append(_StepTokens(now_s, share.num_prefill_tokens, len(share.decodes)))
        self._num_prefill += share.num_prefill_tokens
        self._num_decode += len(share.decodes)
        self._num_batch_tokens += share.num_prefill_tokens

    def _switch(self) -> None:
        num_tokens = self._num_prefill + self._num_decode
        if num_tokens == 0:
            return
        share, settings = self._num_prefill / num_tokens, self._settings
        if self.phase is not PrefillPhase.MIXED:
            if share < settings.leave_share:
                self.phase = PrefillPhase.MIXED
        elif share > settings.enter_share and self._sum_outputs < settings.max_mean_output * len(self._outputs):
            self.phase, self._num_batch_tokens = PrefillPhase.PREFILL, 0

    def _forget(self, now_s: float) -> None:
        """What is older than the window: one entry a step and one an answer, so the window bounds their number."""
        self._now_s = now_s
        oldest_s = now_s - self._settings.window_s
        while self._steps and self._steps[0].at_s < oldest_s:
            step = self._steps.popleft()
            self._num_prefill -= step.num_prefill
            self._num_decode -= step.num_decode
        while self._outputs and self._outputs[0][0] < oldest_s:
            self._sum_outputs -= self._outputs.popleft()[1]
