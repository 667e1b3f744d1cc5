"""Prompts that are computed at one host for a decode worker of another one.

Their full pages cross as a prefix while they are being computed, and the decode worker computes what is behind them,
with the first token. Until that is there they are booked in both arenas: at the sender as pages of their own, at the
receiver in what is reserved for the request. Neither gives more of an arena than services pin, or reserve, for others.
"""

from collections.abc import Iterable
from typing import NamedTuple

from weir.bus.messages import Submit
from weir.kv.geometry import PAGE_TOKENS
from weir.scheduling.limits import PlacingLimits
from weir.scheduling.pools import PrefillCandidate, WorkerState
from weir.scheduling.prefix_view import Hashes, PrefixDepths
from weir.scheduling.routing.links import LinkRates
from weir.scheduling.routing.router import Crossing, Option
from weir.scheduling.routing.sources import LEAST_FETCHED_TOKENS, LONGEST_FETCH_MS, MAX_SHARE

_LONGEST_QUEUE_MS = 2000.0
"""At the sender. The receiver's offer waits 3.5 s for the first page (`weir_transfer.exchange.pages_service`),
and what comes later is computed twice."""


class CrossingPrompt(NamedTuple):
    """What is asked for, and how much of its pages arenas have. `reported`: without what is about to be computed."""

    submit: Submit
    hashes: Hashes
    depths: PrefixDepths
    reported: PrefixDepths

    @property
    def num_pages(self) -> int:
        """That can cross: full ones, and the last token is computed by who answers."""
        return min(len(self.hashes), (self.submit.num_prompt_tokens - 1) // PAGE_TOKENS)


class CrossingRouter:
    """What it costs to compute a prompt at a sender for a receiver."""

    def __init__(self, limits: PlacingLimits, links: LinkRates) -> None:
        self._limits = limits
        self._links = links

    def try_option(
        self, prompt: CrossingPrompt, sender: PrefillCandidate, receiver: WorkerState, now_s: float, *, is_choice: bool
    ) -> Option | None:
        """None: it cannot be, or too little would cross. `is_choice`: the request could be placed on one host."""
        worker, limits, submit = sender.worker, self._limits, prompt.submit
        if not self.can_cross(prompt.num_pages, worker, receiver):
            return None
        num_tokens = prompt.num_pages * PAGE_TOKENS
        num_missing = num_tokens - prompt.reported.num_tokens(receiver.arena.arena_id)
        if num_missing < LEAST_FETCHED_TOKENS:
            return None
        queue_ms = worker.prefill.queue_ms(now_s) if worker.prefill.prompts else 0.0
        if queue_ms > _LONGEST_QUEUE_MS:
            return None
        num_cached = min(prompt.depths.num_tokens(worker.arena.arena_id), num_tokens)
        num_arriving = receiver.arena.num_arriving_pages
        prefill_ms, exposed_ms = self._times_ms(prompt, worker, receiver, now_s, num_arriving)
        if queue_ms + prefill_ms + exposed_ms > LONGEST_FETCH_MS:
            return None
        tail_ms = receiver.prefill_beside_ms(submit.num_prompt_tokens - num_tokens, num_tokens)
        ttft_ms = queue_ms + prefill_ms + exposed_ms + tail_ms
        ttft_ms += limits.local_harm * tail_ms * len(receiver.decode.priorities)
        if is_choice:
            ttft_ms /= 1 - limits.fetch_gain
        cost_ms = ttft_ms + limits.prefill_weight * (prefill_ms + tail_ms)
        cost_ms += limits.itl_weight * receiver.itl_ms(submit.num_prompt_tokens)
        return Option(
            cost_ms,
            sender,
            (receiver,),
            num_cached,
            is_full=False,
            queue_ms=queue_ms,
            prefill_ms=prefill_ms,
            hand_off_ms=exposed_ms + tail_ms,
            crossing=Crossing(worker.record.pages_address, prompt.num_pages),
        )

    def can_come(
        self, prompt: CrossingPrompt, senders: Iterable[PrefillCandidate], receiver: WorkerState, now_s: float
    ) -> bool:
        """Whether it could be in time from one of them that has nothing else to do, over a link that is free."""
        return any(
            self.can_cross(prompt.num_pages, sender.worker, receiver)
            and sum(self._times_ms(prompt, sender.worker, receiver, now_s, num_arriving=0)) <= LONGEST_FETCH_MS
            for sender in senders
        )

    def least_ms(self, sender: WorkerState) -> float:
        """That a crossing of a long prompt adds to the first token, where nobody has measured the link."""
        return self._links.prior.transfer_ms(sender.step_tokens * sender.record.page_bytes / PAGE_TOKENS)

    def can_cross(self, num_pages: int, sender: WorkerState, receiver: WorkerState) -> bool:
        """Whether so many pages could be computed and sent in time, and be in both arenas, if nothing else were."""
        if sender.arena.arena_id == receiver.arena.arena_id:
            return False
        if sender.record.page_bytes != receiver.record.page_bytes or not sender.record.page_bytes:
            return False
        least = min(sender.arena.num_pages, receiver.arena.num_pages)
        return 0 < num_pages <= MAX_SHARE * least and sender.prefill_ms(num_pages * PAGE_TOKENS, 0) < LONGEST_FETCH_MS

    def _times_ms(
        self, prompt: CrossingPrompt, worker: WorkerState, receiver: WorkerState, now_s: float, num_arriving: int
    ) -> tuple[float, float]:
        """(the sender's prefill, of the transfer what the receiver waits for behind that), where so many pages of
        others are on their way."""
        num_tokens = prompt.num_pages * PAGE_TOKENS
        num_missing = num_tokens - prompt.reported.num_tokens(receiver.arena.arena_id)
        num_cached = min(prompt.depths.num_tokens(worker.arena.arena_id), num_tokens)
        num_uncached = num_tokens - num_cached
        prefill_ms = worker.prefill_ms(num_uncached, num_cached)
        link = self._links.cost(worker.record.pages_address, receiver.arena.arena_id, now_s)
        token_bytes = worker.record.page_bytes / PAGE_TOKENS
        num_first = min(worker.step_tokens, num_uncached)
        later_ms = prefill_ms * (1 - num_first / num_uncached) if num_uncached else 0.0
        num_last = min(num_first, num_missing)
        on_its_way = num_arriving * worker.record.page_bytes
        exposed_ms = link.exposed_ms(on_its_way + num_missing * token_bytes, num_last * token_bytes, later_ms)
        return prefill_ms, exposed_ms


def has_room(num_pages: int, sender: WorkerState, receiver: WorkerState) -> bool:
    """Whether so many pages may be on their way beside those that are, and what is charged to the sender's arena."""
    leaving, arriving = sender.arena.num_leaving_pages + num_pages, receiver.arena.num_arriving_pages + num_pages
    if leaving > MAX_SHARE * sender.arena.num_pages or arriving > MAX_SHARE * receiver.arena.num_pages:
        return False
    return leaving + sum(sender.arena.pages_by_lane().values()) <= sender.arena.num_pages
