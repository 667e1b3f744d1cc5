"""What is sent when: at the rate that can be served, ten times as much, and all at once."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from benchmarks.overload.client import Shot, Target, shoot
from weir.bench.serving.jobs import random_prompts

_PROBE_S = 0.5
_BATCH = 256


class Sender:
    """Sends with prompts of its own, drawn from the seed."""

    def __init__(self, target: Target, input_len: int, seed: int) -> None:
        self._target = target
        self._prompts = random_prompts(_BATCH, input_len, seed)
        self._random = random.Random(seed)
        self._num_sent = 0

    async def closed_loop(self, tenant: str, num_clients: int, seconds: float) -> list[Shot]:
        """So many clients, each with its next request as soon as the one before has ended."""
        until_s = time.monotonic() + seconds
        shots: list[Shot] = []

        async def client() -> None:
            while time.monotonic() < until_s:
                shots.append(await self._send(tenant))

        await asyncio.gather(*(client() for _ in range(num_clients)))
        return shots

    async def open_loop(self, tenant: str, rate_a_s: float, seconds: float) -> list[Shot]:
        """Poisson arrivals, whatever becomes of those before. Returns when all have ended."""
        began_s = time.monotonic()
        at_s, tasks = 0.0, []
        while (at_s := at_s + self._random.expovariate(rate_a_s)) < seconds:
            await asyncio.sleep(max(0.0, began_s + at_s - time.monotonic()))
            tasks.append(asyncio.create_task(self._send(tenant)))
        return list(await asyncio.gather(*tasks))

    async def burst(self, tenant: str, num: int) -> list[Shot]:
        """All at once."""
        return list(await asyncio.gather(*(self._send(tenant) for _ in range(num))))

    async def one(self, tenant: str) -> Shot:
        return await self._send(tenant)

    async def _send(self, tenant: str) -> Shot:
        self._num_sent += 1
        return await shoot(self._target, self._prompts[self._num_sent % _BATCH], tenant)


async def wait_normal(sender: Sender, tenant: str, ttft_s: float, timeout_s: float) -> float:
    """Seconds until the first request of the tenant that is served with a first token within `ttft_s`, of one each half
    second, whatever became of those before; the time-out, if there is none."""
    began_s = time.monotonic()
    normal_s: list[float] = []
    probes: list[asyncio.Task[None]] = []

    async def probe() -> None:
        shot = await sender.one(tenant)
        if shot.is_whole and shot.first_s - shot.sent_s <= ttft_s:
            normal_s.append(shot.sent_s - began_s)

    while not normal_s and time.monotonic() - began_s < timeout_s:
        probes.append(asyncio.create_task(probe()))
        await asyncio.sleep(_PROBE_S)
    await asyncio.gather(*probes)
    return min(normal_s, default=timeout_s)


@asynccontextmanager
async def idle_connections(ports: tuple[int, ...], num: int) -> AsyncIterator[list[asyncio.StreamWriter]]:
    """`num` connections on each port on which nothing is ever sent. Yields those that were let in."""
    writers: list[asyncio.StreamWriter] = []
    for port in ports:
        for _ in range(num):
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                continue
            writers.append(writer)
    try:
        yield writers
    finally:
        for writer in writers:
            writer.transport.abort()
