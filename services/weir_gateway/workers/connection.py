"""The gateway's stream to one worker: one long-lived `Worker/Serve`, shared by all requests there."""

import asyncio
import contextlib
import contextvars
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import grpc
import grpc.aio

from weir.core.clock import Backoff, Clock
from weir.core.life import Attempt
from weir.core.tasks import end_tasks
from weir.rpc.channel import Dialer
from weir.rpc.conversions import attempt_from_pb
from weir.wire.v1 import worker_pb2, worker_pb2_grpc
from weir_gateway.workers.cancels import UnconfirmedCancels

logger = logging.getLogger(__name__)

_Stream = grpc.aio.StreamStreamCall[worker_pb2.ServeRequest, worker_pb2.ServeResponse]
_MAX_REMEMBERED_ENDS = 1024
_CANCEL_AGAIN_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """`lost_after_s` without a stream gives the worker up: long enough for a hiccup, short enough for a client. Where
    connections are refused its process is gone, and it is given up at once.

    So do more than `max_short_streams` in a row that lasted less: something that is sent on them ends them.
    `cancel_kept_s` must be longer than a worker takes to drop the sequences of a gateway that has no stream: some
    seconds until both ends have noticed, and some more.
    """

    lost_after_s: float = 3.0
    connect_timeout_s: float = 1.0
    first_backoff_s: float = 0.05
    max_backoff_s: float = 0.5
    write_timeout_s: float = 5.0
    max_queued_commands: int = 4096
    max_short_streams: int = 5
    cancel_kept_s: float = 60.0
    max_unconfirmed_cancels: int = 2048


class WorkerEndpoint(NamedTuple):
    """A worker's id is new at each of its starts; its address, HOST:PORT, may be the same again."""

    worker_id: str
    address: str


class Dialing(NamedTuple):
    """As whom a gateway connects, how, and with which waits."""

    gateway_id: str
    dialer: Dialer
    settings: ConnectionSettings


class UpdateSubscriber(Protocol):
    """A request that runs on the connection's worker. Called from the event loop; must not block."""

    def on_update(self, worker_id: str, update: worker_pb2.SequenceUpdate) -> None: ...

    def on_connection_lost(self, worker_id: str, message: str) -> None:
        """The worker is given up. The subscription has ended."""
        ...

    def commands_to_resume(self, worker_id: str) -> list[worker_pb2.ServeRequest]:
        """To be sent on a new stream, so that nothing that the old one may have lost is missed."""
        ...


class StageListener(Protocol):
    """A sequence whose pages are to come to the connection's worker. `command` begins it, on each new stream anew."""

    command: worker_pb2.ServeRequest

    def on_staged(self, told: worker_pb2.StagedPages) -> None: ...

    def on_connection_lost(self, message: str) -> None:
        """The worker is given up."""
        ...


class _BrokenStream(Exception):
    """The stream cannot be used any more; connect again."""


class _WorkerReplaced(Exception):
    """Another process answers at the worker's address: everything that was there is lost."""


class WorkerConnection:
    """Connects again by itself while requests or cancels need it; closes itself when the stream is gone and none do."""

    def __init__(
        self,
        endpoint: WorkerEndpoint,
        dialing: Dialing,
        clock: Clock,
        counts: Counter[str],
        cancels: UnconfirmedCancels,
        on_closed: Callable[["WorkerConnection"], None],
    ) -> None:
        self.worker_id, self._address = endpoint
        self._gateway_id, self._dialer, self._settings = dialing
        self._clock = clock
        self._counts = counts
        self._cancels = cancels
        self._on_closed = on_closed
        self._subscribers: dict[str, UpdateSubscriber] = {}
        self._stagings: dict[str, StageListener] = {}  # by request
        self._ended: OrderedDict[str, None] = OrderedDict()  # request ids, the latest last
        self._unasked: OrderedDict[str, float] = OrderedDict()  # since when it sends what nobody is subscribed to
        self._queue: asyncio.Queue[worker_pb2.ServeRequest] = asyncio.Queue(self._settings.max_queued_commands)
        self._connected = asyncio.Event()
        self._overflow = asyncio.Event()
        # An empty context: the connection is not part of the trace of the request that happened to open it.
        self._task = asyncio.create_task(
            self._run(), name=f"connection to {self.worker_id}", context=contextvars.Context()
        )

    @property
    def is_connected(self) -> bool:
        return self._connected.is_set()

    @property
    def num_requests(self) -> int:
        return len(self._subscribers)

    async def wait_connected(self) -> None:
        """Bounded: after `lost_after_s` without a stream the connection is given up, and closes."""
        await self._connected.wait()

    def subscribe(self, request_id: str, subscriber: UpdateSubscriber) -> None:
        self._subscribers[request_id] = subscriber
        self._unasked.pop(request_id, None)

    def unsubscribe(self, request_id: str) -> None:
        if self._subscribers.pop(request_id, None) is not None:
            self._note_end(request_id)

    def begin_staging(self, request_id: str, listener: StageListener) -> None:
        self._stagings[request_id] = listener
        self.send(listener.command)

    def end_staging(self, request_id: str, listener: StageListener) -> None:
        """The listener hears no more. The worker goes on until it is told otherwise, or has all."""
        if self._stagings.get(request_id) is listener:
            del self._stagings[request_id]

    def cancel(self, request_id: str, attempt: Attempt) -> None:
        """Sent again on every new stream until the worker confirms it."""
        self._note_end(request_id)
        self.send(self._cancels.note(request_id, attempt))

    def send(self, command: worker_pb2.ServeRequest) -> None:
        """Without a stream this does nothing: a new one begins with the subscribers' `commands_to_resume`."""
        if not self.is_connected:
            return
        try:
            self._queue.put_nowait(command)
        except asyncio.QueueFull:
            self._overflow.set()

    async def close(self) -> None:
        await end_tasks([self._task])

    async def _run(self) -> None:
        try:
            message = await self._keep_connected()
        except Exception:  # the boundary of this task: its requests must end, whatever went wrong
            logger.exception("connection to %s failed", self.worker_id)
            self._counts["worker_connection_failures_total"] += 1
            message = f"the connection to worker {self.worker_id} failed"
        finally:
            self._connected.clear()
            self._on_closed(self)
        self._give_up(message)

    async def _keep_connected(self) -> str:
        """Returns why the connection is given up."""
        settings = self._settings
        lost_at_s = self._clock.now_s() + settings.lost_after_s
        backoff = Backoff(settings.first_backoff_s, settings.max_backoff_s)
        num_short = 0
        while True:
            began_s = self._clock.now_s()
            try:
                await self._run_session()
            except _WorkerReplaced as replaced:
                return str(replaced)
            except _BrokenStream as broken:
                reason = str(broken)
            now_s = self._clock.now_s()
            if self._connected.is_set():
                self._connected.clear()
                self._counts["worker_connections_broken_total"] += 1
                lost_at_s = now_s + settings.lost_after_s
                num_short = num_short + 1 if now_s - began_s < settings.lost_after_s else 0
                backoff.reset()
                logger.info("stream to %s broke: %s", self.worker_id, reason)
            if not (self._subscribers or self._cancels or self._stagings):
                return f"worker {self.worker_id} is not connected"
            if await self._dialer.is_refused(self._address, settings.connect_timeout_s):
                return f"worker {self.worker_id} is lost: nobody listens at {self._address}"
            delay_s = backoff.next_delay_s()
            if now_s + delay_s >= lost_at_s or num_short > settings.max_short_streams:
                return f"worker {self.worker_id} is lost: {reason}"
            await asyncio.sleep(delay_s)

    async def _run_session(self) -> None:
        """From Hello to the end of the stream. Raises _BrokenStream or _WorkerReplaced, never returns."""
        async with contextlib.AsyncExitStack() as stack:
            channel = await stack.enter_async_context(self._dialer.open(self._address, "worker"))
            stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(channel)
            try:
                stream = stub.Serve()
                stack.callback(stream.cancel)
                async with asyncio.timeout(self._settings.connect_timeout_s):
                    await self._greet(stream)
                self._queue = asyncio.Queue(self._settings.max_queued_commands)
                self._overflow.clear()
                self._connected.set()
                self._resend()
                await self._pump(stream)
            except grpc.aio.AioRpcError as error:
                raise _BrokenStream(f"{error.code().name} {error.details() or ''}".strip()) from error
            except TimeoutError as error:
                raise _BrokenStream("no answer in time") from error
            except asyncio.InvalidStateError as error:  # what grpc.aio raises for a write to a stream that ended
                raise _BrokenStream("the stream ended") from error

    async def _greet(self, stream: _Stream) -> None:
        await stream.write(worker_pb2.ServeRequest(hello=worker_pb2.Hello(gateway_id=self._gateway_id)))
        response = await stream.read()
        if not isinstance(response, worker_pb2.ServeResponse) or not response.HasField("welcome"):
            raise _BrokenStream("no Welcome")
        found_id = response.welcome.worker_id
        if found_id != self.worker_id:
            raise _WorkerReplaced(f"worker {self.worker_id} is gone: {found_id} answers at {self._address}")

    def _resend(self) -> None:
        """Cancels first: what they free may be what others wait for."""
        for command in self._cancels.commands():
            self.send(command)
        for listener in list(self._stagings.values()):
            self.send(listener.command)
        for subscriber in list(self._subscribers.values()):
            for command in subscriber.commands_to_resume(self.worker_id):
                self.send(command)

    async def _pump(self, stream: _Stream) -> None:
        """Reads and writes until either ends."""
        halves = [asyncio.create_task(half) for half in (self._read(stream), self._write(stream), self._watch())]
        try:
            done, _ = await asyncio.wait(halves, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks(halves)
        for half in done:
            if not half.cancelled():  # grpc.aio cancels the reader of a stream that was cancelled
                half.result()
        raise _BrokenStream("the stream ended")

    async def _read(self, stream: _Stream) -> None:
        while (response := await stream.read()) is not grpc.aio.EOF:
            if not isinstance(response, worker_pb2.ServeResponse):  # grpc.aio's None for bytes that it cannot decode
                self._counts["malformed_frames_total"] += 1
                raise _BrokenStream("the worker sent bytes that are no ServeResponse")
            if not response.HasField("step_frame"):
                self._counts["malformed_frames_total"] += 1
                continue
            for update in response.step_frame.updates:
                self._on_update(update)
            for told in response.step_frame.staged:
                if told.request_id in self._stagings:
                    self._stagings[told.request_id].on_staged(told)

    async def _write(self, stream: _Stream) -> None:
        while True:
            command = await self._queue.get()
            async with asyncio.timeout(self._settings.write_timeout_s):
                await stream.write(command)

    async def _watch(self) -> None:
        await self._overflow.wait()
        raise _BrokenStream(f"{self._queue.qsize()} commands wait, and the worker reads none")

    def _on_update(self, update: worker_pb2.SequenceUpdate) -> None:
        is_confirmed = len(self._cancels) > 0 and self._cancels.try_confirm(update)
        request_id = update.request_id
        subscriber = self._subscribers.get(request_id)
        if subscriber is not None:  # perhaps of a newer dispatch than what was cancelled
            subscriber.on_update(self.worker_id, update)
            return
        if is_confirmed:
            return
        if request_id not in self._ended:
            self._counts["unexpected_updates_total"] += 1
        is_running = bool(update.token_ids) and not update.finish_reason and not update.HasField("error")
        attempt = attempt_from_pb(update.attempt)
        if is_running and self._is_unwanted(request_id, attempt):
            self.cancel(request_id, attempt)

    def _is_unwanted(self, request_id: str, attempt: Attempt) -> bool:
        now_s = self._clock.now_s()
        unasked_s = now_s - self._unasked.setdefault(request_id, now_s)
        if len(self._unasked) > _MAX_REMEMBERED_ENDS:
            self._unasked.popitem(last=False)
        may_be_early = unasked_s < 2 * self._settings.lost_after_s
        return self._cancels.is_due(request_id, attempt, may_be_early=may_be_early, again_s=_CANCEL_AGAIN_AFTER_S)

    def _note_end(self, request_id: str) -> None:
        self._ended[request_id] = None
        self._ended.move_to_end(request_id)
        while len(self._ended) > _MAX_REMEMBERED_ENDS:
            self._ended.popitem(last=False)

    def _give_up(self, message: str) -> None:
        stagings, self._stagings = self._stagings, {}
        for listener in stagings.values():
            listener.on_connection_lost(message)
        subscribers, self._subscribers = self._subscribers, {}
        if subscribers:
            logger.warning("%s; %d requests end", message, len(subscribers))
        for subscriber in subscribers.values():
            subscriber.on_connection_lost(self.worker_id, message)
        self._cancels.lose_worker()
