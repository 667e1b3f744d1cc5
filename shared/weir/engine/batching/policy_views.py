"""Sequences as gates and step budgets see them. Members are made when a gate looks at them: many gates only count."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import overload

from weir.core.cost import StepCost
from weir.engine.memory.pages import PagePool
from weir.engine.sequence import Sequence
from weir.kv.geometry import PAGE_TOKENS
from weir.policy.seams import BatchView, Decode, Member, StepView


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


class PolicyViews:
    """Makes the views, with the pages that a worker may count on: where others share its arena, what they use is taken
    for free."""

    def __init__(self, pool: PagePool, num_arena_pages: int) -> None:
        """`num_arena_pages` 0: what the pool holds is all there is."""
        self._pool = pool
        self._num_arena_pages = num_arena_pages

    def batch(self, waiting: list[Sequence], batch: list[Sequence], max_running: int) -> BatchView:
        num_pages = self._num_pages
        return BatchView(
            waiting=Members(waiting),
            running=Members(batch),
            max_running=max_running,
            num_pool_tokens=num_pages * PAGE_TOKENS,
            num_free_tokens=self._num_free_tokens,
        )

    def step(
        self,
        decodes: list[Sequence],
        prefills: list[Sequence],
        max_tokens: int,
        now_s: float,
        cost: StepCost | None = None,
    ) -> StepView:
        return StepView(
            now_s=now_s,
            max_tokens=max_tokens,
            decodes=[
                Decode(s.num_computed + 1, s.served_at_s, s.params.scheduling.itl_target_ms / 1e3) for s in decodes
            ],
            prefills=[s.num_uncomputed for s in prefills],
            page_use=min(1.0, self._num_used_pages / self._num_pages) if self._num_pages else 0.0,
            num_free_tokens=self._num_free_tokens,
            cost=cost,
        )

    @property
    def _num_pages(self) -> int:
        return self._num_arena_pages or self._pool.num_held_pages

    @property
    def _num_used_pages(self) -> int:
        return self._pool.num_held_pages - self._pool.num_free_pages

    @property
    def _num_free_tokens(self) -> int:
        return PAGE_TOKENS * max(0, self._num_pages - self._num_used_pages)


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
