"""The streams of gateways: who is connected, and the frames that each is sent.

A stream queues no frames. It remembers *which* sequences have updates, and a frame is made of them when the stream can
take one: one frame a step while the gateway keeps up, one larger frame when it was slow.
"""

import asyncio
from collections import deque

from weir.core.clock import Clock
from weir.core.errors import WeirError
from weir.engine.messages import SequenceEnded, SequenceKey
from weir.wire.v1 import worker_pb2
from weir.worker.requests.request_tables import OutputCollector, ending_to_pb

MAX_FRAME_TOKENS = 8192
MAX_ANSWERS = 1024
MAX_FRAME_ANSWERS = 256


class GatewayStream:
    """One connection of one gateway: the request manager marks what is to be sent, the servicer takes the frames."""

    def __init__(self, gateway_id: str) -> None:
        self.gateway_id = gateway_id
        self.error: WeirError | None = None
        self._with_updates: dict[SequenceKey, OutputCollector] = {}
        self._answers: deque[worker_pb2.SequenceUpdate] = deque()
        self._staged: deque[worker_pb2.StagedPages] = deque()
        self._step = 0
        self._changed = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._is_finishing = False
        self._is_closed = False

    def mark(self, collector: OutputCollector, step: int) -> None:
        """The sequence may have updates. Frames go out once the caller returns to the event loop."""
        if collector.has_updates:
            self._with_updates[collector.key] = collector
            self._step = max(self._step, step)
            self._changed.set()

    def answer(self, ending: SequenceEnded) -> None:
        """Ends what belongs to no sequence held here: a command is refused, or finds nothing."""
        self._answers.append(ending_to_pb(ending))
        if len(self._answers) >= MAX_ANSWERS:
            self._has_room.clear()
        self._changed.set()

    def tell_staged(self, staged: worker_pb2.StagedPages) -> None:
        """There are few of them: a handful for each sequence, and few sequences come at a time."""
        self._staged.append(staged)
        self._changed.set()

    def leave(self, collector: OutputCollector) -> None:
        """Another gateway has the sequence: nothing more of it is sent here."""
        self._with_updates.pop(collector.key, None)

    async def wait_for_room(self) -> None:
        """While a gateway takes no answers, no commands are taken from it: each makes at most one answer."""
        await self._has_room.wait()

    async def next_frame(self) -> worker_pb2.StepFrame | None:
        """Waits for updates; None when the stream is closed, or finished and all is sent. Its step is the newest one's,
        0 outside a step."""
        while not self._is_closed:
            if self._is_finishing and not (self._answers or self._with_updates or self._staged):
                return None
            await self._changed.wait()
            self._changed.clear()
            updates = [self._answers.popleft() for _ in range(min(len(self._answers), MAX_FRAME_ANSWERS))]
            self._has_room.set()
            updates += self._take_updates()
            if self._answers or self._with_updates:
                self._changed.set()
            step, self._step = self._step, 0
            staged, self._staged = self._staged, deque()
            if (updates or staged) and not self._is_closed:
                return worker_pb2.StepFrame(step=step, updates=updates, staged=staged)
        return None

    def finish(self) -> None:
        """Ends the stream once everything has been sent."""
        self._is_finishing = True
        self._changed.set()

    def close(self, error: WeirError | None = None) -> None:
        """Ends the stream, with a status if there is an error. The first call counts."""
        if not self._is_closed:
            self.error = error
        self._is_closed = True
        self._changed.set()
        self._has_room.set()

    def _take_updates(self) -> list[worker_pb2.SequenceUpdate]:
        updates, budget = [], MAX_FRAME_TOKENS
        for key, collector in list(self._with_updates.items()):
            if budget <= 0:
                break
            if collector.has_updates:
                updates.append(collector.take_update(budget))
                budget -= len(updates[-1].token_ids)
            if not collector.has_updates:
                del self._with_updates[key]
        return updates


class StreamHub:
    """The present stream of each gateway, and since when other gateways have had none."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._streams: dict[str, GatewayStream] = {}
        self._gone_since_s: dict[str, float] = {}

    @property
    def num_connected(self) -> int:
        return len(self._streams)

    def get(self, gateway_id: str) -> GatewayStream | None:
        return self._streams.get(gateway_id)

    def attach(self, gateway_id: str) -> GatewayStream:
        """Opens a stream; one that the gateway had before is closed."""
        before = self._streams.get(gateway_id)
        if before is not None:
            before.close()
        self._gone_since_s.pop(gateway_id, None)
        stream = GatewayStream(gateway_id)
        self._streams[gateway_id] = stream
        return stream

    def detach(self, stream: GatewayStream) -> bool:
        """The stream has ended. False: the gateway has a newer one already."""
        stream.close()
        if self._streams.get(stream.gateway_id) is not stream:
            return False
        del self._streams[stream.gateway_id]
        self._gone_since_s[stream.gateway_id] = self._clock.now_s()
        return True

    def expect(self, gateway_id: str) -> None:
        """A sequence of this gateway is here: it has to have a stream, or get one in time."""
        if gateway_id not in self._streams:
            self._gone_since_s.setdefault(gateway_id, self._clock.now_s())

    def take_vanished(self, after_s: float) -> tuple[str, ...]:
        """Gateways that have had no stream for longer than this; each is named once."""
        until_s = self._clock.now_s() - after_s
        vanished = tuple(gateway_id for gateway_id, since_s in self._gone_since_s.items() if since_s <= until_s)
        for gateway_id in vanished:
            del self._gone_since_s[gateway_id]
        return vanished

    def finish(self) -> None:
        """Ends every stream once all has been sent on it."""
        for stream in self._streams.values():
            stream.finish()

    def close(self) -> None:
        """Ends every stream."""
        for stream in self._streams.values():
            stream.close()
