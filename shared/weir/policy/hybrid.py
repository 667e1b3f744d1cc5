"""Niyama's hybrid of deadlines and sizes (Goel et al., arXiv 2503.22562).

Order: deadline + alpha * uncached tokens, between earliest deadline (alpha 0) and shortest first. Eager relegation: a
request that cannot meet its deadline any more when its turn comes goes behind all that can, and is served still; this
stops the domino effect of plain EDF. Chunks are as large as the slack of the decodes beside them allows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from weir.core.cost import StepCost
from weir.policy.estimators import LeastSquares
from weir.policy.keyed_orders import deadline_s
from weir.policy.params import bounded
from weir.policy.relegation import PrefillRate, RelegatingQueue
from weir.policy.seams import Decode, OrderQueue, Policy, StepShare, StepView, Waiting
from weir.policy.starvation import StarvationParams, guarded

_STEP_TOKENS = (*range(128, 2049, 128), 2552)
_SHORT_OF_PAGES_TOKENS = 32 * 1000
_NUM_SMALL = 4
"""With few free pages only the smallest are used, up to 512."""
_SAFETY = 1.2
_FIRST_GUESS_MS = (15.0, 0.08, 0.1, 1e-4)
"""Base, a prompt token, a decode, a token of context: Niyama's for an A100, until the worker's own are known."""
_PAIRS_A_TOKEN = 256
"""Tokens that one of a prompt attends to on average, as in a prompt of 512."""


@dataclass(frozen=True, slots=True)
class HybridParams(StarvationParams):
    """`default_*`: of requests without a target of their own. `tokens_per_s`: how fast prompts are prefilled, until it
    has been measured."""

    alpha_s_per_token: float = bounded(0.0005, 0)
    relegation: bool = True
    default_ttft_s: float = bounded(30.0, 0)
    default_itl_s: float = bounded(0.2, 0)
    tokens_per_s: float = bounded(8500.0, 1)
    dynamic_chunk: bool = True


def make_hybrid(params: HybridParams) -> Policy:
    step_budget = DynamicChunk(params.default_itl_s) if params.dynamic_chunk else None
    return Policy("hybrid", HybridOrder(params), gate=None, step_budget=step_budget)


class HybridOrder:
    """All queues share one estimate of how fast prompts are prefilled."""

    def __init__(self, params: HybridParams) -> None:
        self._params = params
        self._rate = PrefillRate(params.tokens_per_s)

    def new_queue(self) -> OrderQueue:
        return guarded(RelegatingQueue(self.rank, self._due_s, self._rate), self._params)

    def rank(self, request: Waiting) -> float:
        due_s = deadline_s(request, self._params.default_ttft_s)
        return due_s + self._params.alpha_s_per_token * request.num_uncached_tokens

    def finished(self, request: Waiting, num_output_tokens: int, now_s: float) -> None:
        """The prefill rate is learned when requests are taken."""

    def _due_s(self, request: Waiting) -> float:
        """Infinite where nobody is relegated."""
        return deadline_s(request, self._params.default_ttft_s) if self._params.relegation else math.inf


class DynamicChunk:
    """Chunks as large as the slack of the decodes beside them allows.

    All decodes run; prompts get what brings the step to the largest total whose predicted time, with a margin of a
    fifth, is within the slack, and never less than the smallest total leaves them, so that they do not starve.

    A decode is due at arrival + TTFT target + (emitted + 1) * ITL target in Niyama. A worker knows when its last token
    came, not when its first one was due, so here it is due one target after its last token.
    """

    def __init__(self, default_itl_s: float) -> None:
        self._default_itl_s = default_itl_s
        self._step_ms = _predictor(_FIRST_GUESS_MS)
        self._is_own_cost = False
        self._num_context_tokens = 0

    def plan(self, view: StepView) -> StepShare:
        num_decodes = min(len(view.decodes), view.max_tokens)
        decodes = range(num_decodes)
        self._num_context_tokens = sum(view.decodes[index].num_context_tokens for index in decodes)
        num_left = sum(view.prefills)
        num_room = view.max_tokens - num_decodes
        if num_left == 0 or num_room == 0:
            return StepShare(decodes, 0)
        if view.cost is not None and not self._is_own_cost:
            self._is_own_cost = True
            self._step_ms = _predictor(_guess_of(view.cost))
        num_total = self._num_total(view, num_decodes)
        return StepShare(decodes, max(1, min(num_left, num_room, num_total - num_decodes)))

    def stepped(self, duration_s: float, share: StepShare) -> None:
        features = self._features(share.num_prefill_tokens, len(share.decodes))
        self._step_ms.observe(features, 1000 * duration_s)

    def _num_total(self, view: StepView, num_decodes: int) -> int:
        is_short_of_pages = view.num_free_tokens < _SHORT_OF_PAGES_TOKENS
        totals: tuple[int, ...] = _STEP_TOKENS[:_NUM_SMALL] if is_short_of_pages else _STEP_TOKENS
        slack_ms = 1000 * self._slack_s(view.decodes[:num_decodes], view.now_s)
        largest: int = totals[0]
        for num_total in totals[1:]:
            features = self._features(max(0, num_total - num_decodes), num_decodes)
            if _SAFETY * self._step_ms.predict(features) > slack_ms:
                break
            largest = num_total
        return largest

    def _slack_s(self, decodes: Sequence[Decode], now_s: float) -> float:
        return min(
            (d.last_token_at_s + (d.itl_target_s or self._default_itl_s) - now_s for d in decodes), default=math.inf
        )

    def _features(self, num_prefill_tokens: int, num_decodes: int) -> tuple[float, ...]:
        return 1.0, float(num_prefill_tokens), float(num_decodes), float(self._num_context_tokens)


def _predictor(guess_ms: tuple[float, ...]) -> LeastSquares:
    return LeastSquares(guess_ms, scales=(1.0, 512.0, 64.0, 64_000.0), decay=0.995)


def _guess_of(cost: StepCost) -> tuple[float, ...]:
    token_ms = cost.prefill_token_ms + _PAIRS_A_TOKEN * cost.prefill_pair_ms
    return cost.base_ms, token_ms, cost.decode_sequence_ms, cost.context_token_ms
