"""Tells a gateway that a sequence has finished once others can find what it computed: the next turn of a chat may come
within milliseconds."""

import asyncio
from collections.abc import Sequence

from weir.engine.messages import EngineReport, SequenceEnded
from weir.worker.requests.request_manager import RequestManager

_MAX_HELD_S = 0.1


class FinishNotifier:
    """Tokens are told at once; of finished sequences only the end waits, and not for long."""

    def __init__(self, manager: RequestManager) -> None:
        self._manager = manager

    def tell(self, report: EngineReport, step: int, released: "asyncio.Task[None] | None") -> None:
        """`released`: the pages of this report's ended sequences on their way to the arena; None: there are none."""
        held = [event for event in report.events if isinstance(event, SequenceEnded) and event.reason is not None]
        for event in report.events:
            if released is None or event not in held:
                self._manager.on_event(event, step)
        if released is None or not held:
            return
        asyncio.get_running_loop().call_later(_MAX_HELD_S, self._tell, held)
        released.add_done_callback(lambda _: self._tell(held))

    def _tell(self, held: Sequence[SequenceEnded]) -> None:
        """Outside a step, whose frame may be on its way. Telling twice is harmless."""
        for event in held:
            self._manager.on_event(event, step=0)
