"""Where the sequence of one request is, as far as its gateway knows, and so whose word about it counts.

nowhere ── grant ──> its prefill and its decode worker ── lost, or emptied ──> looked for ── adopted ──> another one
   └────── claim ──> looked for: a gateway had started it, and died ── a worker has it ──> there
"""

import asyncio
from dataclasses import replace

from weir.bus.messages import Placement


class Whereabouts:
    """Of the present dispatch. Its attributes are public to look at, and changed by the methods alone."""

    def __init__(self) -> None:
        self.placement: Placement | None = None
        """By grant or claim; its decode worker is the one that has the sequence now."""
        self.lost_worker_id = ""
        """The worker that the present dispatch was lost with, or the one before it, if it was lost with one."""
        self.is_awaiting_adopter = False
        """Whether whoever adopts the sequence of a lost worker, or has that of a lost gateway, is looked for."""
        self.is_claimed = False
        """Whether the present dispatch is to go on with a sequence that another gateway had started."""
        self.adopted: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """The worker that has adopted the sequence, once it was looked for."""

    def grant(self, placement: Placement) -> None:
        self.placement = placement
        self.lost_worker_id = ""

    def lose(self, worker_id: str) -> None:
        """It goes on nowhere else, as far as is known."""
        self.lost_worker_id = worker_id

    def look_for(self, *, is_claim: bool = False) -> "asyncio.Future[str]":
        """Returns what says who has it."""
        self.is_awaiting_adopter = True
        self.is_claimed = self.is_claimed or is_claim
        self.adopted = asyncio.get_running_loop().create_future()
        return self.adopted

    def find(self, worker_id: str) -> None:
        """The first one to say so has it."""
        if not self.adopted.done():
            self.adopted.set_result(worker_id)

    def end_search(self) -> None:
        self.is_awaiting_adopter = False

    def drop_claim(self) -> None:
        self.is_claimed = self.is_awaiting_adopter = False

    def follow(self, worker_id: str, address: str) -> None:
        """It is at another worker now. Raises ValueError for one that was granted nowhere."""
        if self.placement is None:
            raise ValueError("it was granted nowhere")
        self.lost_worker_id = worker_id if worker_id == self.lost_worker_id else ""  # it has given it up meanwhile
        if self.placement.is_local:
            self.placement = replace(self.placement, prefill_worker_id=worker_id, prefill_address=address)
        self.placement = replace(self.placement, decode_worker_id=worker_id, decode_address=address)

    def leave(self) -> None:
        """The next dispatch begins: nobody has it, and who was lost is remembered."""
        self.placement = None
        self.is_claimed = False

    @property
    def is_split(self) -> bool:
        return self.placement is not None and not self.placement.is_local

    @property
    def is_read_elsewhere(self) -> bool:
        """Whether a worker of another host computes most of its prompt."""
        return self.placement is not None and bool(self.placement.prefix_worker_id)

    @property
    def is_lost_at_decode(self) -> bool:
        """Whether the worker that has it, or is being handed it, is the lost one."""
        return self.placement is not None and self.lost_worker_id == self.placement.decode_worker_id

    def starts_at(self, worker_id: str) -> bool:
        return self.placement is not None and worker_id == self.placement.prefill_worker_id

    def is_prefill(self, worker_id: str) -> bool:
        """Whether the worker's part ends with the hand-off."""
        return self.placement is not None and self.placement.is_prefill_alone(worker_id)

    def is_searched_at(self, worker_id: str) -> bool:
        """Whether the worker may or may not have it: not having it says nothing of the others."""
        return not self._is_own(worker_id) or (self.is_awaiting_adopter and worker_id == self.lost_worker_id)

    def is_of_another_claim(self, worker_id: str) -> bool:
        """Two may have what was claimed, if there was more than one dispatch before: it is the first one's now."""
        is_bound = self.placement is not None
        return self.is_claimed and not self._is_own(worker_id) and not (is_bound and self.is_awaiting_adopter)

    def _is_own(self, worker_id: str) -> bool:
        return self.placement is not None and self.placement.names(worker_id)
