"""What can happen to a message on its way: the faults that the in-memory bus injects on demand."""

import random
from collections import defaultdict, deque
from collections.abc import Sequence
from enum import Enum
from typing import Protocol


class Leg(Enum):
    """Which way a message goes."""

    THERE = "there"
    BACK = "back"


Fate = Sequence[float]
"""One delay in seconds for each copy that arrives. (0.0,): at once and once; (): lost; (0.0, 0.0): twice."""

ARRIVES: Fate = (0.0,)
LOST: Fate = ()
REPEATED: Fate = (0.0, 0.0)


class Faults(Protocol):
    """Decides about each message as it is sent."""

    def fate_of(self, subject: str, leg: Leg) -> Fate: ...


class ScriptedFaults:
    """The next messages of a subject suffer what was scripted, in order; then all goes well again."""

    def __init__(self) -> None:
        self._scripts: defaultdict[tuple[str, Leg], deque[Fate]] = defaultdict(deque)

    def script(self, subject: str, *fates: Fate, leg: Leg = Leg.THERE) -> None:
        """`leg` BACK: the answers to requests on `subject`."""
        self._scripts[subject, leg].extend(fates)

    def fate_of(self, subject: str, leg: Leg) -> Fate:
        scripted = self._scripts[subject, leg]
        return scripted.popleft() if scripted else ARRIVES


class RandomFaults:
    """Each message is lost, repeated or delayed (up to `max_delay_s`) with the given probabilities."""

    def __init__(self, seed: int, *, lost: float, repeated: float, delayed: float, max_delay_s: float) -> None:
        if lost + repeated + delayed > 1:
            raise ValueError(f"probabilities add up to {lost + repeated + delayed}, at most 1")
        self._random = random.Random(seed)
        self._lost = lost
        self._repeated = repeated
        self._delayed = delayed
        self._max_delay_s = max_delay_s

    def fate_of(self, subject: str, leg: Leg) -> Fate:
        fate = self._random.random()
        delay_s = self._random.random() * self._max_delay_s
        if fate < self._lost:
            return LOST
        if fate < self._lost + self._repeated:
            return (0.0, delay_s)
        if fate < self._lost + self._repeated + self._delayed:
            return (delay_s,)
        return ARRIVES
