"""Defects on purpose: mends of earlier defects undone, and rules left out that the promises stand on, one at a time. A
simulation that does not find them is worth nothing.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import grpc
import grpc.aio
import numpy as np

from weir.core.errors import DeadlineExceeded, InternalError, Unavailable
from weir.core.life import FinishReason, Phase
from weir.engine.batching.batcher import Batcher
from weir.kv.arena.ownership import NotOwned, OwnershipTable
from weir.kv.messages import HandOffReceipt
from weir.kv.movers import stream_pull
from weir.kv.movers.stream_pull import PagePull
from weir.kv.records.format import end_code_of
from weir.kv.records.record import SequenceRecord
from weir.rpc.arena.client import ArenaClient
from weir.rpc.arena.lease_stream import LeaseStream
from weir.scheduling.gateways import Gateways
from weir_gateway.driving.driver import Driver
from weir_gateway.driving.scheduler_port import refusal_error
from weir_gateway.requests.output import Output
from weir_gateway.requests.request_state import RequestState
from weir_gateway.requests.token_order import TokenOrder
from weir_transfer.core import ArenaCore
from weir_transfer.exchange import prefix_fetcher, sequence_fetcher
from weir_transfer.fence import Fence
from weir_transfer.lease_keeper import LeaseKeeper
from weir_transfer.remote_prefixes import RemotePrefixes


@dataclass(frozen=True)
class Mutant:
    """`shown_by`: part of what the worlds with it say is broken. `cut_role`: in small worlds in which nothing goes
    wrong but that a process of this role dies in a write; empty: in those that seeds stand for."""

    put_in: Callable[[], AbstractContextManager[Any]]
    shown_by: str
    cut_role: str = ""


def _replaced(owner: Any, name: str, value: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: mock.patch.object(owner, name, value)


async def _nothing_waited_for(*_: Any) -> None:
    """In place of a wait."""


async def _hand_off_and_believe(self: ArenaClient, request: Any, num_pages: int) -> HandOffReceipt:
    """Whatever is refused is still the caller's, also where an earlier call may have happened."""
    del num_pages
    while True:
        request.attachment = await self._stream.wait_attached(asyncio.get_running_loop().time() + 30, DeadlineExceeded)
        request.lease_id = self.lease_id
        try:
            answer = await self._stub.HandOff(request, timeout=3.0)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
                raise InternalError(f"no hand-off: {error.details()}") from error
            if error.code() == grpc.StatusCode.NOT_FOUND:
                raise Unavailable(f"no hand-off: {error.details()}") from error
            await asyncio.sleep(0.05)
        else:
            return HandOffReceipt(answer.num_pages, answer.num_bytes_copied)


def _hand_off_once(self: ArenaCore, request: Any, error: Exception) -> Any:
    if not isinstance(error, NotOwned):
        raise error
    return _find_committed(self, request, error)


_find_committed = ArenaCore._find_committed


@contextmanager
def _hand_offs_believed() -> Iterator[None]:
    """Also by the service, which knows the newest of each slot."""
    with (
        mock.patch.object(ArenaClient, "_hand_off", _hand_off_and_believe),
        mock.patch.object(ArenaCore, "_find_committed", _hand_off_once),
    ):
        yield


def _acquire_twice(self: OwnershipTable, lease_id: int, num_pages: int, *rest: Any, **more: Any) -> Any:
    """The last page stays free in the table."""
    acquired = _try_acquire(self, lease_id, num_pages, *rest, **more)
    if acquired is not None and acquired.page_ids:
        self._free_pages(np.array(acquired.page_ids[-1:]))
    return acquired


_try_acquire = OwnershipTable.try_acquire


def _cancel_and_keep(self: Batcher, key: Any) -> None:
    with mock.patch.object(self.pool, "put_back"):
        _cancel(self, key)


def _cancel_at_any_stage(self: Batcher, key: Any) -> None:
    sequence = self._sequences.get(key)
    if sequence is not None:
        self._end(sequence, reason=FinishReason.CANCELLED)


_cancel = Batcher.cancel


def _rewind_too_far(self: Output, next_index: int) -> None:
    _rewind(self, next_index + 1 if next_index else 0)


_rewind = Output.rewind


def _end_with_pages(self: SequenceRecord, reason: FinishReason) -> None:
    self._require_writer().end_code = end_code_of(reason)
    self.publish(self._num_computed_tokens())


def _push_repeats(self: TokenOrder, attempt: Any, first_index: int, token_ids: list[int], reason: Any = None) -> Any:
    if token_ids and first_index < self.next_index:
        first_index = self.next_index
    return _push(self, attempt, first_index, token_ids, reason)


_push = TokenOrder.push


async def _submit_and_wait(self: Driver, state: Any, span: Any) -> None:
    """The reply first, whatever comes before it."""
    state.submit()
    with span.child("submit") as context:
        reply = await self._port.submit(state, context)
    if reply.queued:
        state.queue()
    else:
        state.refuse(refusal_error(state.checked, reply.reason, reply.message, reply.retry_after_ms, reply.bound))


def _queue_again(self: RequestState) -> None:
    self.is_admitted = True
    if self.phase is not Phase.QUEUED:
        self._enter(Phase.QUEUED)


@contextmanager
def _replies_first() -> Iterator[None]:
    with (
        mock.patch.object(Driver, "_submit", _submit_and_wait),
        mock.patch.object(RequestState, "queue", _queue_again),
    ):
        yield


def _end_lease_unfenced(self: Fence, lease_id: int) -> None:
    self.forget(lease_id)
    self._on_exit(lease_id)


def _claim_all(self: ArenaCore, lease_id: int, claims: Any) -> Any:
    """What a worker does not name stays its own."""
    return ()


class _AnyChecksum(int):
    """Of whatever bytes, the one that was offered."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


async def _end_no_pull(pull: PagePull) -> None:
    """Its threads go on."""


@contextmanager
def _pulls_go_on() -> Iterator[None]:
    """When what they were for has ended."""
    with (
        mock.patch.object(prefix_fetcher, "end_pull", _end_no_pull),
        mock.patch.object(sequence_fetcher, "end_pull", _end_no_pull),
        mock.patch.object(PagePull, "cancel", return_value=True),
    ):
        yield


def _settle_what_came(self: RemotePrefixes, reservation: Any, num_pages: int) -> None:
    if num_pages:
        _settle(self, reservation, num_pages)
    else:
        self.abandon(reservation)


_settle = RemotePrefixes.settle


def _count_all(self: PagePull) -> int:
    """Pages behind one that is missing too."""
    return len(self._pulled._here)


MUTANTS = {
    "pages that come back before the answer to their hand-off are given to the engine": Mutant(
        _replaced(ArenaClient, "_wait_handed_off", _nothing_waited_for), "PageDefect('held already, or named twice"
    ),
    "a repeated hand-off that is refused was not done": Mutant(
        _hand_offs_believed, "PageDefect('held already, or named twice"
    ),
    "a page is granted twice": Mutant(_replaced(OwnershipTable, "try_acquire", _acquire_twice), "has another owner"),
    "a cancel releases nothing": Mutant(
        _replaced(Batcher, "cancel", _cancel_and_keep), "does not come to rest within 60 s: P3: transfer"
    ),
    "a sequence that is being handed off is freed by its cancel": Mutant(
        _replaced(Batcher, "cancel", _cancel_at_any_stage), "release pages failed: ValueError('not held"
    ),
    "an answer goes on one token too far": Mutant(_replaced(Output, "rewind", _rewind_too_far), "P2: request"),
    "tokens that come twice count twice": Mutant(_replaced(TokenOrder, "push", _push_repeats), "got another token"),
    "the record of a sequence that has ended names its pages": Mutant(
        _replaced(SequenceRecord, "end", _end_with_pages), "is in the block table of slot"
    ),
    "a grant that overtakes its reply is not seen": Mutant(
        _replies_first, "queued -> prefilling is not in the diagram"
    ),
    "calls of an ended attachment count": Mutant(
        _replaced(LeaseKeeper, "check_attached", lambda *_: None), "is leased to a lease that does not live"
    ),
    "answers of an ended attachment count": Mutant(
        _replaced(LeaseStream, "is_current", lambda *_: True), "has another owner"
    ),
    "a lease ends before its process": Mutant(
        _replaced(Fence, "kill", _end_lease_unfenced), "the lease on the arena is lost"
    ),
    "a restart goes on with half a write": Mutant(
        _replaced(OwnershipTable, "rebuild", lambda *_: None), "its tables are damaged"
    ),
    "what a gateway that is gone held is kept": Mutant(
        _replaced(Gateways, "expired", lambda *_: []), "does not come to rest within 60 s: scheduler"
    ),
    "what a worker does not claim stays its own": Mutant(
        _replaced(ArenaCore, "_reconcile", _claim_all), "does not come to rest within 60 s: P3: transfer"
    ),
    "bytes that come are not compared with what was offered": Mutant(
        _replaced(stream_pull, "checksum_of", lambda _: _AnyChecksum()), "does not hold what"
    ),
    "pages are given away while they still come": Mutant(_pulls_go_on, "P4: transfer"),
    "pages behind one that is missing count as come": Mutant(
        _replaced(PagePull, "num_first_pages", property(_count_all)), "does not hold what"
    ),
    "what is reserved for pages that do not come is kept": Mutant(
        _replaced(RemotePrefixes, "settle", _settle_what_came), "does not come to rest within 60 s: P3: transfer"
    ),
    "pages that were offered stay pinned": Mutant(
        _replaced(RemotePrefixes, "unpin", lambda *_: None), "does not come to rest within 60 s: P3: transfer"
    ),
    "a gateway does not dispatch again": Mutant(
        _replaced(Driver, "_is_hopeless", lambda *_: True), "failed with UNAVAILABLE: worker decode", "decode"
    ),
}
