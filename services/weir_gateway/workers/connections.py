"""The gateway's streams to all workers, and what is to be cancelled at each."""

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial

from weir.core.clock import Clock
from weir.core.life import Attempt
from weir.rpc.channel import Dialer
from weir_gateway.workers.cancels import UnconfirmedCancels
from weir_gateway.workers.connection import ConnectionSettings, Dialing, WorkerConnection, WorkerEndpoint


class WorkerConnections:
    """One connection a worker. The worker's id is new at each of its starts, so none outlives its worker's state.

    Cancels outlive connections: a worker that was given up, and is reached again, may still run what was cancelled
    meanwhile.
    """

    def __init__(
        self,
        gateway_id: str,
        dialer: Dialer,
        settings: ConnectionSettings,
        clock: Clock,
        peers_of: Callable[[str], list[WorkerEndpoint]],
        is_wanted: Callable[[str, Attempt], bool],
    ) -> None:
        """`peers_of`: who may have got the sequences of a worker. `is_wanted`: whether this attempt at a request runs
        for this gateway, wherever."""
        self._dialing = Dialing(gateway_id, dialer)
        self._settings = settings
        self._clock = clock
        self._peers_of = peers_of
        self._is_wanted = is_wanted
        self._is_closing = False
        self._connections: dict[str, WorkerConnection] = {}
        self._cancels: dict[str, UnconfirmedCancels] = {}
        self._counts: Counter[str] = Counter()

    def connect(self, endpoint: WorkerEndpoint) -> WorkerConnection:
        """The connection to a worker, opened if need be; `wait_connected` says when it can be used."""
        worker_id = endpoint.worker_id
        if worker_id not in self._connections:
            cancels = self._cancels_at(worker_id)
            self._connections[worker_id] = WorkerConnection(
                endpoint,
                self._dialing,
                self._settings,
                self._clock,
                self._counts,
                cancels,
                self._forget,
            )
        return self._connections[worker_id]

    def try_get(self, worker_id: str) -> WorkerConnection | None:
        return self._connections.get(worker_id)

    def cancel(self, worker_id: str, request_id: str, attempt: Attempt) -> None:
        """Drops the request at the worker, now or when it is reached again."""
        connection = self._connections.get(worker_id)
        if connection is not None:
            connection.cancel(request_id, attempt)
        else:
            self._cancels_at(worker_id).note(request_id, attempt)

    def cancel_at_peers(self, worker_id: str, request_id: str, attempt: Attempt) -> None:
        """Not where it is being cancelled already, for all may be gone, and each be the peer of the others."""
        if self._is_closing:  # what would be opened now nobody closes
            return
        for endpoint in self._peers_of(worker_id):
            if not self._cancels_at(endpoint.worker_id).covers(request_id, attempt):
                self.connect(endpoint).cancel(request_id, attempt)

    async def close(self) -> None:
        self._is_closing = True
        await asyncio.gather(*(connection.close() for connection in list(self._connections.values())))

    def metrics(self) -> dict[str, float]:
        names = (
            "worker_connections_broken_total",
            "worker_connection_failures_total",
            "malformed_frames_total",
            "unexpected_updates_total",
            "cancels_forgotten_total",
        )
        self._drop_unneeded_cancels()
        connections = self._connections.values()
        return {name: float(self._counts[name]) for name in names} | {
            "worker_connections": float(len(connections)),
            "worker_connections_open": float(sum(connection.is_connected for connection in connections)),
            "worker_subscriptions": float(sum(connection.num_requests for connection in connections)),
            "cancels_unconfirmed": float(sum(len(cancels) for cancels in self._cancels.values())),
        }

    def _forget(self, connection: WorkerConnection) -> None:
        if self._connections.get(connection.worker_id) is connection:
            del self._connections[connection.worker_id]

    def _cancels_at(self, worker_id: str) -> UnconfirmedCancels:
        self._drop_unneeded_cancels()
        if worker_id not in self._cancels:
            settings = self._settings
            self._cancels[worker_id] = UnconfirmedCancels(
                worker_id,
                kept_s=settings.cancel_kept_s,
                max_entries=settings.max_unconfirmed_cancels,
                clock=self._clock,
                counts=self._counts,
                on_moved=partial(self.cancel_at_peers, worker_id),
                is_wanted=self._is_wanted,
            )
        return self._cancels[worker_id]

    def _drop_unneeded_cancels(self) -> None:
        for worker_id, cancels in list(self._cancels.items()):
            cancels.forget_old()
            if not cancels and worker_id not in self._connections:
                del self._cancels[worker_id]
