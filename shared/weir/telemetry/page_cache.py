"""A page that is kept a moment: who scrapes often, or with many at once, costs what one does."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

_KeyT = TypeVar("_KeyT")
_PageT = TypeVar("_PageT")

MAX_AGE_S = 0.25


class PageCache(Generic[_KeyT, _PageT]):
    """Of few keys. Who asks while a page is being made waits for that one."""

    def __init__(self, max_age_s: float = MAX_AGE_S, now_s: Callable[[], float] = time.monotonic) -> None:
        self._max_age_s = max_age_s
        self._now_s = now_s
        self._kept: dict[_KeyT, tuple[float, _PageT]] = {}
        self._making = asyncio.Lock()

    async def page(self, key: _KeyT, make: Callable[[], Awaitable[_PageT]]) -> _PageT:
        """Raises what `make` raises, and keeps nothing then."""
        async with self._making:
            kept = self._kept.get(key)
            if kept is not None and self._now_s() - kept[0] < self._max_age_s:
                return kept[1]
            page = await make()
            self._kept[key] = self._now_s(), page
            return page
