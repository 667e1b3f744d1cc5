"""Drives requests: submit, grant, start, stream, close. One task a request, from its acceptance to its last message.

             ┌── its workers are lost, or give it up ──┐
drive() ─> submit ─> wait for grant ─> connect ─> Start ─> tokens ─> ended ─> end at workers, scheduler ─> done
             └────────────┴───────────────┴─────────┴────────┴─> cancelled, expired, given up: the same way out

Another dispatch goes on after the tokens that are there: they are the same whoever computes them. Where another worker
has the sequence already (`weir_gateway.driving.adoption`), the same dispatch goes on; one that migrates
(`weir_gateway.driving.migrator`) begins the next one where its pages are; and where a gateway died with the
request its first dispatch here is what a worker has of it, if one has.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from weir.bus.messages import Placement, SubmitReply
from weir.core.clock import Clock
from weir.core.errors import InternalError, Overloaded, Unavailable, WeirError, told_to_others
from weir.core.life import Attempt, Phase
from weir.core.tasks import end_tasks
from weir_gateway.driving.adoption import AdopterSearch
from weir_gateway.driving.migrator import Migrator
from weir_gateway.driving.prefix_orders import PrefixOrders
from weir_gateway.driving.request_span import RequestSpan
from weir_gateway.driving.scheduler_port import SchedulerPort, refusal_error
from weir_gateway.requests.migration import Moved
from weir_gateway.requests.quota_book import QuotaBook
from weir_gateway.requests.request_end import RETRY_AFTER_S, shutting_down
from weir_gateway.requests.request_state import RequestState
from weir_gateway.workers.connection import WorkerConnection, WorkerEndpoint
from weir_gateway.workers.connections import WorkerConnections

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DriverSettings:
    """`max_fruitless_dispatches`: how many in a row may bring a request no token; `max_dispatches`: how many there are
    at most. A request that kills its workers is not to kill all there are. After each fruitless one it waits, by
    `fruitless_wait_s` longer each time: the scheduler may not have heard of what went wrong. Of a host that is gone it
    hears of each worker alone, and for as long as their registry entries stand (3 s) it grants one after the other:
    `max_unreached_dispatches` in a row may find their workers gone.

    `no_progress_s` bounds the time without a token while all workers live: above a long prompt's prefill in a queue.

    `overdue_s` is when the decode worker is asked for tokens that should have come, `gap_s` when they count as lost.
    """

    max_requests: int = 1024
    max_queue_s: float = 900.0
    max_fruitless_dispatches: int = 3
    max_unreached_dispatches: int = 8
    fruitless_wait_s: float = 0.2
    max_dispatches: int = 16
    no_progress_s: float = 120.0
    overdue_s: float = 3.0
    probe_again_s: float = 40.0
    gap_s: float = 8.0
    tick_s: float = 1.0


class Driver:
    """Holds every request that was accepted and has not ended, and those whose end is still to be confirmed."""

    def __init__(
        self,
        port: SchedulerPort,
        connections: WorkerConnections,
        adopters: AdopterSearch,
        migrator: Migrator,
        settings: DriverSettings,
        clock: Clock,
    ) -> None:
        self._port = port
        self._migrator = migrator
        self._connections = connections
        self._adopters = adopters
        self._prefix_orders = PrefixOrders(connections)
        self._settings = settings
        self._clock = clock
        self._states: dict[str, RequestState] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._num_reserved = 0
        self._num_interruptions = 0
        self._is_draining = False

    @property
    def num_tasks(self) -> int:
        """Requests in flight, and ended ones whose end is not confirmed yet or whose output is not taken yet."""
        return len(self._tasks)

    @property
    def requests(self) -> Mapping[str, RequestState]:
        """Those that have not ended, by id; the mapping itself, not a copy."""
        return self._states

    def wants(self, request_id: str, attempt: Attempt) -> bool:
        """Whether this attempt is the present one of a request here, or will be once its adoption is known."""
        state = self._states.get(request_id)
        return state is not None and not state.phase.is_terminal and attempt >= state.attempt

    @property
    def quotas(self) -> QuotaBook:
        return self._port.quotas

    def check_is_open(self) -> None:
        """Raises Unavailable when nothing more is accepted."""
        if self._is_draining:
            raise Unavailable("the gateway is shutting down; another one may serve you", retry_after_s=RETRY_AFTER_S)

    @contextmanager
    def reserve(self, num_requests: int) -> Iterator[None]:
        """Keeps room for requests while they are checked. Raises Overloaded or Unavailable when there is none."""
        self.check_is_open()
        num_held = len(self._tasks) + self._num_reserved
        if num_held + num_requests > self._settings.max_requests:
            message = f"{num_held} requests are in flight, at most {self._settings.max_requests}; try again later"
            raise Overloaded(message, retry_after_s=RETRY_AFTER_S)
        self._num_reserved += num_requests
        try:
            yield
        finally:
            self._num_reserved -= num_requests

    def drive(self, state: RequestState, span: RequestSpan) -> None:
        """Takes charge of a request, until it has ended and `state.released` is set."""
        request_id = state.request_id
        self._states[request_id] = state
        task = asyncio.create_task(self._drive(state, span), name=f"request {request_id}")
        self._tasks[request_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(request_id, None))

    async def drain(self, deadline_s: float) -> None:
        """Accepts nothing more, and waits for what runs."""
        self._is_draining = True
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=deadline_s)

    async def stop(self, wait_s: float = 2.0) -> None:
        """Ends what still runs."""
        self._is_draining = True
        for state in tuple(self._states.values()):
            state.fail(shutting_down())
        tasks = list(self._tasks.values())
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=wait_s)
            await end_tasks(late)

    async def watch(self) -> None:
        """Runs for ever: checks every request once a tick."""
        while True:
            await asyncio.sleep(self._settings.tick_s)
            for state in tuple(self._states.values()):
                try:
                    self._check_progress(state)
                except Exception as error:  # noqa: BLE001 - the boundary of one request's check: the others' go on
                    _fail_internally(state, error)

    def metrics(self) -> dict[str, float]:
        return {
            "requests_in_flight": float(len(self._states)),
            "requests_open": float(self.num_tasks),
            "interruptions_total": float(self._num_interruptions),
            **self._migrator.metrics(),
            "adoptions_total": float(self._adopters.num_adopted),
            "claims_total": float(self._adopters.num_claimed),
            "claims_in_vain_total": float(self._adopters.num_not_claimed),
        } | self._prefix_orders.metrics()

    def check_integrity(self) -> list[str]:
        """A request that has ended is held until its task has seen that: some steps of the event loop."""
        return [f"request {request_id} has no task" for request_id in self._states if request_id not in self._tasks]

    async def _drive(self, state: RequestState, span: RequestSpan) -> None:
        timer = self._deadline_timer(state)
        advancing = asyncio.create_task(self._advance(state, span))
        try:
            await asyncio.wait([state.ended])
        finally:
            if timer is not None:
                timer.cancel()
            await end_tasks([advancing])
            state.cancel("the gateway gave the request up")
            self._states.pop(state.request_id, None)
            self._end_at_workers(state)
            span.end(state.ended.result(), state.output.num_tokens, self._clock.now_s())
        if state.is_known_to_scheduler:
            await self._port.end(state, span.context)
        await state.released.wait()

    def _deadline_timer(self, state: RequestState) -> asyncio.TimerHandle | None:
        if state.deadline_at_s is None:
            return None
        left_s = max(0.0, state.deadline_at_s - self._clock.now_s())
        return asyncio.get_running_loop().call_later(left_s, state.expire)

    async def _advance(self, state: RequestState, span: RequestSpan) -> None:
        """From dispatch to dispatch, until the request ends; it ends it itself where none is left."""
        settings = self._settings
        try:
            while True:
                error = await self._dispatch(state, span)
                if isinstance(error, Moved):
                    self._move(state, span, error.placement)
                    continue
                self._num_interruptions += 1
                span.interrupted(error, state.dispatch, state.output.num_tokens)
                _log(state, "request %s, dispatch %d: %s", state.dispatch, told_to_others(error))
                if state.try_finish():
                    return
                if self._is_hopeless(state):
                    raise error
                self._end_at_workers(state)
                num_in_vain = sum(_num_in_vain(state))
                await asyncio.sleep(settings.fruitless_wait_s * num_in_vain)
                if state.phase.is_terminal:  # cancelled meanwhile, and this task is about to be
                    return
                state.requeue()
        except WeirError as error:
            state.fail(error)
        except Exception as error:  # noqa: BLE001 - the boundary of one request: it ends, the gateway goes on
            _fail_internally(state, error)

    def _is_hopeless(self, state: RequestState) -> bool:
        settings = self._settings
        num_fruitless, num_unreached = _num_in_vain(state)
        return (
            num_fruitless >= settings.max_fruitless_dispatches
            or num_unreached >= settings.max_unreached_dispatches
            or state.dispatches.num >= settings.max_dispatches
        )

    async def _dispatch(self, state: RequestState, span: RequestSpan) -> WeirError:
        """Returns why the workers that it is given cannot go on with it; while they can, this waits."""
        is_first, has_moved = state.dispatches.num == 1, state.placement is not None
        left_at_s = self._clock.now_s() - state.silence.length_s
        if is_first and not has_moved and state.succession.has_predecessor and await self._adopters.try_claim(state):
            _log(state, "request %s of a gateway that died goes on as %s", state.attempt)
            span.claimed(state.dispatch, state.output.num_tokens)
        else:
            await self._submit_and_start(state, span)
        if has_moved:
            await self._migrator.wait_first(state, left_at_s)
        either: list[asyncio.Future[Any]] = [state.prefilled, state.interrupted]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if state.prefilled.done():
            await self._port.prefilled(state, span.context)
        while True:
            error, num_tokens = await state.interrupted, state.output.num_tokens
            lost_at_s = self._clock.now_s()
            if not state.may_be_adopted or not await self._adopters.try_find(state):
                return error
            _log(state, "request %s goes on as %s: %s", state.attempt, told_to_others(error))
            span.adopted(error, state.adoption, num_tokens, self._clock.now_s() - lost_at_s)

    def _move(self, state: RequestState, span: RequestSpan, placement: Placement) -> None:
        """Its next dispatch begins where nearly all of it is already. What its workers have sent by now counts."""
        if state.try_finish():
            return
        self._end_at_workers(state)
        state.move(placement)
        span.moved(state.dispatch, state.output.num_tokens)

    async def _submit_and_start(self, state: RequestState, span: RequestSpan) -> None:
        placement = state.placement  # of what moves
        if placement is None:
            await self._submit(state, span)
            placement = await self._wait_for_grant(state)
        span.placed(placement)
        with span.child("start"):
            await self._start(state, placement)

    async def _submit(self, state: RequestState, span: RequestSpan) -> None:
        """Returns when the request is queued, or granted already: a grant can overtake the reply. It is paid for once,
        however often it is submitted again."""
        is_again = state.is_admitted
        state.submit()
        with span.child("submit") as context:
            asking = asyncio.create_task(self._port.submit(state, context))
            try:
                either: list[asyncio.Future[Any]] = [asking, state.granted]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                reply: SubmitReply | None = None if state.granted.done() else asking.result()
            finally:
                await end_tasks([asking])
        if reply is not None and reply.queued:
            state.queue()
        elif reply is not None:
            self._port.count_refusal(reply.reason)
            error = refusal_error(state.checked, reply.reason, reply.message, reply.retry_after_ms, reply.bound)
            state.refuse(error)
        if state.is_admitted and not is_again:
            self.quotas.pay_request(state.checked.scope.tenant)

    async def _wait_for_grant(self, state: RequestState) -> Placement:
        try:
            async with asyncio.timeout(self._settings.max_queue_s):
                return await state.granted
        except TimeoutError:
            message = f"not granted within {self._settings.max_queue_s:g} s"
            raise Overloaded(message, retry_after_s=RETRY_AFTER_S) from None

    async def _start(self, state: RequestState, placement: Placement) -> None:
        """Returns when its workers are asked to start, or cannot be reached: then it is interrupted."""
        prefill = self._connections.connect(WorkerEndpoint(placement.prefill_worker_id, placement.prefill_address))
        prefill.subscribe(state.request_id, state)
        decode = self._connections.connect(WorkerEndpoint(placement.decode_worker_id, placement.decode_address))
        decode.subscribe(state.request_id, state)
        if not (prefill.is_connected and decode.is_connected):
            await _wait_connected(state, prefill, decode)
        if state.interrupted.done() or state.phase.is_terminal:  # cancelled, and this task is about to be
            return
        command = state.start()
        self._prefix_orders.begin(state, placement, command)
        if decode is not prefill:  # else there is one stream of updates, and Start asks for it
            decode.send(state.resume_command())
        prefill.send(command)

    def _end_at_workers(self, state: RequestState) -> None:
        self._prefix_orders.end(state.request_id)
        if state.is_started and not state.is_over_at_workers:
            for worker_id in _workers_of(state):
                self._connections.cancel(worker_id, state.request_id, state.attempt)
            if lost_worker_id := state.whereabouts.lost_worker_id:
                self._connections.cancel_at_peers(lost_worker_id, state.request_id, state.attempt)
        self._unsubscribe(state)

    def _unsubscribe(self, state: RequestState) -> None:
        for worker_id in _workers_of(state):
            connection = self._connections.try_get(worker_id)
            if connection is not None:
                connection.unsubscribe(state.request_id)

    def _check_progress(self, state: RequestState) -> None:
        settings = self._settings
        if state.phase is Phase.QUEUED and self._port.is_silent:
            state.fail(self._port.unavailable(state))
            return
        if not state.is_started:
            return
        if state.output.has_gap and state.silence.length_s > settings.gap_s:
            message = f"token {state.output.next_index} never came, though later ones did"
            state.interrupt(Unavailable(message, retry_after_s=RETRY_AFTER_S))
        elif state.silence.length_s > settings.no_progress_s:
            message = f"no token came for {settings.no_progress_s:g} s"
            state.interrupt(Unavailable(message, retry_after_s=RETRY_AFTER_S))
        else:
            self._probe(state)

    def _probe(self, state: RequestState) -> None:
        connection = None if state.placement is None else self._connections.try_get(state.placement.decode_worker_id)
        if connection is None:
            return
        command = state.try_probe(self._settings.overdue_s, self._settings.probe_again_s)
        if command is not None:
            connection.send(command)


def _num_in_vain(state: RequestState) -> tuple[int, int]:
    """Dispatches in a row up to the present one: those that brought no token, and those that reached no worker."""
    dispatches, is_started = state.dispatches, state.is_started
    num_fruitless = dispatches.num_fruitless(is_started=is_started, has_new_tokens=state.has_new_tokens)
    return num_fruitless, dispatches.num_unreached(is_started=is_started)


def _workers_of(state: RequestState) -> set[str]:
    placement = state.placement
    return set() if placement is None else {placement.prefill_worker_id, placement.decode_worker_id}


def _log(state: RequestState, message: str, *more: object) -> None:
    """`message` has a place for the request's id, and then for `more`."""
    logger.info(message, state.request_id, *more, extra=state.checked.log_ids)


def _fail_internally(state: RequestState, error: Exception) -> None:
    logger.error("request %s failed", state.request_id, exc_info=error, extra=state.checked.log_ids)
    state.fail(InternalError(f"internal error: {type(error).__name__}; see the gateway's log"))


async def _wait_connected(state: RequestState, *connections: WorkerConnection) -> None:
    """Or until it is interrupted, since one of them cannot be reached."""
    connecting = asyncio.create_task(_wait_all_connected(connections), name=f"connections of {state.request_id}")
    try:
        either: list[asyncio.Future[Any]] = [connecting, state.interrupted]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end_tasks([connecting])


async def _wait_all_connected(connections: Iterable[WorkerConnection]) -> None:
    for connection in connections:
        await connection.wait_connected()
