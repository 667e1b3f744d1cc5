"""What the planner goes by: what happened since it last looked, how things stand now, and the load that comes of it."""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from weir.core.roles import WorkerRole

MAX_LENGTHS = 256
"""Lengths that one observation may name, and that a load is drawn from."""


def other_role(role: WorkerRole) -> WorkerRole:
    return "decode" if role == "prefill" else "prefill"


class Pools(NamedTuple):
    """Workers of each role."""

    prefill: int
    decode: int

    def of(self, role: WorkerRole) -> int:
        return self.prefill if role == "prefill" else self.decode

    def plus(self, role: WorkerRole, delta: int) -> "Pools":
        return (
            Pools(self.prefill + delta, self.decode) if role == "prefill" else Pools(self.prefill, self.decode + delta)
        )


@dataclass(frozen=True, slots=True)
class PoolCount:
    """Workers of one pool. `starting`: ordered, and not serving yet. `draining`: they take nothing new."""

    serving: int
    starting: int = 0
    draining: int = 0

    @property
    def num_to_be(self) -> int:
        """Once all that is under way is done."""
        return self.serving + self.starting

    @property
    def is_changing(self) -> bool:
        return self.starting > 0 or self.draining > 0


@dataclass(frozen=True, slots=True)
class Observation:
    """`num_…` and sums are of the `span_s` before `at_s`; what follows `cached_share` is of the moment."""

    at_s: float
    span_s: float
    num_arrived: int
    prompt_lengths: tuple[int, ...]
    """Of those that arrived, or a sample of them: at most `MAX_LENGTHS`."""
    output_lengths: tuple[int, ...]
    """Of answers that ended, as above."""
    num_first_tokens: int
    num_ttft_met: int
    sum_ttft_s: float
    num_ended: int
    num_itl_met: int
    sum_itl_s: float
    cached_share: float
    """Of the prompt tokens: found in a cache."""
    num_backlog_tokens: float
    """Uncached tokens of prompts that have no first token yet."""
    booked_share: float
    """Of what decode workers have, pages or sequences, whichever is scarcer: reserved for granted requests."""
    prefill: PoolCount
    decode: PoolCount

    def __post_init__(self) -> None:
        if not self.span_s > 0:
            raise ValueError(f"span_s {self.span_s}: must be over 0")
        for name in ("prompt_lengths", "output_lengths"):
            if len(getattr(self, name)) > MAX_LENGTHS:
                raise ValueError(f"{name}: {len(getattr(self, name))} lengths, at most {MAX_LENGTHS}")

    def count(self, role: WorkerRole) -> PoolCount:
        return self.prefill if role == "prefill" else self.decode

    @property
    def pools(self) -> Pools:
        """As they will be once what is under way is done."""
        return Pools(self.prefill.num_to_be, self.decode.num_to_be)


@dataclass(frozen=True, slots=True)
class ExpectedLoad:
    """What workers have to serve: so many requests a second with lengths like these, independent of each other."""

    rate_a_s: float
    prompt_lengths: tuple[int, ...]
    output_lengths: tuple[int, ...]
    cached_share: float = 0.0

    @property
    def mean_prompt_tokens(self) -> float:
        return sum(self.prompt_lengths) / max(1, len(self.prompt_lengths))

    @property
    def mean_uncached_tokens(self) -> float:
        return (1 - self.cached_share) * self.mean_prompt_tokens

    @property
    def mean_output_tokens(self) -> float:
        return sum(self.output_lengths) / max(1, len(self.output_lengths))


class Window:
    """The observations of the last `span_s`."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._seen: deque[Observation] = deque()
        self._prompt_lengths: deque[int] = deque(maxlen=MAX_LENGTHS)
        self._output_lengths: deque[int] = deque(maxlen=MAX_LENGTHS)
        """The last ones, however old: those that ended in a short window are mostly short."""

    def add(self, seen: Observation) -> None:
        self._seen.append(seen)
        self._prompt_lengths.extend(seen.prompt_lengths)
        self._output_lengths.extend(seen.output_lengths)
        while self._seen[0].at_s <= seen.at_s - self._span_s:
            self._seen.popleft()

    @property
    def covered_s(self) -> float:
        return sum(one.span_s for one in self._seen)

    @property
    def is_full(self) -> bool:
        """Nearly: ticks may come a little early."""
        return self.covered_s >= 0.9 * self._span_s

    @property
    def rate_a_s(self) -> float:
        return sum(one.num_arrived for one in self._seen) / max(self.covered_s, 1e-9)

    @property
    def ttft_s(self) -> float | None:
        """The mean; None: nobody got a first token."""
        num = sum(one.num_first_tokens for one in self._seen)
        return sum(one.sum_ttft_s for one in self._seen) / num if num else None

    @property
    def itl_s(self) -> float | None:
        """The mean time of a token after the first; None: no answer ended."""
        num = sum(one.num_ended for one in self._seen)
        return sum(one.sum_itl_s for one in self._seen) / num if num else None

    @property
    def has_changed(self) -> bool:
        """Whether workers came or went in it."""
        return any(one.prefill.is_changing or one.decode.is_changing for one in self._seen) or (
            len({one.pools for one in self._seen}) > 1
        )

    def lengths(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The last ones of prompts and of answers, at most `MAX_LENGTHS` each."""
        return tuple(self._prompt_lengths), tuple(self._output_lengths)

    @property
    def cached_share(self) -> float:
        """Weighted by who arrived."""
        num = sum(one.num_arrived for one in self._seen)
        return sum(one.cached_share * one.num_arrived for one in self._seen) / num if num else 0.0
