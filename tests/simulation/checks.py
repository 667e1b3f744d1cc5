"""The promises that hold of the stack itself: P3 all along, no defect in the log, and what must be so at the end."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.simulation.clients import BrokenPromise
from tests.simulation.exchange import check_books, unrest_of_exchange
from tests.simulation.loop import PROCESS
from weir.core.errors import Unavailable
from weir.wire.v1 import admin_pb2
from weir_scheduler.component import SchedulerComponent

if TYPE_CHECKING:
    from tests.simulation.roles import Place
    from tests.simulation.world import World

_EXPECTED_ERRORS: dict[str, type[Exception] | None] = {
    "has no lease": None,  # of a worker that was taken for dead, and is about to be
    "it keeps its role": None,  # of a worker that had to be empty for that, and whose last hand-off had no answer
    "change of role to": Unavailable,  # of one whose transfer service died again and again meanwhile: it starts anew
}
"""By what the log says, and the error that it is about; None: about none."""


class LogWatch(logging.Handler):
    """Defects show in the log first: nothing at ERROR or above is expected amid faults, but what is listed."""

    def __init__(self, world: "World") -> None:
        super().__init__(logging.INFO)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        process = PROCESS.get(None)
        if process is not None and process.is_dead:
            return
        self._world.note_log(process, record)
        error = record.exc_info[1] if record.exc_info else None
        if record.levelno >= logging.ERROR and not _is_expected(record, error):
            why = f": {error!r}" if error is not None else ""
            self._world.fail(f"{process} logged {record.levelname}: {record.getMessage()}{why}", record.exc_info)


def _is_expected(record: logging.LogRecord, error: BaseException | None) -> bool:
    return any(
        text in record.getMessage() and (kind is None or isinstance(error, kind))
        for text, kind in _EXPECTED_ERRORS.items()
    )


@contextmanager
def logged_by(watch: logging.Handler) -> Iterator[None]:
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    root.handlers[:] = [watch]
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def check_arena(world: "World", place: "Place") -> None:
    """P3: no page has two owners, none is lost, and what the tables say fits. P4: pages hold what they are named by."""
    component = place.component
    if place.process is None or component is None:
        return
    errors = place.process.context.copy().run(lambda: component.describe().integrity_errors)
    if errors:
        raise BrokenPromise(f"P3: {place.name}: {'; '.join(errors[:3])}")
    check_books(place)
    world.ledger.check(place)


def try_find_unrest(world: "World") -> str:
    """What keeps the stack from being idle. Empty: nothing does."""
    unrest = next((unrest for place in world.places if (unrest := _unrest_of(world, place))), "")
    return unrest or _strangers_to_leader(world)


_LEADER_IDLE = ("queued", "granted")
"""A standby has no such figures."""
_IDLE = {
    "transfer": (),
    "gateway": ("requests_open", "worker_subscriptions"),
    "prefill": ("num_live", "num_running", "num_waiting"),
    "decode": ("num_live", "num_running", "num_waiting"),
}


def _unrest_of(world: "World", place: "Place") -> str:
    if place.process is None or place.component is None or not place.is_ready:
        return f"{place.name} is not ready"
    if place.ask_to_end is None:
        return f"{place.name} is about to end"
    described = place.process.context.copy().run(place.component.describe)
    errors = place.process.context.copy().run(lambda: described.integrity_errors)
    if errors:
        return f"{place.name}: {'; '.join(errors[:3])}"
    metrics = described.metrics
    if place.role == "transfer":
        return _unrest_of_arena(world, place, metrics)
    if place.role == "gateway" and not metrics["access_rules_known"]:
        return f"{place.name} lets nobody in: the answer to what it asked for the rules of access was lost"
    names = (_LEADER_IDLE if metrics["is_leader"] else ()) if place.role == "scheduler" else _IDLE[place.role]
    busy = [f"{name} {metrics[name]:g}" for name in names if metrics[name]]
    return f"{place.name} has {', '.join(busy)}" if busy else ""


def _unrest_of_arena(world: "World", place: "Place", metrics: Mapping[str, float]) -> str:
    geometry = place.host.geometry
    num_pages, num_slots = metrics["free_pages"] + metrics["cached_pages"], metrics["free_slots"]
    if (num_pages, num_slots) != (geometry.num_pages, geometry.num_slots):
        return f"P3: {place.name} has {num_pages:g} of {geometry.num_pages} pages and {num_slots:g} slots"
    check_arena(world, place)
    assert place.process is not None
    return unrest_of_exchange(place, world.threads.num_of(place.process))


def _strangers_to_leader(world: "World") -> str:
    """Requests are refused where it does not know yet who serves, or still knows whom there is no more."""
    leader = next(filter(_leads, world.places), None)
    if leader is None or leader.process is None:
        return "no scheduler leads"
    admins = leader.process.context.copy().run(_component_of(leader).leader_admins)
    known = [
        f"{one.role} at {one.address}"
        for one in admins.workers.list_workers().workers
        if one.duty == admin_pb2.WORKER_DUTY_SERVING
    ]
    there = [f"{place.role} at {place.address}" for place in world.places if place.role in ("prefill", "decode")]
    return "" if sorted(known) == sorted(there) else f"{leader.name} knows {sorted(known)}, there are {sorted(there)}"


def _leads(place: "Place") -> bool:
    if place.role != "scheduler" or place.process is None or place.component is None:
        return False
    return bool(place.process.context.copy().run(place.component.describe).metrics["is_leader"])


def _component_of(scheduler: "Place") -> SchedulerComponent:
    component = scheduler.component
    assert isinstance(component, SchedulerComponent)
    return component
