"""A connection of a page stream: all of some buffers goes out, all of some buffers comes in, or it is over.

Blocking, for a thread that has nothing else to do: the interpreter's lock is free while the kernel copies, and one call
moves a page and more. Neither end waits longer than `idle_s` for a byte.
"""

import socket
import ssl
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

Buffer = bytes | bytearray | memoryview

_MAX_BUFFERS = 1024
"""IOV_MAX of Linux."""
_TIMEVAL = struct.Struct("@ll")


class PipeEnded(OSError):
    """The other end closed it, said nothing for too long, or the network broke it."""


class PagePipe(Protocol):
    """One owner sends and receives; anybody may end it."""

    def send(self, buffers: Sequence[Buffer]) -> None:
        """All of them, one after the other. Raises OSError."""
        ...

    def receive(self, *buffers: memoryview) -> None:
        """Fills all of them, one after the other. Raises OSError."""
        ...

    def end(self) -> None:
        """Whoever sends or receives is woken with an error, and nothing is sent or received any more."""
        ...

    def close(self) -> None:
        """For its owner, who uses it no more."""
        ...


class TcpPipe:
    """Takes over a connected socket."""

    def __init__(self, connection: socket.socket, idle_s: float) -> None:
        self._socket = connection
        self._idle_s = idle_s
        tune(connection, idle_s)
        connection.setblocking(True)
        timeout = _TIMEVAL.pack(int(idle_s), int(idle_s % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # settimeout would ask the kernel before each call
            connection.setsockopt(socket.SOL_SOCKET, option, timeout)

    def send(self, buffers: Sequence[Buffer]) -> None:
        left = [memoryview(buffer) for buffer in buffers]
        while left:
            try:
                num_sent = self._socket.sendmsg(left[:_MAX_BUFFERS])
            except BlockingIOError:
                raise PipeEnded(f"nothing could be sent for {self._idle_s:g} s") from None
            left = _behind(left, num_sent)

    def receive(self, *buffers: memoryview) -> None:
        left = list(buffers)
        while left:
            try:
                num_received, _, _, _ = self._socket.recvmsg_into(left, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                raise PipeEnded(f"nothing came for {self._idle_s:g} s") from None
            if not num_received:
                raise PipeEnded("the other end closed the connection")
            left = _behind(left, num_received)

    def end(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class TlsPipe:
    """Takes over a connected socket after its handshake. Each page passes through the library's memory."""

    def __init__(self, connection: ssl.SSLSocket, idle_s: float) -> None:
        self._socket = connection
        self._idle_s = idle_s
        tune(connection, idle_s)
        connection.settimeout(idle_s)

    def send(self, buffers: Sequence[Buffer]) -> None:
        try:
            for buffer in buffers:
                self._socket.sendall(buffer)
        except TimeoutError:
            raise PipeEnded(f"nothing could be sent for {self._idle_s:g} s") from None

    def receive(self, *buffers: memoryview) -> None:
        try:
            for buffer in buffers:
                left = buffer
                while left:
                    num_received = self._socket.recv_into(left)
                    if not num_received:
                        raise PipeEnded("the other end closed the connection")
                    left = left[num_received:]
        except TimeoutError:
            raise PipeEnded(f"nothing came for {self._idle_s:g} s") from None

    def end(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def connect_tcp(host: str, port: int, timeout_s: float, idle_s: float) -> TcpPipe:
    """Raises OSError."""
    return TcpPipe(socket.create_connection((host, port), timeout_s), idle_s)


def connect_tls(
    host: str, port: int, timeout_s: float, idle_s: float, context: ssl.SSLContext, server_name: str
) -> TlsPipe:
    """To whose certificate has this name. Raises OSError."""
    connection = socket.create_connection((host, port), timeout_s)
    try:
        return TlsPipe(context.wrap_socket(connection, server_hostname=server_name), idle_s)
    except BaseException:
        connection.close()
        raise


def tune(connection: socket.socket, idle_s: float) -> None:
    """What has been sent and is not acknowledged breaks the connection as soon. Buffers are left to the kernel, which
    sizes them by the link as long as nobody does."""
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * idle_s))


def _behind(buffers: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of them after so many bytes."""
    for index, buffer in enumerate(buffers):
        if num_bytes < len(buffer):
            return [buffer[num_bytes:], *buffers[index + 1 :]]
        num_bytes -= len(buffer)
    return []
