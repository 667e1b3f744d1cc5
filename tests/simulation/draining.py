"""Workers of the world are told to drain, as `weir drain` and `weir drain --host` have it, and called back."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from tests.simulation.arenas import Host
from tests.simulation.loop import SimProcess
from weir.bus.messages import SetDrain, WorkerAnswer
from weir.worker.process import WorkerProcess

if TYPE_CHECKING:
    from tests.simulation.world import World

EPOCH = 1 << 40
"""Of whoever tells workers what to do: above that of every leader."""
_ANSWER_S = 5.0


def workers_of(world: "World", host: Host) -> list[tuple[SimProcess, WorkerProcess]]:
    """Those that are up."""
    return [
        (place.process, place.component)
        for place in world.places
        if place.host is host
        and place.is_ready
        and place.process is not None
        and isinstance(place.component, WorkerProcess)
    ]


def num_running(component: WorkerProcess) -> float:
    return component.describe().metrics["num_running"]


async def drain_host(world: "World", host: Host, grace_ms: int, seconds: float) -> bool:
    """For so long. Whether any of its workers was drained."""
    workers = workers_of(world, host)
    command, back = SetDrain(EPOCH, is_draining=True, grace_ms=grace_ms), SetDrain(EPOCH, is_draining=False)
    told = [tell(world, process, functools.partial(component.on_drain, command)) for process, component in workers]
    are_drained = await asyncio.gather(*told)
    await asyncio.sleep(seconds)
    told = [tell(world, process, functools.partial(component.on_drain, back)) for process, component in workers]
    await asyncio.gather(*told)
    return any(are_drained)


async def tell(world: "World", process: SimProcess, command: Callable[[], Coroutine[Any, Any, WorkerAnswer]]) -> bool:
    """Has the process do it, and waits for a while. False: it refused, or was dead or stopped."""
    if process.is_dead:
        return False
    task = world.loop.create_task(command(), context=process.context.copy())
    await asyncio.wait([task], timeout=_ANSWER_S)
    return task.done() and not task.result().refusal
