"""What it costs to place a request on a worker, by four rules: one that is meant, and three to measure it against."""

import random
from collections.abc import Sequence
from typing import NamedTuple

from weir.bus.messages import Submit
from weir.kv.geometry import num_pages_for
from weir.scheduling.placing_limits import PlacingLimits
from weir.scheduling.pools import DecodeSeat, ReadSeat


class Option(NamedTuple):
    """A place for one request. Sorts by cost, then by the place in the pool, so that equals come out the same way."""

    cost_ms: float
    place: int
    """In the pool."""
    seat: ReadSeat
    decodes: Sequence[DecodeSeat]
    """Who may go on from there, the best first."""
    queue_ms: float
    read_ms: float
    hand_off_ms: float
    itl_ms: float
    """On the first of `decodes`."""
    num_cached_tokens: int
    is_full: bool

    @property
    def ttft_ms(self) -> float:
        return self.queue_ms + self.read_ms + self.hand_off_ms


class Router:
    """Makes options."""

    def __init__(self, limits: PlacingLimits) -> None:
        self._limits = limits
        self._random = random.Random(limits.seed)

    def option(
        self,
        index: int,
        seat: ReadSeat,
        decodes: Sequence[DecodeSeat],
        submit: Submit,
        num_cached_tokens: int,
        now_s: float,
        *,
        is_full: bool,
        has_choice: bool,
    ) -> Option:
        """`has_choice`: the prompt could be read by a prefill worker as well as by a decode worker."""
        limits, station = self._limits, seat.station
        num_uncached = submit.num_prompt_tokens - num_cached_tokens
        queue_ms = station.prefill.queue_ms(now_s)
        itl_ms = decodes[0].station.itl_ms(submit.num_prompt_tokens)
        if seat.is_local:
            read_ms = station.read_beside_ms(num_uncached, num_cached_tokens)
            hand_off_ms = 0.0
            harm_ms = limits.local_harm * read_ms * len(station.decode.ranks)
            ttft_ms = queue_ms + read_ms + harm_ms
            if has_choice:
                ttft_ms /= 1 - limits.local_gain
        else:
            read_ms = station.read_ms(num_uncached, num_cached_tokens)
            hand_off_ms = limits.hand_off_ms + limits.hand_off_page_ms * num_pages_for(submit.num_prompt_tokens)
            ttft_ms = queue_ms + read_ms + hand_off_ms
        cost_ms = self._cost_ms(ttft_ms, queue_ms, limits.itl_weight * itl_ms, num_cached_tokens)
        return Option(cost_ms, index, seat, decodes, queue_ms, read_ms, hand_off_ms, itl_ms, num_cached_tokens, is_full)

    def _cost_ms(self, ttft_ms: float, queue_ms: float, itl_cost_ms: float, num_cached_tokens: int) -> float:
        match self._limits.router:
            case "estimated-ttft":
                return ttft_ms + itl_cost_ms
            case "least-load":
                return queue_ms + itl_cost_ms
            case "longest-prefix":
                return -num_cached_tokens
            case "random":
                return self._random.random()


def kind_of(chosen: Option, options: Sequence[Option]) -> str:
    """One word for why: the metric's label."""
    if not chosen.seat.is_local:
        return "split_cached" if chosen.num_cached_tokens else "split"
    split = min((option for option in options if not option.seat.is_local), default=None)
    if split is None:
        return "local"
    if split.queue_ms > chosen.ttft_ms:
        return "local_queue"
    return "local_hand_off" if split.hand_off_ms > split.read_ms else "local_short"
