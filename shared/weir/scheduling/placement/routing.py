"""What it costs to place a request on a worker, by four rules: one that is meant, and three to measure it against."""

import random
from collections.abc import Sequence
from typing import NamedTuple

from weir.bus.messages import Submit
from weir.kv.geometry import num_pages_for
from weir.scheduling.limits.placing_limits import PlacingLimits
from weir.scheduling.workers.pools import DecodeCandidate, PrefillCandidate


class Option(NamedTuple):
    """A place for one request. Sorts by cost, then by the place in the pool, so that equals come out the same way."""

    cost_ms: float
    place: int
    """In the pool."""
    candidate: PrefillCandidate
    decodes: Sequence[DecodeCandidate]
    """Who may go on from there, the best first; never none."""
    num_cached_tokens: int
    is_full: bool


class Expectation(NamedTuple):
    """What an option's cost is made of."""

    queue_ms: float
    prefill_ms: float
    hand_off_ms: float
    itl_ms: float

    @property
    def ttft_ms(self) -> float:
        return self.queue_ms + self.prefill_ms + self.hand_off_ms


class Router:
    """Costs, as the limits' rule counts them."""

    def __init__(self, limits: PlacingLimits) -> None:
        self._limits = limits
        self._random = random.Random(limits.seed)
        self._is_estimating = limits.router == "estimated-ttft"

    def cost_ms(
        self,
        candidate: PrefillCandidate,
        decode: DecodeCandidate,
        submit: Submit,
        num_cached_tokens: int,
        now_s: float,
        is_choice: bool,
    ) -> float:
        """Less is better. `is_choice`: prefill workers as well as decode workers could read the prompt."""
        if not self._is_estimating:
            return self._baseline_cost(candidate, decode, submit, num_cached_tokens, now_s)
        limits, worker, num_prompt_tokens = self._limits, candidate.worker, submit.num_prompt_tokens
        num_uncached = num_prompt_tokens - num_cached_tokens
        ttft_ms = worker.prefill.queue_ms(now_s) if worker.prefill.prompts else 0.0
        if candidate.is_local:
            prefill_ms = worker.prefill_beside_ms(num_uncached, num_cached_tokens)
            ttft_ms += prefill_ms + limits.local_harm * prefill_ms * len(worker.decode.ranks)
            if is_choice:
                ttft_ms /= 1 - limits.local_gain
        else:
            prefill_ms = worker.prefill_ms(num_uncached, num_cached_tokens)
            ttft_ms += prefill_ms + self._hand_off_ms(submit)
        return (
            ttft_ms + limits.prefill_weight * prefill_ms + limits.itl_weight * decode.worker.itl_ms(num_prompt_tokens)
        )

    def expect(self, option: Option, decode: DecodeCandidate, submit: Submit, now_s: float) -> Expectation:
        """Whatever the rule that chose it."""
        worker, num_cached = option.candidate.worker, option.num_cached_tokens
        num_uncached = submit.num_prompt_tokens - num_cached
        read = worker.prefill_beside_ms if option.candidate.is_local else worker.prefill_ms
        return Expectation(
            queue_ms=worker.prefill.queue_ms(now_s),
            prefill_ms=read(num_uncached, num_cached),
            hand_off_ms=0.0 if option.candidate.is_local else self._hand_off_ms(submit),
            itl_ms=decode.worker.itl_ms(submit.num_prompt_tokens),
        )

    def _hand_off_ms(self, submit: Submit) -> float:
        limits = self._limits
        if not limits.hand_off_page_ms:
            return limits.hand_off_ms
        return limits.hand_off_ms + limits.hand_off_page_ms * num_pages_for(submit.num_prompt_tokens)

    def _baseline_cost(
        self, candidate: PrefillCandidate, decode: DecodeCandidate, submit: Submit, num_cached_tokens: int, now_s: float
    ) -> float:
        match self._limits.router:
            case "longest-prefix":
                return -num_cached_tokens
            case "random":
                return self._random.random()
            case _:
                queue_ms = candidate.worker.prefill.queue_ms(now_s)
                return queue_ms + self._limits.itl_weight * decode.worker.itl_ms(submit.num_prompt_tokens)


def kind_of(option: Option, expected: Expectation, beside: Expectation | None) -> str:
    """One word for why: the metric's label. `beside`: what the best prefill worker would have offered."""
    if not option.candidate.is_local:
        return "split_cached" if option.num_cached_tokens else "split"
    if beside is None:
        return "local"
    if beside.queue_ms > expected.ttft_ms:
        return "local_queue"
    return "local_hand_off" if beside.hand_off_ms > beside.prefill_ms else "local_short"
