"""Sequences of other hosts that are about to go on here: their pages come while they go on there.

Stage ─> pages come ─> so many tokens are here (told each time) ─> no more come (told with the reason)
             └──────── Cancel, or the gateway's stream has ended ──────> given up
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from weir.core.errors import WeirError
from weir.engine.messages import SequenceKey
from weir.kv.geometry import PAGE_TOKENS
from weir.rpc.conversions import attempt_to_pb
from weir.wire.v1 import worker_pb2
from weir.worker.requests.streams import GatewayStream
from weir.worker.tasks import WorkerTasks

_log = logging.getLogger(__name__)
MAX_STAGINGS = 8


class Stagings:
    """Of one worker; what has come stays cached on its host, and a Start finds it there."""

    def __init__(
        self, stage: Callable[[str, str], AsyncGenerator[int]], request_shutdown: Callable[[str], None]
    ) -> None:
        """`stage`: as that of `weir.rpc.arena.client.ArenaClient`."""
        self._stage = stage
        self._tasks = WorkerTasks(request_shutdown)
        self._running: dict[tuple[GatewayStream, str], asyncio.Task[None]] = {}
        """By stream and request."""
        self._num_begun = 0
        self._num_refused = 0

    def begin(self, stream: GatewayStream, key: SequenceKey, pages_address: str) -> None:
        """A newer one of the same request takes the place of an older."""
        self.cancel(stream, key.request_id)
        if len(self._running) >= MAX_STAGINGS:
            self._num_refused += 1
            stream.tell_staged(_over(key, f"{MAX_STAGINGS} sequences are on their way to this worker already"))
            return
        self._num_begun += 1
        place = stream, key.request_id
        task = self._tasks.spawn(self._bring(stream, key, pages_address), f"staging of {key.request_id}")
        self._running[place] = task
        task.add_done_callback(lambda _: self._forget(place, task))

    def cancel(self, stream: GatewayStream, request_id: str) -> None:
        """Its gateway gives it up."""
        task = self._running.pop((stream, request_id), None)
        if task is not None:
            task.cancel()

    def cancel_all(self, stream: GatewayStream) -> None:
        """It has ended: its gateway does not hear of them any more."""
        for one, request_id in list(self._running):
            if one is stream:
                self.cancel(stream, request_id)

    async def stop(self) -> None:
        await self._tasks.stop()

    def metrics(self) -> dict[str, float]:
        return {
            "stagings_under_way": float(len(self._running)),
            "stagings_total": float(self._num_begun),
            "stagings_refused_total": float(self._num_refused),
        }

    def _forget(self, place: tuple[GatewayStream, str], task: "asyncio.Task[None]") -> None:
        if self._running.get(place) is task:
            del self._running[place]

    async def _bring(self, stream: GatewayStream, key: SequenceKey, pages_address: str) -> None:
        attempt, problem, num_tokens = attempt_to_pb(key.attempt), "no more of its pages come", 0
        try:
            async with aclosing(self._stage(key.request_id, pages_address)) as staged:
                async for num_pages in staged:
                    num_tokens = num_pages * PAGE_TOKENS
                    told = worker_pb2.StagedPages(request_id=key.request_id, attempt=attempt, num_tokens=num_tokens)
                    stream.tell_staged(told)
        except WeirError as error:
            _log.info("request %s: its pages do not come from %s: %s", key.request_id, pages_address, error)
            problem = str(error)
        stream.tell_staged(_over(key, problem, num_tokens))


def _over(key: SequenceKey, problem: str, num_tokens: int = 0) -> worker_pb2.StagedPages:
    return worker_pb2.StagedPages(
        request_id=key.request_id, attempt=attempt_to_pb(key.attempt), num_tokens=num_tokens, problem=problem
    )
