"""The lease table: one row a worker that may own pages, in the segment, so that a restart finds all of them."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weir.core.process import ProcessIdentity

_MAX_WORKER_ID_BYTES = 64
_MAX_ROLE_BYTES = 16


class LeaseState(IntEnum):
    """Where a lease is.

        EMPTY ──> ACTIVE <──> SUSPECT ──> FENCING ──> ORPHANED ──> EMPTY
                    └───────────┴──────────────────────┘ the process exits, or gives the lease up

    SUSPECT: silent, or its stream broke; the countdown runs. FENCING: killed, its exit is awaited; it may still write.
    ORPHANED: nobody can write any more. What a decode worker was computing waits for another one to adopt it; the next
    tick frees the rest, and what was computed stays cached.
    """

    EMPTY = 0
    ACTIVE = 1
    SUSPECT = 2
    FENCING = 3
    ORPHANED = 4


@dataclass(frozen=True, slots=True)
class Lease:
    """One row."""

    lease_id: int
    state: LeaseState
    worker_id: str
    role: str
    process: ProcessIdentity


class LeaseTable:
    """`rows`: LEASE_DTYPE [MAX_LEASES]; `counters`: COUNTERS_DTYPE []. Both are views of the segment."""

    def __init__(self, rows: NDArray[Any], counters: NDArray[Any]) -> None:
        self._rows = rows
        self._counters = counters
        self._read_bytes = b""
        self._read: list[Lease] = []
        """The rows, as they were when they were these bytes: they are looked at often and change seldom."""

    def try_add(self, worker_id: str, role: str, process: ProcessIdentity) -> int | None:
        """A new active lease; None when the table is full. Ids are never used again in the life of a segment.

        Raises ValueError for texts that the table cannot hold.
        """
        _check_text("worker_id", worker_id, _MAX_WORKER_ID_BYTES)
        _check_text("role", role, _MAX_ROLE_BYTES)
        empty = np.flatnonzero(self._rows["state"] == LeaseState.EMPTY)
        if not empty.size:
            return None
        lease_id = int(self._counters["next_lease_id"])
        self._counters["next_lease_id"] = lease_id + 1
        row = self._rows[empty[0] : empty[0] + 1]
        row["lease_id"] = lease_id
        row["pid"] = process.pid
        row["pid_start_ticks"] = process.start_ticks
        row["worker_id"] = worker_id.encode()
        row["role"] = role.encode()
        row["state"] = LeaseState.ACTIVE  # last: a row without a state is no row
        return lease_id

    def get(self, lease_id: int) -> Lease | None:
        index = self._index(lease_id)
        return None if index is None else self._lease(index)

    def of_worker(self, worker_id: str) -> Lease | None:
        """The lease of a worker by its id."""
        return next((lease for lease in self.all() if lease.worker_id == worker_id), None)

    def all(self) -> list[Lease]:
        """Every lease, in the order of their ids."""
        if (present_bytes := self._rows.tobytes()) != self._read_bytes:
            indices = np.flatnonzero(self._rows["state"] != LeaseState.EMPTY)
            self._read = sorted((self._lease(int(index)) for index in indices), key=lambda lease: lease.lease_id)
            self._read_bytes = present_bytes
        return list(self._read)

    def set_state(self, lease_id: int, state: LeaseState) -> None:
        """Raises KeyError if there is no such lease."""
        if any(lease.lease_id == lease_id and lease.state == state for lease in self.all()):
            return  # as at nearly every heartbeat
        index = self._index(lease_id)
        if index is None:
            raise KeyError(f"lease {lease_id} is not in the table")
        self._rows["state"][index] = state

    def remove(self, lease_id: int) -> None:
        """Empties the row. The lease must own nothing any more. Raises KeyError if there is no such lease."""
        self.set_state(lease_id, LeaseState.EMPTY)

    def new_attachment(self) -> int:
        """A number that no attachment of this segment ever had."""
        attachment = int(self._counters["next_attachment"])
        self._counters["next_attachment"] = attachment + 1
        return attachment

    def _index(self, lease_id: int) -> int | None:
        found = np.flatnonzero((self._rows["lease_id"] == lease_id) & (self._rows["state"] != LeaseState.EMPTY))
        return int(found[0]) if found.size else None

    def _lease(self, index: int) -> Lease:
        row = self._rows[index]
        return Lease(
            lease_id=int(row["lease_id"]),
            state=LeaseState(int(row["state"])),
            worker_id=bytes(row["worker_id"]).decode(),
            role=bytes(row["role"]).decode(),
            process=ProcessIdentity(int(row["pid"]), int(row["pid_start_ticks"])),
        )


def _check_text(field: str, text: str, max_bytes: int) -> None:
    if not 1 <= len(text.encode()) <= max_bytes:
        raise ValueError(f"{field} {text!r}: {len(text.encode())} bytes, allowed are 1 to {max_bytes}")
