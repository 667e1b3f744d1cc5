"""Whether one more request fits in memory: beside what lanes are guaranteed, and beside what runs until that ends.

Guaranteed shares of pages: what of them lies idle is lent, and comes back when its owner wants it. The rule is the
reserved-capacity one of TensorRT-LLM's guaranteed-no-evict scheduler, with lending added.

Nobody knows how long running sequences will get. The peak of a set of sequences with known ends, and the past-future
test, are those of "Past-Future Scheduler for LLM Serving under SLA Guarantees" (Gong et al., ASPLOS 2025, arXiv
2507.10150): when the i-th sequence ends, counted from the one that lives longest, the i longest-lived are there, each
grown by what the i-th still had to come.

    peak = max over i of (tokens held by the first i) + i * (tokens left of the i-th),  by tokens left, descending
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from math import ceil
from typing import Protocol

import numpy as np

from weir.bus.messages import Submit
from weir.kv.geometry import PAGE_TOKENS, num_pages_for
from weir.scheduling.limits import CoreLimits, PlacingLimits
from weir.scheduling.pools import ArenaLoad
from weir.scheduling.request import num_reserved_pages
from weir.scheduling.running_lengths import Floats, RunningLengths

NUM_PAST = 200
NUM_SEEDS = 100
_MAX_SAMPLES = 5
_MAX_AGE_S = 0.25
_MAX_MODELS = 1024
_MAX_ARENAS = 4096
_ROUNDING_TOKENS = PAGE_TOKENS / 2
"""Of the last page of a sequence, on average."""


class LaneShares:
    """What lanes may reserve of the pages of an arena, under one set of limits."""

    def __init__(self, limits: CoreLimits) -> None:
        self._limits = limits
        self._guaranteed: dict[int, Mapping[str, int]] = {}
        """By the size of an arena."""

    def guaranteed(self, num_pages: int) -> Mapping[str, int]:
        """Of one arena of `num_pages`, by lane."""
        guaranteed = self._guaranteed.get(num_pages)
        if guaranteed is None:
            if len(self._guaranteed) >= _MAX_ARENAS:
                self._guaranteed.clear()
            guaranteed = {lane.name: int(lane.guaranteed_share * num_pages) for lane in self._limits.lanes}
            self._guaranteed[num_pages] = guaranteed
        return guaranteed

    def open_to(self, lane: str, used_by_lane: Mapping[str, int], num_pages: int, wanting: Collection[str] = ()) -> int:
        """Pages of one arena that a request of the lane may reserve now; at least 0.

        Inside its guarantee a lane may reserve what less urgent lanes have borrowed, even though it is not free yet:
        decode workers preempt the least urgent first. What more urgent lanes have borrowed comes back as their
        requests end. Over its guarantee it may reserve what is free, less what is kept of others' idle guarantees: all
        of it for those that are `wanting`, who have requests waiting; else the part that is not lent.
        """
        guaranteed, priorities = self.guaranteed(num_pages), self._limits.lane_priorities
        num_free = num_pages - sum(used_by_lane.values())
        num_kept = num_lendable = num_borrowed = 0
        priority = priorities.get(lane, -1)
        for other in {*used_by_lane, *guaranteed} - {lane}:
            idle = guaranteed.get(other, 0) - used_by_lane.get(other, 0)
            if idle <= 0:
                if priorities.get(other, -1) < priority:
                    num_borrowed -= idle
            elif other in wanting:
                num_kept += idle
            else:
                num_lendable += idle
        num_owed = guaranteed.get(lane, 0) - used_by_lane.get(lane, 0)
        in_guarantee = min(num_owed, num_free + num_borrowed)
        # Whole pages are added up, for the lanes come in any order and a sum of parts of pages would depend on it.
        borrowable = num_free - num_kept - int(num_lendable * (1 - self._limits.lent_share))
        return max(in_guarantee, borrowable, 0)

    def can_take_back(self, lane: str, num_wanted: int, used_by_lane: Mapping[str, int], num_pages: int) -> bool:
        """Whether the lane may take so many pages, whatever a memory fit expects of those that run: they are inside
        its guarantee, and less urgent lanes have borrowed as many, so that these are preempted for it."""
        guaranteed, priorities = self.guaranteed(num_pages), self._limits.lane_priorities
        if num_wanted > guaranteed.get(lane, 0) - used_by_lane.get(lane, 0):
            return False
        priority = priorities.get(lane, -1)
        num_borrowed = 0
        for other, num_used in used_by_lane.items():
            if priorities.get(other, -1) < priority:
                num_borrowed += max(0, num_used - guaranteed.get(other, 0))
        return num_wanted <= num_borrowed


class MemoryFit(Protocol):
    """Whether the running requests of an arena and one more fit in it."""

    counts_worst_case: bool
    """Of what runs: all that it may come to."""
    kept_share: float
    """Of an arena, that it leaves free."""
    preempts: bool
    """Whether what it admits can come to use more than there is."""

    def used_pages(self, arena: ArenaLoad, now_s: float) -> int:
        """By what runs there, as it counts that."""
        ...

    def fits(self, arena: ArenaLoad, num_pages: int, submit: Submit, now_s: float) -> bool:
        """`num_pages`: that requests of the asking one's lane may come to beside what others use: the arena's, where
        no share is guaranteed."""
        ...

    def charged_pages(self, submit: Submit) -> int:
        """What the request counts against its lane's share as long as it runs."""
        ...

    def finished(self, model: str, num_output_tokens: int) -> None:
        """A request has come to its own end."""
        ...


class Conservative:
    """Reserves the worst case (ADR 0002). Nothing is ever preempted if `overcommit` is 1."""

    counts_worst_case = True
    kept_share = 0.0

    def __init__(self, overcommit: float) -> None:
        self._overcommit = overcommit
        self.preempts = overcommit > 1

    def used_pages(self, arena: ArenaLoad, now_s: float) -> int:
        del now_s
        return arena.num_reserved_pages

    def fits(self, arena: ArenaLoad, num_pages: int, submit: Submit, now_s: float) -> bool:
        del now_s
        return arena.num_reserved_pages + num_reserved_pages(submit) <= num_pages * self._overcommit

    def charged_pages(self, submit: Submit) -> int:
        return num_reserved_pages(submit)

    def finished(self, model: str, num_output_tokens: int) -> None:
        del model, num_output_tokens


class Aggressive:
    """Whatever fits now. Sequences are preempted when they grow."""

    counts_worst_case = False
    kept_share = 0.0
    preempts = True

    def used_pages(self, arena: ArenaLoad, now_s: float) -> int:
        return ceil(_num_held_tokens(arena, now_s) / PAGE_TOKENS)

    def fits(self, arena: ArenaLoad, num_pages: int, submit: Submit, now_s: float) -> bool:
        num_held = _num_held_tokens(arena, now_s)
        return num_held / PAGE_TOKENS + num_pages_for(submit.num_prompt_tokens + 1) <= num_pages

    def charged_pages(self, submit: Submit) -> int:
        return num_pages_for(submit.num_prompt_tokens + 1)

    def finished(self, model: str, num_output_tokens: int) -> None:
        del model, num_output_tokens


class OutputHistory:
    """Lengths of the last outputs, at first of outputs that never ended: whatever bound a request has, it reaches."""

    def __init__(self) -> None:
        self._lengths: deque[float] = deque([np.inf] * NUM_SEEDS, maxlen=NUM_PAST)
        self._ascending: Floats | None = None
        self._expected: tuple[int, float] | None = None

    def add(self, num_tokens: int) -> None:
        self._lengths.append(float(num_tokens))
        self._ascending = self._expected = None

    @property
    def ascending(self) -> Floats:
        if self._ascending is None:
            self._ascending = np.sort(np.fromiter(self._lengths, np.float64, len(self._lengths)))
        return self._ascending

    def expected(self, max_tokens: int) -> float:
        """Of a new request, on average."""
        if self._expected is None or self._expected[0] != max_tokens:
            self._expected = max_tokens, float(np.minimum(self.ascending, max_tokens).mean())
        return self._expected[1]

    def sample_new(self, max_tokens: int, uniform: Floats) -> Floats:
        """Total lengths of new requests; `uniform`: random numbers in [0, 1)."""
        past = self.ascending
        return np.minimum(past[(uniform * past.size).astype(np.intp)], max_tokens)

    def sample_running(self, emitted: Floats, max_output: Floats, uniform: Floats) -> Floats:
        """Total lengths [k, n] of sequences that came as far as `emitted` [n]: only longer pasts count, and the bound.

        `uniform` [k, n], random in [0, 1), choose between these points, linearly from one to the next.
        """
        past = self.ascending
        first = np.searchsorted(past, emitted, side="right")
        position = first + uniform * (past.size - first)
        low = position.astype(np.intp)
        padded = np.append(past, np.inf)
        shorter = np.minimum(padded[low], max_output)
        longer = np.minimum(padded[np.minimum(low + 1, past.size)], max_output)
        totals: Floats = shorter + (longer - shorter) * (position - low)
        return totals


class _Future:
    """k futures of the sequences in one arena, laid out so that one more is tested in O(log n)."""

    def __init__(self, held: Floats, left: Floats, versions: tuple[int, ...], made_at_s: float) -> None:
        self.versions = versions
        self.made_at_s = made_at_s
        order = np.argsort(-left, axis=1)
        longest_first = np.take_along_axis(left, order, axis=1)
        num_futures, num_sequences = left.shape
        none = np.zeros((num_futures, 1))
        self._ascending = -longest_first
        self._held = np.concatenate([none, np.cumsum(held[order], axis=1)], axis=1)
        peaks = self._held[:, 1:] + longest_first * np.arange(1, num_sequences + 1)
        self._peaks_before = np.concatenate([none, np.maximum.accumulate(peaks, axis=1)], axis=1)
        later = np.maximum.accumulate((peaks + longest_first)[:, ::-1], axis=1)[:, ::-1]
        self._peaks_after = np.concatenate([later, none - np.inf], axis=1)
        self._refused: tuple[int, int, int] | None = None

    @property
    def num_futures(self) -> int:
        return int(self._ascending.shape[0])

    def refuse(self, submit: Submit, num_pages: int) -> None:
        """The request did not fit into `num_pages`."""
        self._refused = submit.num_prompt_tokens, submit.max_tokens, num_pages

    def has_refused(self, submit: Submit, num_pages: int) -> bool:
        """Whether one that was no larger did not fit into as much."""
        if self._refused is None:
            return False
        num_prompt_tokens, max_tokens, num_refused_pages = self._refused
        is_larger = submit.num_prompt_tokens >= num_prompt_tokens and submit.max_tokens >= max_tokens
        return is_larger and num_pages <= num_refused_pages

    def peak_with(self, held: float, left: Floats) -> float:
        """The highest peak of all futures with one more sequence, of which future i has `left[i]` to come."""
        peak = 0.0
        for index, to_come in enumerate(left.tolist()):
            place = int(self._ascending[index].searchsorted(-to_come))
            peak = max(
                peak,
                float(self._peaks_before[index, place]),
                float(self._held[index, place]) + held + to_come * (place + 1),
                float(self._peaks_after[index, place]) + held,
            )
        return peak


class PastFuture:
    """Looks at a few futures of what runs, sampled from the lengths of the last outputs, and admits if the worst
    of them leaves `memory_reserve` free. With `trusts_predictions` a predicted length is taken for the truth."""

    counts_worst_case = False
    preempts = True

    def __init__(self, limits: PlacingLimits, *, trusts_predictions: bool = False) -> None:
        self.kept_share = self._reserve = limits.memory_reserve
        self._trusts_predictions = trusts_predictions
        self._random = np.random.default_rng(limits.seed)
        self._histories: dict[str, OutputHistory] = {}
        self._futures: dict[str, _Future] = {}

    def used_pages(self, arena: ArenaLoad, now_s: float) -> int:
        return ceil(_num_held_tokens(arena, now_s) / PAGE_TOKENS)

    def fits(self, arena: ArenaLoad, num_pages: int, submit: Submit, now_s: float) -> bool:
        lengths = _lengths(arena)
        if not any(lengths):
            return self.charged_pages(submit) <= num_pages
        future = self._future(arena.arena_id, lengths, submit.model, now_s)
        if future.has_refused(submit, num_pages):
            return False
        held = submit.num_prompt_tokens + _ROUNDING_TOKENS
        peak = future.peak_with(held, self._sample_new(submit, future.num_futures))
        if peak < num_pages * PAGE_TOKENS * (1 - self._reserve):
            return True
        future.refuse(submit, num_pages)
        return False

    def charged_pages(self, submit: Submit) -> int:
        """The prompt and half of what outputs come to: what it holds on average while it runs."""
        expected = self._history(submit.model).expected(submit.max_tokens)
        return num_pages_for(submit.num_prompt_tokens + int(expected / 2))

    def finished(self, model: str, num_output_tokens: int) -> None:
        self._history(model).add(num_output_tokens)

    def _history(self, model: str) -> OutputHistory:
        history = self._histories.get(model)
        if history is None:
            if len(self._histories) >= _MAX_MODELS:
                del self._histories[next(iter(self._histories))]
            history = self._histories[model] = OutputHistory()
        return history

    def _sample_new(self, submit: Submit, num_futures: int) -> Floats:
        if self._trusts_predictions and submit.predicted_output_tokens:
            return np.full(num_futures, min(submit.predicted_output_tokens, submit.max_tokens))
        return self._history(submit.model).sample_new(submit.max_tokens, self._random.random(num_futures))

    def _future(self, arena_id: str, lengths: Sequence[RunningLengths], model: str, now_s: float) -> _Future:
        """The samples hold until a sequence comes or goes: as they grow together, their peak stays where it is."""
        versions = tuple(one.version for one in lengths)
        future = self._futures.get(arena_id)
        if future is None or future.versions != versions or now_s - future.made_at_s > _MAX_AGE_S:
            if len(self._futures) >= _MAX_ARENAS:
                self._futures.clear()
            future = self._futures[arena_id] = self._sample_future(lengths, model, versions, now_s)
        return future

    def _sample_future(
        self, lengths: Sequence[RunningLengths], model: str, versions: tuple[int, ...], now_s: float
    ) -> _Future:
        prompt, max_output, predicted, emitted = (
            parts[0] if len(parts) == 1 else np.concatenate(parts)
            for parts in zip(*((o.prompt, o.max_output, o.predicted, o.emitted(now_s)) for o in lengths), strict=True)
        )
        num_futures = min(_MAX_SAMPLES, NUM_PAST // prompt.size + 1)
        uniform = self._random.random((num_futures, prompt.size))
        total = self._history(model).sample_running(emitted, max_output, uniform)
        if self._trusts_predictions:
            is_credible = (predicted > emitted) & (predicted > 0)
            total = np.where(is_credible, np.minimum(predicted, max_output), total)
        return _Future(prompt + emitted + _ROUNDING_TOKENS, total - emitted, versions, now_s)


def _num_held_tokens(arena: ArenaLoad, now_s: float) -> float:
    return sum(float((one.prompt + one.emitted(now_s)).sum()) + _ROUNDING_TOKENS * len(one) for one in _lengths(arena))


def _lengths(arena: ArenaLoad) -> list[RunningLengths]:
    """Of each decode worker that reserves in it."""
    return [load.lengths for load in arena.loads]


def make_memory_fit(limits: PlacingLimits, overcommit: float) -> MemoryFit:
    """`overcommit`: pages that the conservative test reserves for each that there is."""
    match limits.memory_fit:
        case "conservative":
            return Conservative(overcommit)
        case "aggressive":
            return Aggressive()
        case "past-future":
            return PastFuture(limits)
        case "predicted":
            return PastFuture(limits, trusts_predictions=True)
