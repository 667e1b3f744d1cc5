"""How soon pages come from one memory into another: as their services have measured it, and what a prompt waits for it.

    transfer_ms = round trip + bytes / rate
    exposed_ms  = round trip + max(bytes of the last chunk / rate, bytes / rate - time to compute all but the first),
                  from when the last chunk is computed, where pages go as they are computed

The scheduler decides by them, in the simulator too.
"""

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from weir.bus.prefix_news import PrefixFetched

_MAX_LINKS = 16_384
_PRIOR_BYTES = 4 << 20
"""What nobody measured counts as a fetch of so much."""
_EARLIER = 0.8
"""What each fetch counts once there is another one."""
_HALF_LIFE_S = 60.0
"""A link that was found slow is not used, nor measured: its rate is forgotten, and it is tried again."""


class LinkCost(NamedTuple):
    """Of pages from one memory into another."""

    byte_ms: float
    round_trip_ms: float

    @classmethod
    def of_rate(cls, mbit_s: float, round_trip_ms: float) -> "LinkCost":
        return cls(8 / 1000 / mbit_s, round_trip_ms)

    def transfer_ms(self, num_bytes: float) -> float:
        """Of what is there already."""
        return self.round_trip_ms + num_bytes * self.byte_ms

    def exposed_ms(self, num_bytes: float, num_last_bytes: float, later_chunks_ms: float) -> float:
        """Of what is being computed, once it is. `num_last_bytes`: of its last chunk; `later_chunks_ms`: to compute all
        but its first one."""
        return self.round_trip_ms + max(num_last_bytes * self.byte_ms, num_bytes * self.byte_ms - later_chunks_ms)


@dataclass(slots=True)
class _Measured:
    """Sums of fetches, the later the more they count; as of `at_s`."""

    num_bytes: float = 0.0
    busy_s: float = 0.0
    round_trip_s: float = 0.0
    num_round_trips: float = 0.0
    at_s: float = 0.0

    def fade(self, part: float) -> None:
        self.num_bytes *= part
        self.busy_s *= part
        self.round_trip_s *= part
        self.num_round_trips *= part


class LinkRates:
    """By the address of the source's `Pages` and the arena that fetches."""

    def __init__(self, prior: LinkCost) -> None:
        self.prior = prior
        self._links: OrderedDict[tuple[str, str], _Measured] = OrderedDict()
        """Those that were measured last come last."""

    def __len__(self) -> int:
        return len(self._links)

    def learn(self, arena_id: str, fetches: Collection[PrefixFetched], now_s: float) -> None:
        for fetched in fetches:
            key = fetched.source, arena_id
            link = self._links.setdefault(key, _Measured(at_s=now_s))
            self._links.move_to_end(key)
            link.fade(_EARLIER * _faded(now_s - link.at_s))
            link.at_s = now_s
            link.num_bytes += max(0, fetched.num_bytes)
            link.busy_s += max(0.0, fetched.busy_s)
            link.round_trip_s += max(0.0, fetched.round_trip_s)
            link.num_round_trips += fetched.round_trip_s > 0
        while len(self._links) > _MAX_LINKS:
            self._links.popitem(last=False)

    def cost(self, source: str, arena_id: str, now_s: float) -> LinkCost:
        link = self._links.get((source, arena_id))
        if link is None:
            return self.prior
        part = _faded(now_s - link.at_s)
        prior_s = _PRIOR_BYTES * self.prior.byte_ms / 1000
        byte_s = (prior_s + part * link.busy_s) / (_PRIOR_BYTES + part * link.num_bytes)
        num_round_trips = 1 + part * link.num_round_trips
        round_trip_ms = (self.prior.round_trip_ms + 1000 * part * link.round_trip_s) / num_round_trips
        return LinkCost(1000 * byte_s, round_trip_ms)

    def metrics(self, now_s: float) -> dict[str, float]:
        """Rates of the slowest and the quickest link that was measured lately; none: 0."""
        rates = [1000 / self.cost(*key, now_s).byte_ms for key in self._links]
        return {
            "links_measured": float(len(rates)),
            "link_bytes_per_second_min": min(rates, default=0.0),
            "link_bytes_per_second_max": max(rates, default=0.0),
        }


def _faded(age_s: float) -> float:
    return float(0.5 ** (max(0.0, age_s) / _HALF_LIFE_S))
