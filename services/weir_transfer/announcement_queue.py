"""Announcements for the stream of one attachment."""

import asyncio
from collections import deque

from weir.wire.v1 import arena_pb2


class AnnouncementQueue:
    """What is to be sent on one attachment's stream.

    Beyond its bound it closes itself, which ends the stream: the next attachment is answered with all that it missed.
    """

    def __init__(self, max_messages: int) -> None:
        self._max_messages = max_messages
        self._messages: deque[arena_pb2.AttachResponse] = deque()
        self._changed = asyncio.Event()
        self._is_closed = False

    def push(self, message: arena_pb2.AttachResponse) -> None:
        if len(self._messages) >= self._max_messages:
            self.close()
            return
        self._messages.append(message)
        self._changed.set()

    def close(self) -> None:
        """What was not taken yet is dropped."""
        self._is_closed = True
        self._changed.set()

    async def next(self) -> arena_pb2.AttachResponse | None:
        """The next message; None once closed."""
        while not self._messages and not self._is_closed:
            self._changed.clear()
            await self._changed.wait()
        return None if self._is_closed else self._messages.popleft()
