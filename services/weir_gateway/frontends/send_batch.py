"""Writes of many connections, sent together at the end of a pass of the event loop.

    frame of a worker ─> every stream's task renders and writes ─> flush: one send() after the other ─> back to poll

A receiver that sleeps between two sends is woken by each of them, and waking it costs more than all else of a send; one
that is woken once reads on while the others are sent.
"""

import asyncio
import logging
from typing import Any

_log = logging.getLogger(__name__)
_MAX_WAITING_BYTES = 64 << 10
"""Of one connection; more are sent at once."""


class SendBatch:
    """Of one event loop. Connections that have something to send are sent in the order in which they wrote."""

    def __init__(self) -> None:
        self._waiting: list[BatchedTransport] = []

    def add(self, transport: "BatchedTransport") -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append(transport)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for transport in waiting:
            try:
                transport.flush()
            except Exception:  # noqa: BLE001 - one connection's failure must not keep the others from being sent
                _log.exception("a connection could not be written to, and is dropped")
                transport.abort()


class BatchedTransport(asyncio.Transport):
    """A TCP transport whose writes wait for the batch; in all else the transport that it wraps."""

    def __init__(self, transport: asyncio.Transport, batch: SendBatch) -> None:
        super().__init__()
        self._transport = transport
        self._batch = batch
        self._waiting: list[bytes | bytearray | memoryview] = []
        self._num_waiting_bytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._waiting:
            self._batch.add(self)
        self._waiting.append(data)
        self._num_waiting_bytes += len(data)
        if self._num_waiting_bytes > _MAX_WAITING_BYTES:
            self.flush()

    def flush(self) -> None:
        """Sends what was written, as one piece."""
        waiting, self._waiting, self._num_waiting_bytes = self._waiting, [], 0
        if waiting and not self._transport.is_closing():
            self._transport.write(waiting[0] if len(waiting) == 1 else b"".join(waiting))

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        self._waiting, self._num_waiting_bytes = [], 0
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_write_buffer_size(self) -> int:
        return self._num_waiting_bytes + self._transport.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._transport.set_protocol(protocol)
