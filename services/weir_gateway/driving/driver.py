"""Drives requests: submit, grant, start, stream, close. One task a request, from its acceptance to its last message.

            ┌── its workers are lost ──┐
open() ─> submit ─> wait for grant ─> links ─> Start ─> tokens ─> ended ─> tell scheduler and workers ─> done
            └────────────┴──────────────┴────────┴────────┴─> cancelled, expired, lost: the same way out
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from opentelemetry.context import Context

from weir.bus.messages import Finish, Outcome, Placement, SubmitReply
from weir.core.clock import Clock
from weir.core.errors import InternalError, Overloaded, Unavailable, WeirError
from weir.core.life import Phase
from weir.core.tasks import end_tasks
from weir_gateway.driving.call import RETRY_AFTER_S, RequestState
from weir_gateway.driving.spans import RequestSpan
from weir_gateway.requests.prompt_pages import pages_of
from weir_gateway.scheduler_port import SchedulerPort, refusal_error
from weir_gateway.workers.connections import WorkerConnection, WorkerConnections
from weir_gateway.workers.wire import resume_command

logger = logging.getLogger(__name__)

_OUTCOMES = {Phase.FINISHED: Outcome.FINISHED, Phase.CANCELLED: Outcome.CANCELLED}


@dataclass(frozen=True, slots=True)
class DriverSettings:
    """`max_dispatches`: how many times a request is submitted whose grants come to nothing before its start.

    `no_progress_s` bounds the time without a token while all links live: above a long prompt's prefill in a queue.

    `overdue_s` is when the decode worker is asked for tokens that should have come, `gap_s` when they count as lost.
    """

    max_requests: int = 1024
    max_queue_s: float = 900.0
    max_dispatches: int = 3
    no_progress_s: float = 120.0
    overdue_s: float = 3.0
    probe_again_s: float = 40.0
    gap_s: float = 8.0
    tick_s: float = 1.0


class Driver:
    """Holds every request that was accepted and has not ended, and those whose end is still being told."""

    def __init__(
        self, port: SchedulerPort, connections: WorkerConnections, settings: DriverSettings, clock: Clock
    ) -> None:
        self._port = port
        self._connections = connections
        self._settings = settings
        self._clock = clock
        self._calls: dict[str, RequestState] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._num_arriving = 0
        self._is_draining = False

    @property
    def num_in_flight(self) -> int:
        return len(self._calls)

    @property
    def num_tasks(self) -> int:
        """Requests in flight, and ended ones whose end is not told yet or whose output is not read yet."""
        return len(self._tasks)

    def calls(self) -> Iterable[RequestState]:
        return tuple(self._calls.values())

    def try_find(self, request_id: str) -> RequestState | None:
        return self._calls.get(request_id)

    @contextmanager
    def arriving(self, num_requests: int) -> Iterator[None]:
        """Keeps places for requests while they are checked. Raises Overloaded or Unavailable when there are none."""
        if self._is_draining:
            raise Unavailable("the gateway is shutting down; another one may serve you", retry_after_s=RETRY_AFTER_S)
        num_held = len(self._tasks) + self._num_arriving
        if num_held + num_requests > self._settings.max_requests:
            message = f"{num_held} requests are in flight, at most {self._settings.max_requests}; try again later"
            raise Overloaded(message, retry_after_s=RETRY_AFTER_S)
        self._num_arriving += num_requests
        try:
            yield
        finally:
            self._num_arriving -= num_requests

    def open(self, call: RequestState, span: RequestSpan) -> None:
        """Takes charge of a request; `call.released` must be set when its reader is gone."""
        request_id = call.request.request_id
        self._calls[request_id] = call
        task = asyncio.create_task(self._drive(call, span), name=f"request {request_id}")
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
        for call in self.calls():
            call.lose("the gateway is shutting down")
        tasks = list(self._tasks.values())
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=wait_s)
            await end_tasks(late)

    async def watch(self) -> None:
        """Runs for ever: looks at every request once a tick."""
        while True:
            await asyncio.sleep(self._settings.tick_s)
            for call in self.calls():
                try:
                    self._look_at(call)
                except Exception as error:  # the boundary of one request's check: the others' go on
                    logger.exception("request %s: check failed", call.request.request_id)
                    call.fail(InternalError(f"internal error: {type(error).__name__}; see the gateway's log"))

    def check_integrity(self) -> list[str]:
        errors = [f"request {request_id} has no task" for request_id in self._calls if request_id not in self._tasks]
        ended = [call.request.request_id for call in self.calls() if call.request.phase.is_terminal]
        return errors + [f"request {request_id} has ended and is held" for request_id in ended]

    async def _drive(self, call: RequestState, span: RequestSpan) -> None:
        timer = self._deadline_timer(call)
        advancing = asyncio.create_task(self._advance(call, span))
        try:
            await asyncio.wait([call.ended])
        finally:
            if timer is not None:
                timer.cancel()
            await end_tasks([advancing])
            call.cancel("the gateway gave the request up")
            self._calls.pop(call.request.request_id, None)
            self._cancel_at_workers(call)
            span.end(call.ended.result(), call.output.num_tokens, self._clock.now_s())
        await self._tell_scheduler(call, span.context)
        await call.released.wait()

    def _deadline_timer(self, call: RequestState) -> asyncio.TimerHandle | None:
        if call.request.deadline_at_s is None:
            return None
        left_s = max(0.0, call.request.deadline_at_s - self._clock.now_s())
        return asyncio.get_running_loop().call_later(left_s, call.expire)

    async def _advance(self, call: RequestState, span: RequestSpan) -> None:
        """Brings the request to where tokens come by themselves, or ends it."""
        try:
            placement = await self._place(call, span)
            await call.prefilled
            await self._port.prefilled(call.request.request_id, placement.dispatch, span.context)
        except WeirError as error:
            call.fail(error)
        except Exception as error:  # the boundary of one request: it ends, the gateway goes on
            logger.exception("request %s failed", call.request.request_id)
            call.fail(InternalError(f"internal error: {type(error).__name__}; see the gateway's log"))

    async def _place(self, call: RequestState, span: RequestSpan) -> Placement:
        """Returns where its workers were told to start. Raises Unavailable if those of no grant could be reached."""
        while True:
            await self._submit(call, span)
            placement = await self._wait_for_grant(call)
            span.placed(placement)
            with span.child("start"):
                if await self._try_start(call, placement):
                    return placement
            message = call.unreachable.result()
            if call.request.dispatch >= self._settings.max_dispatches:
                raise Unavailable(message, retry_after_s=RETRY_AFTER_S)
            logger.info("request %s, dispatch %d: %s", call.request.request_id, call.request.dispatch, message)
            self._leave_workers(call, placement)
            call.submit_again()

    async def _submit(self, call: RequestState, span: RequestSpan) -> None:
        """Returns when the request is queued, or granted already: a grant can overtake the answer."""
        call.submitting()
        with span.child("submit") as context:
            message = call.request.submit_message(await pages_of(call.request.checked))
            asking = asyncio.create_task(self._port.submit(message, context))
            try:
                answers: list[asyncio.Future[Any]] = [asking, call.granted]
                await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
                if call.granted.done():
                    return
                reply: SubmitReply = asking.result()
            finally:
                await end_tasks([asking])
        if not reply.queued:
            self._port.refused(reply.reason)
            call.refuse(refusal_error(call.request.checked, reply.reason, reply.message, reply.retry_after_ms))
            return
        call.request.queued()

    async def _wait_for_grant(self, call: RequestState) -> Placement:
        try:
            async with asyncio.timeout(self._settings.max_queue_s):
                return await call.granted
        except TimeoutError:
            message = f"not granted within {self._settings.max_queue_s:g} s"
            raise Overloaded(message, retry_after_s=RETRY_AFTER_S) from None

    async def _try_start(self, call: RequestState, placement: Placement) -> bool:
        """False: a worker was lost, and none was told of the request."""
        request_id = call.request.request_id
        prefill = self._connections.link_to(placement.prefill_worker_id, placement.prefill_address)
        prefill.subscribe(request_id, call)
        decode = self._connections.link_to(placement.decode_worker_id, placement.decode_address)
        decode.subscribe(request_id, call)
        connecting = asyncio.create_task(_wait_connected(prefill, decode))
        try:
            either: list[asyncio.Future[Any]] = [connecting, call.unreachable]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks([connecting])
        if call.unreachable.done():
            return False
        command = call.start()
        if decode is not prefill:  # else there is one stream of news, and Start asks for it
            decode.send(resume_command(request_id, call.request.attempt, 0))
        prefill.send(command)
        return True

    def _leave_workers(self, call: RequestState, placement: Placement) -> None:
        """They were not told of it."""
        for worker_id in {placement.prefill_worker_id, placement.decode_worker_id}:
            connection = self._connections.try_get(worker_id)
            if connection is not None:
                connection.unsubscribe(call.request.request_id)

    def _cancel_at_workers(self, call: RequestState) -> None:
        placement = call.request.placement
        if placement is None:
            return
        request_id = call.request.request_id
        for worker_id in {placement.prefill_worker_id, placement.decode_worker_id}:
            if call.is_started and not call.is_over_at_workers:
                self._connections.cancel(worker_id, request_id, call.request.attempt)
            connection = self._connections.try_get(worker_id)
            if connection is not None:
                connection.unsubscribe(request_id)

    async def _tell_scheduler(self, call: RequestState, context: Context) -> None:
        request, ending = call.request, call.ended.result()
        if not call.is_known_to_scheduler:
            return
        if request.placement is None:
            await self._port.cancel(request.request_id, context)
            return
        outcome = _OUTCOMES.get(ending.phase, Outcome.FAILED)
        finish = Finish(
            request_id=request.request_id,
            gateway_id=request.ids.gateway_id,
            dispatch=request.placement.dispatch,
            outcome=outcome,
            num_output_tokens=call.output.num_tokens,
        )
        await self._port.finish(finish, context)

    def _look_at(self, call: RequestState) -> None:
        settings = self._settings
        if call.request.phase is Phase.QUEUED and self._port.is_away:
            call.fail(self._port.unavailable())
            return
        if not call.is_started:
            return
        if call.output.has_gap and call.silent_s > settings.gap_s:
            call.lose(f"token {call.output.next_index} never came, though later ones did")
        elif call.silent_s > settings.no_progress_s:
            call.lose(f"no token came for {settings.no_progress_s:g} s")
        else:
            self._probe(call)

    def _probe(self, call: RequestState) -> None:
        placement = call.request.placement
        connection = None if placement is None else self._connections.try_get(placement.decode_worker_id)
        command = None if connection is None else call.try_probe(self._settings.overdue_s, self._settings.probe_again_s)
        if connection is not None and command is not None:
            connection.send(command)


async def _wait_connected(*connections: WorkerConnection) -> None:
    for connection in connections:
        await connection.wait_connected()
