"""The policy that batches follow: what its gate and its step budget are shown, and what is done of their answers.

Members are made when a gate looks at them: many gates only count. An answer that is not possible is not followed in
that step, and counted.
"""

import logging
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as Seq
from typing import overload

from weir.core.cost import StepCost
from weir.engine.counters import EngineCounters
from weir.engine.memory.pages import PagePool
from weir.engine.sequence import Sequence
from weir.kv.geometry import PAGE_TOKENS
from weir.policy.seams import BatchView, Decode, Gate, GateDecision, Member, StepBudget, StepShare, StepView

_log = logging.getLogger(__name__)


class Members(Seq[Member]):
    """Looks through to the sequences, so it does not outlive the step."""

    def __init__(self, sequences: list[Sequence]) -> None:
        self._sequences = sequences

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Member]:
        return map(_member_of, self._sequences)

    @overload
    def __getitem__(self, index: int) -> Member: ...

    @overload
    def __getitem__(self, index: slice) -> Seq[Member]: ...

    def __getitem__(self, index: int | slice) -> Member | Seq[Member]:
        if isinstance(index, slice):
            return Members(self._sequences[index])
        return _member_of(self._sequences[index])


class FollowedPolicy:
    """Of the running batch. Without a gate whoever is next joins, without a step budget decodes come first."""

    def __init__(self, pool: PagePool, num_arena_pages: int, max_running: int, counters: EngineCounters) -> None:
        """`num_arena_pages` 0: what the pool holds is all there is. Where others share the arena, what they use is
        taken for free."""
        self._pool = pool
        self._num_arena_pages = num_arena_pages
        self.max_running = max_running
        self._counters = counters
        self.gate: Gate | None = None
        self.step_budget: StepBudget | None = None
        self.cost: StepCost | None = None
        """What the worker has fitted to its steps; None: nothing yet."""
        self._num_owed_pages = 0
        self._share: StepShare | None = None
        self._warned: set[str] = set()

    def follow(self, gate: Gate | None, step_budget: StepBudget | None) -> None:
        """From the next step on."""
        self.gate, self.step_budget = gate, step_budget
        self._share = None
        self._warned.clear()

    def note_half_read(self, members: Iterable[Sequence]) -> None:
        """Call it before asking. A policy sees the pages of whole prompts as used once these have begun: those that
        such a prompt is still to take are nobody else's."""
        self._num_owed_pages = sum(
            s.num_missing_pages(s.num_uncomputed)
            for s in members
            if s.slot is not None and s.num_uncomputed > 1 and not s.is_preempted
        )

    def decide(self, waiting: list[Sequence], batch: list[Sequence], now_s: float) -> GateDecision:
        """Who joins and who is paused, as indices into the lists; as without a gate where that is not possible."""
        assert self.gate is not None, "asked while there is one"
        view = BatchView(
            waiting=Members(waiting),
            running=Members(batch),
            max_running=self.max_running,
            num_pool_tokens=self._num_pages * PAGE_TOKENS,
            num_free_tokens=self._num_free_tokens,
        )
        decision = self.gate.decide(view, now_s)
        problem = _index_problem("joining", decision.joining, len(waiting)) or _index_problem(
            "paused", decision.paused, len(batch)
        )
        if problem is None:
            return decision
        self._count_defect("gate", problem)
        return GateDecision(range(max(0, min(self.max_running - len(batch), len(waiting)))))

    def split(
        self, decodes: list[Sequence], prompts: list[Sequence], max_tokens: int, now_s: float
    ) -> tuple[list[Sequence], int]:
        """The decodes that run, in their order, and the prompt tokens beside them: decodes first where the budget's
        share is not possible, or would compute nothing where something could be computed."""
        assert self.step_budget is not None, "asked while there is one"
        self._share = None
        if not decodes and not prompts:
            return [], 0
        view = StepView(
            now_s=now_s,
            max_tokens=max_tokens,
            decodes=[
                Decode(s.num_computed + 1, s.served_at_s, s.params.scheduling.itl_target_ms / 1e3) for s in decodes
            ],
            prefills=[s.num_uncomputed for s in prompts],
            page_use=min(1.0, self._num_used_pages / self._num_pages) if self._num_pages else 0.0,
            num_free_tokens=self._num_free_tokens,
            cost=self.cost,
        )
        share = self.step_budget.plan(view)
        problem = _share_problem(share, view)
        if problem is not None:
            self._count_defect("step budget", problem)
            return decodes[:max_tokens], max(0, max_tokens - len(decodes))
        self._share = share
        return [decodes[index] for index in sorted(share.decodes)], share.num_prefill_tokens

    def drop_split(self) -> None:
        """The step is another than was split last: the budget learns nothing from it."""
        self._share = None

    def stepped(self, duration_s: float) -> None:
        """The step that was split last ran."""
        if self.step_budget is not None and self._share is not None:
            self.step_budget.stepped(duration_s, self._share)
            self._share = None

    @property
    def _num_pages(self) -> int:
        return self._num_arena_pages or self._pool.num_held_pages

    @property
    def _num_used_pages(self) -> int:
        return self._pool.num_held_pages - self._pool.num_free_pages + self._num_owed_pages

    @property
    def _num_free_tokens(self) -> int:
        return PAGE_TOKENS * max(0, self._num_pages - self._num_used_pages)

    def _count_defect(self, what: str, problem: str) -> None:
        self._counters.policy_defects += 1
        if what not in self._warned:
            self._warned.add(what)
            _log.error("the policy's %s is not followed in this step (logged once): %s", what, problem)


def _index_problem(name: str, indices: Collection[int], bound: int) -> str | None:
    if len(set(indices)) != len(indices) or not all(0 <= index < bound for index in indices):
        return f"{name} {list(indices)[:8]}: must be different indices below {bound}"
    return None


def _share_problem(share: StepShare, view: StepView) -> str | None:
    problem = _index_problem("decodes", share.decodes, len(view.decodes))
    if problem is not None:
        return problem
    num_decodes = len(share.decodes)
    if share.num_prefill_tokens < 0 or num_decodes + share.num_prefill_tokens > view.max_tokens:
        return f"{num_decodes} decodes and {share.num_prefill_tokens} prompt tokens: the step has {view.max_tokens}"
    if not num_decodes and (share.num_prefill_tokens == 0 or not view.prefills):
        return "nothing is computed although something could be"
    return None


def _member_of(sequence: Sequence) -> Member:
    params = sequence.params
    num_missing_pages = 0 if sequence.slot is not None else sequence.num_missing_pages(sequence.num_uncomputed)
    return Member(
        request_id=params.request_id,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_output_tokens=sequence.num_output_tokens,
        waits_since_s=sequence.served_at_s,
        predicted_output_tokens=params.scheduling.predicted_output_tokens or None,
        lane_priority=params.scheduling.lane_priority,
        num_missing_tokens=num_missing_pages * PAGE_TOKENS,
        max_output_tokens=params.stop.max_tokens,
    )
