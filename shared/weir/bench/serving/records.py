"""What is sent and what comes of it: requests, turns that follow them, what one client saw, and points of a sweep."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class TurnMessage(NamedTuple):
    """One of a conversation; `role` as OpenAI's API has it."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class FollowUp:
    """The next turn of a chat, asked `pause_s` after the answer before it."""

    text: str
    output_len: int
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request, or a chat of several turns. Times in seconds after the start."""

    prompt: Sequence[int] | str
    output_len: int
    at_s: float = 0.0
    lane: str = ""
    tenant: str = ""
    body: Mapping[str, object] = field(default_factory=dict)
    """More fields of the request."""
    system: str = ""
    follow_ups: tuple[FollowUp, ...] = ()

    @property
    def num_turns(self) -> int:
        return 1 + len(self.follow_ups)


@dataclass(slots=True)
class ServedRequest:
    """What one client saw; times in seconds of this process's monotonic clock.

    `started_s` is when the request was due. One that had to wait here for room below the concurrency starts when it had
    it: that time is `queued_s`, no part of its latency.
    """

    input_len: int
    """As the server counted it, where it says so."""
    started_s: float
    ttft_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    latency_s: float = 0.0
    output_len: int = 0
    text: str = ""
    error: str = ""
    lane: str = ""
    tenant: str = ""
    status: int = 0
    """Of HTTP; 0: no answer."""
    late_s: float = 0.0
    """From when it was due to when this process turned to it; 0 of one that waited here for room."""
    queued_s: float = 0.0
    turn: int = 0
    has_chunk: bool = False

    @property
    def tpot_s(self) -> float:
        """Of two tokens and more."""
        return (self.latency_s - self.ttft_s) / (self.output_len - 1)

    def saw_chunk(self, now_s: float) -> None:
        """A piece of the answer has come."""
        if not self.has_chunk:
            self.has_chunk = True
            self.ttft_s = now_s - self.started_s
        else:
            self.gaps_s.append(now_s - self.started_s - self.latency_s)
        self.latency_s = now_s - self.started_s


@dataclass(frozen=True, slots=True)
class Point:
    """What came of one value of the axis. `figures` by the keys of a result."""

    value: float
    figures: Mapping[str, float | int | None]


@dataclass(frozen=True, slots=True)
class ServerCurve:
    """Of one server, by rising value."""

    name: str
    points: tuple[Point, ...]
