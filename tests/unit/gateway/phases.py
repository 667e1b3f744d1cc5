"""Stops a request in a chosen phase of its life, and checks who knows of its end there."""

import asyncio
from collections.abc import Callable

from tests.unit.gateway.world import World

PHASES = ("submitting", "queued", "connecting", "prefilling", "decoding")


def hold_in(world: World, phase: str) -> Callable[[], bool]:
    """Sets the world up so that the next request stays in `phase`; returns whether it is there."""
    scheduler, pair = world.scheduler, world.pair
    match phase:
        case "submitting":
            scheduler.is_silent = True
            return lambda: len(scheduler.submits) > 0
        case "queued":
            scheduler.grants_at_once = False
            return lambda: any(held.requests for held in scheduler.helds)
        case "connecting":
            world.decode.refuses_streams = True
            return lambda: world.prefill.num_streams > 0
        case "prefilling":
            pair.stops_after = 0
            return lambda: len(pair.starts) > 0
        case "decoding":
            pair.stops_after = 4
            return lambda: len(pair.starts) > 0
    raise ValueError(phase)


async def assert_end_reached_all(world: World, phase: str) -> None:
    """The scheduler and, if they can know of the request, both workers."""
    scheduler = world.scheduler
    scheduler.is_silent = False
    await world.until_idle()
    if phase in ("submitting", "queued"):
        assert {cancel.request_id for cancel in scheduler.cancels} == {scheduler.submits[0].request_id}
        assert scheduler.finishes == []
    else:
        assert [finish.request_id for finish in scheduler.finishes] == [scheduler.submits[0].request_id]
    if phase in ("prefilling", "decoding"):
        for worker in (world.prefill, world.decode):
            await world.until(lambda w=worker: w.named("cancel"), f"{worker.worker_id} got the cancel")  # type: ignore[misc]
            assert [cancel.request_id for cancel in worker.named("cancel")] == [scheduler.submits[0].request_id]
    await asyncio.sleep(0.1)
    assert all(held.requests == () for held in scheduler.helds[-1:])
