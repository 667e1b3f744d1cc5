"""Holds the end of a sequence back until others can find what it computed: the next turn of a chat may come within
milliseconds."""

import asyncio
from collections.abc import Sequence

from weir.engine.messages import EngineReport, SequenceEnded
from weir.worker.requests.request_manager import RequestManager

_MAX_HELD_S = 0.1


class FinishNotifier:
    """Passes a report's events to the request manager: tokens at once, ends of finished sequences a little later."""

    def __init__(self, manager: RequestManager) -> None:
        self._manager = manager

    def on_report(self, report: EngineReport, step: int, released: "asyncio.Task[None] | None") -> None:
        """`released`: the pages of this report's ended sequences on their way to the arena; None: there are none."""
        held = [event for event in report.events if isinstance(event, SequenceEnded) and event.reason is not None]
        for event in report.events:
            if released is None or event not in held:
                self._manager.on_event(event, step)
        if released is None or not held:
            return
        asyncio.get_running_loop().call_later(_MAX_HELD_S, self._notify, held)
        released.add_done_callback(lambda _: self._notify(held))

    def _notify(self, held: Sequence[SequenceEnded]) -> None:
        """Outside a step, whose frame may be on its way. A second notification is ignored."""
        for event in held:
            self._manager.on_event(event, step=0)
