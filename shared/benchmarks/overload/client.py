"""Requests over plain sockets, one connection each: a client that costs little beside the server that it floods."""

import asyncio
import json
import time
from dataclasses import dataclass

_DATA = b"\ndata: "
_DONE = b"data: [DONE]"
_GIVEN_UP = (b" had no room for it within ", b" requests first take about ")
"""What the scheduler says of those that it had queued."""


@dataclass(slots=True)
class Shot:
    """What one client saw; times in seconds of this process's monotonic clock. `status` 0: no whole answer."""

    sent_s: float
    tenant: str
    status: int = 0
    answered_s: float = 0.0
    """When the head of the answer came: with all of a refusal, and a stream's first token or little before."""
    first_s: float = 0.0
    """When the first token came; 0: none."""
    ended_s: float = 0.0
    num_tokens: int = 0
    retry_after_s: float = 0.0
    was_given_up: bool = False
    """It was let in, and refused after it had waited."""
    is_whole: bool = False

    @property
    def is_refused(self) -> bool:
        return self.status in (429, 503)


@dataclass(frozen=True, slots=True)
class Target:
    """Where and what: every request asks for as many tokens, after a prompt of its own."""

    port: int
    model: str
    keys: dict[str, str]
    """Tenant -> key."""
    output_len: int

    def request(self, prompt: list[int], tenant: str, lane: str = "") -> bytes:
        """All of it, ready to be written."""
        fields = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": self.output_len,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "cache_prompt": False,
            **({"lane": lane} if lane else {}),
        }
        body = json.dumps(fields).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer {self.keys[tenant]}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + body


class _Exchange(asyncio.Protocol):
    """Writes one request and takes the answer apart as it comes."""

    def __init__(self, request: bytes, shot: Shot, ended: "asyncio.Future[None]") -> None:
        self._request = request
        self._shot = shot
        self._ended = ended
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        shot, now_s = self._shot, time.monotonic()
        if not shot.status:
            self._tail += data
            if b"\r\n\r\n" not in self._tail:
                return
            data, self._tail = self._tail, b""
            shot.answered_s = now_s
            self._read_head(data.partition(b"\r\n\r\n")[0])
        data = self._tail + data
        shot.was_given_up = shot.was_given_up or any(words in data for words in _GIVEN_UP)
        # As many events as tokens, or a little fewer where several go out at once: good enough for a ratio.
        num_events = data.count(_DATA)
        if num_events and shot.status == 200:
            shot.first_s = shot.first_s or now_s
            shot.num_tokens += num_events
        shot.is_whole = shot.is_whole or _DONE in data
        self._tail = data[-(len(_DATA) - 1) :] if shot.status == 200 else b""

    def connection_lost(self, exc: Exception | None) -> None:
        self._shot.ended_s = time.monotonic()
        if not self._ended.done():
            self._ended.set_result(None)

    def _read_head(self, head: bytes) -> None:
        status, *lines = head.split(b"\r\n")
        self._shot.status = int(status.split()[1])
        for line in lines:
            name, _, value = line.partition(b":")
            if name.lower() == b"retry-after":
                self._shot.retry_after_s = float(value)


async def shoot(target: Target, prompt: list[int], tenant: str, *, lane: str = "", timeout_s: float = 300.0) -> Shot:
    """One request; a connection that is refused or breaks gives a Shot without a whole answer."""
    request = target.request(prompt, tenant, lane)
    loop = asyncio.get_running_loop()
    shot = Shot(time.monotonic(), tenant)
    ended: asyncio.Future[None] = loop.create_future()
    try:
        async with asyncio.timeout(timeout_s):
            exchange = _Exchange(request, shot, ended)
            transport, _ = await loop.create_connection(lambda: exchange, "127.0.0.1", target.port)
            try:
                await ended
            finally:
                transport.abort()
    except (OSError, TimeoutError):
        shot.ended_s = time.monotonic()
    return shot
