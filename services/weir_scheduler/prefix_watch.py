"""KV events of arenas, and questions for a snapshot where some were lost."""

import asyncio
import logging

from weir.bus.endpoint import BusEndpoint
from weir.bus.prefix_messages import AskPrefixes, PrefixChanged, PrefixSnapshot
from weir.bus.protocol import BusError
from weir.bus.subjects import Subjects
from weir.core.tasks import end_tasks
from weir.scheduling.core import SchedulerCore

logger = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S = 2.0
_MAX_PENDING = 1024


class PrefixWatch:
    """Hints: whatever is lost here is asked for again, or missed without harm."""

    def __init__(self, endpoint: BusEndpoint, subjects: Subjects, core: SchedulerCore) -> None:
        self._endpoint = endpoint
        self._subjects = subjects
        self._core = core
        self._asking: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Raises BusError."""
        await self._endpoint.serve(self._subjects.prefixes, PrefixChanged, self._on_change, max_pending=_MAX_PENDING)

    def ask_for_unknown(self) -> None:
        """One question a second and arena at most."""
        for arena_id in self._core.unknown_prefixes():
            task = asyncio.create_task(self._ask(arena_id), name=f"prefixes of {arena_id}")
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def stop(self) -> None:
        await end_tasks(self._asking)

    async def _on_change(self, message: PrefixChanged) -> None:
        self._core.prefixes_changed(message)

    async def _ask(self, arena_id: str) -> None:
        subject = self._subjects.prefixes_of(arena_id)
        try:
            snapshot = await self._endpoint.ask(
                subject, AskPrefixes(arena_id), PrefixSnapshot, timeout_s=_ANSWER_TIMEOUT_S
            )
        except BusError as error:
            logger.debug("%s did not send its snapshot: %s", arena_id, error)
            return
        if snapshot.arena_id == arena_id:
            self._core.prefixes_replaced(snapshot)
