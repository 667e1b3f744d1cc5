"""What goes wrong in a world. Each seed has some kinds of faults and lacks the others (swarm testing: Groce et al.,
ISSTA 2012): what is always there hides what happens without it.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from tests.simulation.clients import BrokenPromise
from tests.simulation.draining import EPOCH, drain_host, num_running, tell, workers_of
from tests.simulation.exchange_faults import EXCHANGE_FAULTS
from tests.simulation.loop import SimProcess
from tests.simulation.roles import ROLES, Place
from weir.bus.messages import SetDrain, SetRole
from weir.worker.process import WorkerProcess

if TYPE_CHECKING:
    from tests.simulation.world import World

_LONGEST_STOP_S = 5.0
_MAX_TRIES = 600
_TRY_AGAIN_S = 0.05
_STRIKES_WITHIN_S = 5.0
_WRITES_WITHIN_S = 1.0
_HOST_IS_DRAINED = "a host is drained"
_Fault = Callable[["World"], Awaitable[bool]]
"""False: it had no effect."""

CLIENT_KINDS = ("client leaves", "client reads slowly", "deadline")
LOSSES = ("answers are lost", "messages are lost")
RATE_KINDS = (*LOSSES, "the network is slow", "the bus is slow")


def draw_mix(rng: random.Random, *, exchanges: bool) -> frozenset[str]:
    """At least three kinds that strike. `exchanges`: pages cross between the hosts."""
    among_hosts = (_HOST_IS_DRAINED, *EXCHANGE_FAULTS)
    always = sorted(FAULTS.keys() - set(among_hosts))
    striking = rng.sample(always, rng.randrange(3, len(always) + 1))
    crossing = [kind for kind in among_hosts if exchanges and rng.random() < 0.7]
    more = [kind for kind in (*CLIENT_KINDS, *RATE_KINDS) if rng.random() < 0.4]
    return frozenset((*striking, *crossing, *more))


def set_rates(world: "World") -> None:
    mix, rng = world.mix, world.rng
    world.may_fail = not mix.isdisjoint(RATE_KINDS)
    if "answers are lost" in mix:
        world.network.lost_answers = rng.choice((0.02, 0.1, 0.3))
    if "messages are lost" in mix:
        world.hub.lost = rng.choice((0.01, 0.05, 0.2))
    if "the network is slow" in mix:
        world.network.longest_delay_s = rng.choice((0.01, 0.05, 0.3))
    if "the bus is slow" in mix:
        world.hub.longest_delay_s = rng.choice((0.01, 0.05, 0.3))


async def strike(world: "World", num_faults: int, span_s: float) -> None:
    """One after the other, some at the same time as others are still on. Those that wait for pages to cross come beside
    the others, and early."""
    rng = world.rng
    kinds = sorted(world.mix & FAULTS.keys() - EXCHANGE_FAULTS.keys())
    crossing = sorted(world.mix & EXCHANGE_FAULTS.keys())
    times_s = [(rng.random() * span_s, rng.choice(kinds)) for _ in range(num_faults if kinds else 0)]
    times_s += [(rng.random() * span_s / 2, kind) for kind in crossing]
    began_s = world.loop.time()
    under_way = []
    for at_s, kind in sorted(times_s):
        await asyncio.sleep(max(0.0, began_s + at_s - world.loop.time()))
        under_way.append(asyncio.ensure_future(_strike_once(world, kind)))
    await asyncio.gather(*under_way)


async def _strike_once(world: "World", kind: str) -> None:
    ends_at_s = world.loop.time() + _STRIKES_WITHIN_S
    while world.loop.time() < ends_at_s:
        if await FAULTS[kind](world):
            world.struck[kind] += kind not in _IN_WRITE
            return
        await asyncio.sleep(_TRY_AGAIN_S)
    waiting = (*_IN_WRITE, _HOST_IS_DRAINED)
    others = sorted(world.mix & FAULTS.keys() - {*waiting, *EXCHANGE_FAULTS})
    if kind in waiting and others:  # nobody writes any more, or runs
        await _strike_once(world, world.rng.choice(others))


def _crash(role: str) -> _Fault:
    async def crash(world: "World") -> bool:
        place = world.try_draw_place(role)
        if place is None or place.process is None:
            return False
        world.begin_fault(f"{place.name} is killed")
        world.crash(place.process)
        return True

    return crash


def death_in_write(name: str) -> str:
    """The kind of fault that it is for the process of that name."""
    return "transfer dies in a write" if name.startswith("transfer") else "worker dies in a write"


_IN_WRITE = ("transfer dies in a write", "worker dies in a write")
"""These count in the write."""


def _crash_in_write(*roles: str) -> _Fault:
    async def crash(world: "World") -> bool:
        place = world.try_draw_place(*roles)
        if place is None or place.process is None or place.process.dies_at_write is not None:
            return False
        process, ends_at_s = place.process, world.loop.time() + _WRITES_WITHIN_S
        at_write = process.dies_at_write = process.num_writes + world.rng.randrange(1, 40)
        world.note(f"{place.name} is to die at write {at_write} into the segment")
        while not process.is_dead and world.loop.time() < ends_at_s:  # noqa: ASYNC110 - until it writes
            await asyncio.sleep(_TRY_AGAIN_S)
        process.dies_at_write = None
        return process.num_writes >= at_write

    return crash


async def _stop(world: "World") -> bool:
    place = world.try_draw_place(*ROLES)
    if place is None or place.process is None:
        return False
    process, seconds = place.process, world.rng.choice((0.05, 0.5, 1.5, 3.0, _LONGEST_STOP_S))
    world.begin_fault(f"{place.name} is stopped for {seconds} s")
    world.stop(process)
    await asyncio.sleep(seconds)
    world.proceed(process)
    return True


async def _end_in_order(world: "World") -> bool:
    place = world.try_draw_place(*ROLES)
    if place is None or place.ask_to_end is None or place.process is None:
        return False
    world.begin_fault(f"{place.name} is asked to end")
    place.process.context.copy().run(place.ask_to_end, "SIGTERM")
    return True


async def _cut(world: "World") -> bool:
    connections = world.network.connections
    if not connections:
        return False
    connection = world.rng.choice(connections)
    world.begin_fault(f"the connection of {connection.client} to {connection.server.process} is cut")
    connection.cut()
    return True


async def _block(world: "World") -> bool:
    pairs = [one.processes for one in world.network.connections if not world.is_one_host(*one.processes)]
    if not pairs:
        return False
    client, server = world.rng.choice(pairs)
    ways = world.rng.choice((((client, server),), ((server, client),), ((client, server), (server, client))))
    seconds = world.rng.choice((0.1, 1.0, 4.0, 9.0))
    world.begin_fault(f"no way for {seconds} s: {', '.join(f'{one} to {other}' for one, other in ways)}")
    for way in ways:
        world.network.block(*way)
    await asyncio.sleep(seconds)
    for way in ways:
        world.network.unblock(*way)
    return True


async def _bus_away(world: "World") -> bool:
    if not world.hub.is_up:
        return False
    seconds = world.rng.choice((0.1, 1.0, 3.0, 6.0))
    world.begin_fault(f"NATS is away for {seconds} s")
    world.hub.stop()
    await asyncio.sleep(seconds)
    world.hub.start()
    return True


async def _bus_cut_off(world: "World") -> bool:
    buses = [bus for bus in world.hub.buses if bus.is_at_server]
    if not buses:
        return False
    bus, seconds = world.rng.choice(buses), world.rng.choice((0.0, 0.5, 2.0, 5.0))
    world.begin_fault(f"{bus.process} is cut off from NATS for {seconds} s")
    bus.hold_off()
    await asyncio.sleep(seconds)
    bus.let_back()
    return True


async def _drain(world: "World") -> bool:
    """As operators do, who think better of it."""
    worker = _try_draw_worker(world)
    if worker is None:
        return False
    place, process, component = worker
    world.begin_fault(f"{place.name} is drained")
    grace_ms = world.rng.choice((0, 300, 2000))
    command = SetDrain(EPOCH, is_draining=True, grace_ms=grace_ms)
    is_drained = await tell(world, process, lambda: component.on_drain(command))
    await asyncio.sleep(world.rng.choice((0.1, 1.0, 3.0)))
    await tell(world, process, lambda: component.on_drain(SetDrain(EPOCH, is_draining=False)))
    return is_drained


async def _drain_host(world: "World") -> bool:
    """What the workers of one run goes on at another one, where there is room."""
    if world.exchange is None:
        return False
    host = world.rng.choice(world.hosts)
    if not any(process.context.copy().run(num_running, component) for process, component in workers_of(world, host)):
        return False
    world.begin_fault(f"the workers of host {host.index} are drained")
    return await drain_host(world, host, world.rng.choice((300, 2000, 4000, 4000)), world.rng.choice((0.5, 2.0, 4.0)))


async def _change_role(world: "World") -> bool:
    """There and back again."""
    worker = _try_draw_worker(world)
    if worker is None:
        return False
    place, process, component = worker
    other = "prefill" if place.role == "decode" else "decode"
    world.begin_fault(f"{place.name} becomes a {other} worker")
    changes = await tell(world, process, lambda: component.on_role(SetRole(EPOCH, other, 500)))
    await asyncio.sleep(world.rng.choice((0.5, 2.0, 4.0)))
    for _ in range(_MAX_TRIES):
        await tell(world, process, lambda: component.on_role(SetRole(EPOCH, place.role, 500)))
        await asyncio.sleep(_TRY_AGAIN_S)
        described = component.describe()
        if process.is_dead or (described.role == place.role and not described.metrics["is_changing_role"]):
            return changes
    raise BrokenPromise(f"liveness: {place.name} did not take its role back")


def _try_draw_worker(world: "World") -> tuple[Place, SimProcess, WorkerProcess] | None:
    place = world.try_draw_place("prefill", "decode")
    if place is None or place.process is None or not place.is_ready or not isinstance(place.component, WorkerProcess):
        return None
    return place, place.process, place.component


FAULTS: dict[str, _Fault] = {
    **{f"{role} is killed": _crash(role) for role in ROLES},
    "transfer dies in a write": _crash_in_write("transfer"),
    "worker dies in a write": _crash_in_write("prefill", "decode"),
    "a process is stopped": _stop,
    "a process ends in order": _end_in_order,
    "a worker is drained": _drain,
    "a worker changes its role": _change_role,
    _HOST_IS_DRAINED: _drain_host,
    "a connection is cut": _cut,
    "a way is blocked": _block,
    "NATS is away": _bus_away,
    "a process is cut off from NATS": _bus_cut_off,
    **EXCHANGE_FAULTS,
}
