"""Markers in a text that comes in pieces."""

import re
from collections.abc import Iterable
from typing import NamedTuple

MAX_SPACE_CHARS = 16
"""White space before a marker that belongs to it. Of a longer run the rest is text, so that a model that writes
nothing but spaces is not held back."""


class Found(NamedTuple):
    """text[:text_end] comes before the marker and the white space at it, text[end:] after it."""

    text_end: int
    marker: str
    end: int


class MarkerSet:
    """The markers that count in one region. Which one is found does not depend on how the text is cut: the one that
    begins first; of two that begin at one place, the shorter."""

    def __init__(self, markers: Iterable[str]) -> None:
        self.markers = tuple(sorted(set(markers), key=lambda marker: (len(marker), marker)))
        self._prefixes = frozenset(marker[:length] for marker in self.markers for length in range(1, len(marker)))
        self._pattern = re.compile("|".join(map(re.escape, self.markers)))
        self._first = re.compile("|".join(sorted({re.escape(marker[0]) for marker in self.markers})))
        self._max_held = max(map(len, self.markers), default=1) - 1

    def __bool__(self) -> bool:
        return bool(self.markers)

    def find(self, text: str, start: int) -> Found | None:
        """The first one in text[start:]."""
        found = self._pattern.search(text, start) if self.markers else None
        if found is None:
            return None
        return Found(_without_space(text, start, found.start()), found.group(), found.end())

    def match(self, text: str, start: int) -> str | None:
        """The one with which text[start:] begins."""
        found = self._pattern.match(text, start) if self.markers else None
        return None if found is None else found.group()

    def may_begin(self, text: str, start: int) -> bool:
        """Whether a marker may come of text[start:], which is shorter."""
        return len(text) - start <= self._max_held and text[start:] in self._prefixes

    def held_from(self, text: str, start: int) -> int:
        """Where the end of text[start:] begins that may become a marker, with the white space that would belong to
        it."""
        if not self.markers:
            return len(text)
        place = max(start, len(text) - self._max_held)
        while (found := self._first.search(text, place)) is not None:
            if text[found.start() :] in self._prefixes:
                return _without_space(text, start, found.start())
            place = found.end()
        return _without_space(text, start, len(text))


def _without_space(text: str, start: int, end: int) -> int:
    least = max(start, end - MAX_SPACE_CHARS)
    while end > least and text[end - 1].isspace():
        end -= 1
    return end
