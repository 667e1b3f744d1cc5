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
    seat: PrefillCandidate
    decodes: Sequence[DecodeCandidate]
    """Who may go on from there, the best first; never none."""
    num_cached_tokens: int
    is_full: bool


class Expectation(NamedTuple):
    """What an option's cost is made of."""

    queue_ms: float
    read_ms: float
    hand_off_ms: float
    itl_ms: float

    @property
    def ttft_ms(self) -> float:
        return self.queue_ms + self.read_ms + self.hand_off_ms


class Router:
    """Costs, as the limits' rule counts them."""

    def __init__(self, limits: PlacingLimits) -> None:
        self._limits = limits
        self._random = random.Random(limits.seed)
        self._is_estimating = limits.router == "estimated-ttft"

    def cost_ms(
        self,
        seat: PrefillCandidate,
        decode: DecodeCandidate,
        submit: Submit,
        num_cached_tokens: int,
        now_s: float,
        is_choice: bool,
    ) -> float:
        """Less is better. `is_choice`: prefill workers as well as decode workers could read the prompt."""
        if not self._is_estimating:
            return self._baseline_cost(seat, decode, submit, num_cached_tokens, now_s)
        limits, station, num_prompt_tokens = self._limits, seat.station, submit.num_prompt_tokens
        num_uncached = num_prompt_tokens - num_cached_tokens
        ttft_ms = station.prefill.queue_ms(now_s) if station.prefill.prompts else 0.0
        if seat.is_local:
            read_ms = station.read_beside_ms(num_uncached, num_cached_tokens)
            ttft_ms += read_ms + limits.local_harm * read_ms * len(station.decode.ranks)
            if is_choice:
                ttft_ms /= 1 - limits.local_gain
        else:
            read_ms = station.read_ms(num_uncached, num_cached_tokens)
            ttft_ms += read_ms + self._hand_off_ms(submit)
        return ttft_ms + limits.read_weight * read_ms + limits.itl_weight * decode.station.itl_ms(num_prompt_tokens)

    def expect(self, option: Option, decode: DecodeCandidate, submit: Submit, now_s: float) -> Expectation:
        """Whatever the rule that chose it."""
        station, num_cached = option.seat.station, option.num_cached_tokens
        num_uncached = submit.num_prompt_tokens - num_cached
        read = station.read_beside_ms if option.seat.is_local else station.read_ms
        return Expectation(
            queue_ms=station.prefill.queue_ms(now_s),
            read_ms=read(num_uncached, num_cached),
            hand_off_ms=0.0 if option.seat.is_local else self._hand_off_ms(submit),
            itl_ms=decode.station.itl_ms(submit.num_prompt_tokens),
        )

    def _hand_off_ms(self, submit: Submit) -> float:
        limits = self._limits
        if not limits.hand_off_page_ms:
            return limits.hand_off_ms
        return limits.hand_off_ms + limits.hand_off_page_ms * num_pages_for(submit.num_prompt_tokens)

    def _baseline_cost(
        self, seat: PrefillCandidate, decode: DecodeCandidate, submit: Submit, num_cached_tokens: int, now_s: float
    ) -> float:
        match self._limits.router:
            case "longest-prefix":
                return -num_cached_tokens
            case "random":
                return self._random.random()
            case _:
                queue_ms = seat.station.prefill.queue_ms(now_s)
                return queue_ms + self._limits.itl_weight * decode.station.itl_ms(submit.num_prompt_tokens)


def kind_of(option: Option, expected: Expectation, beside: Expectation | None) -> str:
    """One word for why: the metric's label. `beside`: what the best prefill worker would have offered."""
    if not option.seat.is_local:
        return "split_cached" if option.num_cached_tokens else "split"
    if beside is None:
        return "local"
    if beside.queue_ms > expected.ttft_ms:
        return "local_queue"
    return "local_hand_off" if beside.hand_off_ms > beside.read_ms else "local_short"
