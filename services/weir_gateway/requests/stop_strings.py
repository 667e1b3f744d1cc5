"""Stop strings in a text that comes in pieces."""

from collections.abc import Sequence
from typing import NamedTuple


class StopResult(NamedTuple):
    """Text that is certain to be output, and the stop string that was reached, if any."""

    text: str
    matched: str | None


class StopMatcher:
    """Finds the stop string that is complete first; of several that end at the same character, the longest.

        text so far:  ........ sent ........|-- held: may become a stop string --|

    Before it is armed a stop string that is complete does not count, but one that has begun may be completed later.
    It holds back only the longest end of the text that begins a stop string, so never more than the longest of them
    less one character.
    """

    def __init__(self, stops: Sequence[str], *, is_included: bool = False) -> None:
        """`is_included`: the stop string that was reached is output too."""
        self._stops = tuple(dict.fromkeys(stops))
        self._prefixes = frozenset(stop[:length] for stop in self._stops for length in range(1, len(stop)))
        self._max_held = max((len(stop) for stop in self._stops), default=1) - 1
        self._is_included = is_included
        self._held = ""

    @property
    def is_active(self) -> bool:
        """False without stop strings: then text passes through at once."""
        return bool(self._stops)

    def push(self, text: str, *, is_armed: bool = True) -> StopResult:
        """Not to be called again after a match."""
        if not self._stops:
            return StopResult(text, None)
        num_old = len(self._held)
        text = self._held + text
        found = [
            (start + len(stop), start, stop) for stop in self._stops if (start := _find_new(text, stop, num_old)) >= 0
        ]
        if found and is_armed:
            _, start, stop = min(found)
            self._held = ""
            return StopResult(text[: start + len(stop) if self._is_included else start], stop)
        num_held = self._num_held(text)
        self._held = text[len(text) - num_held :]
        return StopResult(text[: len(text) - num_held], None)

    def finish(self) -> str:
        """The held text: no stop string can follow any more."""
        text, self._held = self._held, ""
        return text

    def _num_held(self, text: str) -> int:
        lengths = range(min(self._max_held, len(text)), 0, -1)
        return next((length for length in lengths if text[-length:] in self._prefixes), 0)


def _find_new(text: str, stop: str, num_old: int) -> int:
    """Where a stop string begins that was not complete within the first `num_old` characters; -1: nowhere."""
    return text.find(stop, max(0, num_old - len(stop) + 1))
