"""Finds the worker that goes on with a sequence after its own, or its gateway, has gone, or its worker was emptied.

The transfer service passes the sequences of a worker that has ended, or drains, to another one that shares its memory.
It does not tell gateways: a gateway asks each worker that may have got the sequence, and the first that has it answers.
So does a gateway that goes on with a request of one that died: the sequence is where nobody told it.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from weir.core.clock import Clock
from weir_gateway.requests.request_state import RequestState
from weir_gateway.workers.connection import WorkerEndpoint
from weir_gateway.workers.connections import WorkerConnections
from weir_gateway.workers.decode_workers import DecodeWorkers


@dataclass(frozen=True, slots=True)
class AdoptionSettings:
    """`wait_s`: how long to look where others could go on as well, `successor_wait_s` where nobody can: until a worker
    has started in the place of the one that has gone. `claim_wait_s`: how long workers are asked for the sequence of a
    gateway that died, before it is computed again."""

    wait_s: float = 2.0
    successor_wait_s: float = 30.0
    claim_wait_s: float = 1.0


class AdopterSearch:
    """Over the connections of a gateway."""

    def __init__(
        self, connections: WorkerConnections, workers: DecodeWorkers, settings: AdoptionSettings, clock: Clock
    ) -> None:
        self._connections = connections
        self._workers = workers
        self._settings = settings
        self._clock = clock
        self.num_adopted = 0
        self.num_claimed = 0
        self.num_not_claimed = 0

    async def try_find(self, state: RequestState) -> bool:
        """True: another worker has the sequence, and sends what is new of it. False: nobody came in time, or the
        request was interrupted once more; whoever still gets the sequence drops it."""
        placement = state.placement
        if placement is None or state.whereabouts.lost_worker_id not in self._workers:
            return False  # nothing shows where it was
        lost_worker_id, adopted = state.await_adopter()
        # Its own worker is asked no more, and unsubscribed with the others; but emptied, it may be given it back.
        asked = {lost_worker_id: WorkerEndpoint(lost_worker_id, placement.decode_address)}
        try:
            await self._ask_until(state, lost_worker_id, asked)
            if not adopted.done():
                return False
            state.follow(*asked.pop(adopted.result()))
            self.num_adopted += 1
            return True
        finally:
            state.whereabouts.end_search()
            self._leave(state, asked.keys(), is_found=adopted.done())

    async def try_claim(self, state: RequestState) -> bool:
        """Of a request that a gateway died with. True: a worker has its sequence, and sends all of it. False: it is to
        be computed, under the next dispatch; where nobody can have it, at once."""
        model = state.checked.model.name
        can_be_whole = state.checked.sampling.prompt_logprobs is None  # those are not with the sequence
        claimed = state.await_claim()
        asked: dict[str, WorkerEndpoint] = {}
        try:
            if can_be_whole and self._workers.serving(model):
                ends_at_s = self._clock.now_s() + self._settings.claim_wait_s
                while not claimed.done() and (left_s := ends_at_s - self._clock.now_s()) > 0:
                    self._ask_all(state, self._workers.serving(model), asked)
                    either: list[asyncio.Future[Any]] = [claimed, self._workers.changed]
                    await asyncio.wait(either, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if claimed.done():
                state.follow(*asked.pop(claimed.result()))
                self.num_claimed += 1
                return True
            self.num_not_claimed += 1
            return False
        finally:
            self._leave(state, asked.keys(), is_found=claimed.done())
            if not claimed.done():
                state.drop_claim(was_told=bool(asked))

    async def _ask_until(self, state: RequestState, lost_worker_id: str, asked: dict[str, WorkerEndpoint]) -> None:
        settings, clock = self._settings, self._clock
        ends_at_s = clock.now_s() + settings.successor_wait_s
        has_others = False
        while True:
            self._ask_all(state, self._workers.peers_of(lost_worker_id), asked)
            if not has_others and self._workers.has_others(lost_worker_id):
                has_others = True
                ends_at_s = min(ends_at_s, clock.now_s() + settings.wait_s)
            left_s = ends_at_s - clock.now_s()
            if left_s <= 0 or state.whereabouts.adopted.done() or state.interrupted.done():
                return
            either: list[asyncio.Future[Any]] = [state.whereabouts.adopted, state.interrupted, self._workers.changed]
            await asyncio.wait(either, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)

    def _ask_all(
        self, state: RequestState, endpoints: Iterable[WorkerEndpoint], asked: dict[str, WorkerEndpoint]
    ) -> None:
        """Each once."""
        for endpoint in endpoints:
            if endpoint.worker_id not in asked:
                asked[endpoint.worker_id] = endpoint
                connection = self._connections.connect(endpoint)
                connection.subscribe(state.request_id, state)
                connection.send(state.resume_command())  # without a stream it begins with this

    def _leave(self, state: RequestState, worker_ids: Iterable[str], *, is_found: bool) -> None:
        """Who has it not may still be the one that adopts it next, unless nobody is to have it any more."""
        for worker_id in worker_ids:
            self._unsubscribe(worker_id, state)
            if not is_found:
                self._connections.cancel(worker_id, state.request_id, state.attempt)

    def _unsubscribe(self, worker_id: str, state: RequestState) -> None:
        connection = self._connections.try_get(worker_id)
        if connection is not None:
            connection.unsubscribe(state.request_id)
