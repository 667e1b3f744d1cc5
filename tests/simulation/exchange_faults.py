"""What goes wrong with pages on their way between the hosts of a world. Each of these waits for some to strike at."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from tests.simulation.draining import drain_host, num_running, workers_of
from tests.simulation.network import Connection

if TYPE_CHECKING:
    from tests.simulation.world import World

_WITHIN_S = 10.0
"""Longer than requests come."""
_LOOK_S = 0.05
_NEVER = 1 << 30
TRANSFER_DIES = "a transfer service dies while pages cross"
_MOST_EVENTS = 120
"""Callbacks of both sides in which a transfer is over, mostly."""


async def strike_crossing(world: "World", role: str, num_events: int) -> None:
    """Of CROSSING_ROLES. What crosses is a prefix that two of the clients ask for, or what host 0 runs as it is
    drained."""
    exchange, (what, _, side) = world.exchange, role.partition("-")
    assert exchange is not None

    def on_death() -> None:
        world.struck[TRANSFER_DIES] += 1

    if what == "sequence":
        host = world.hosts[0]
        while not any(process.context.copy().run(num_running, one) for process, one in workers_of(world, host)):  # noqa: ASYNC110 - until it runs something
            await asyncio.sleep(0.01)
    exchange.begin_death(num_events or _NEVER, of_sender=side == "sender", on_death=on_death)
    if what == "sequence":
        await drain_host(world, world.hosts[0], 4000, 3.0)


async def _wait_struck(has_struck: Callable[[], bool], world: "World") -> bool:
    ends_at_s = world.loop.time() + _WITHIN_S
    while not has_struck() and world.loop.time() < ends_at_s:  # noqa: ASYNC110 - until pages cross
        await asyncio.sleep(_LOOK_S)
    return has_struck()


async def _strike_pieces(
    world: "World", strike: Callable[[Connection, bytes], bytes], num_times: int, longest_gap: int
) -> bool:
    """Of page streams. Whether one of them was."""
    exchange, num_struck = world.exchange, 0

    def count(connection: Connection, piece: bytes) -> bytes:
        nonlocal num_struck
        num_struck += 1
        world.may_fail = True
        return strike(connection, piece)

    if exchange is None:
        return False
    faults = exchange.traffic.faults
    faults.extend((world.rng.randrange(longest_gap), count) for _ in range(num_times))
    await _wait_struck(lambda: num_struck >= num_times, world)
    left = [fault for fault in faults if fault[1] is not count]
    faults.clear()
    faults.extend(left)
    return num_struck > 0


async def _flip(world: "World") -> bool:
    """Once, or several times: then the same page can come wrong twice."""

    def flip(connection: Connection, piece: bytes) -> bytes:
        at = world.rng.randrange(8 * len(piece))
        world.note(f"bit {at} of {len(piece)} bytes between {connection.client} and {connection.server.process} flips")
        flipped = bytearray(piece)
        flipped[at // 8] ^= 1 << at % 8
        return bytes(flipped)

    return await _strike_pieces(world, flip, world.rng.choice((1, 2, 6)), world.rng.choice((3, 30)))


async def _cut(world: "World") -> bool:
    """Within a page, mostly; of one transfer so often that it fails."""

    def cut(connection: Connection, piece: bytes) -> bytes:
        world.note(f"the page stream of {connection.client} to {connection.server.process} is cut")
        connection.cut()
        return piece

    return await _strike_pieces(world, cut, world.rng.choice((1, 1, 5)), world.rng.choice((10, 40)))


async def _die(world: "World") -> bool:
    exchange, has_died = world.exchange, False

    def on_death() -> None:
        nonlocal has_died
        has_died = world.may_fail = True

    if exchange is None or exchange.is_death_due:
        return False
    num_events, of_sender = world.rng.randrange(_MOST_EVENTS), world.rng.random() < 0.5
    exchange.begin_death(num_events, of_sender=of_sender, on_death=on_death)
    await _wait_struck(lambda: has_died, world)
    exchange.call_off()
    return has_died


EXCHANGE_FAULTS: dict[str, Callable[["World"], Awaitable[bool]]] = {
    "bytes of a page stream change": _flip,
    "a page stream is cut": _cut,
    TRANSFER_DIES: _die,
}
