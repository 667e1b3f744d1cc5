"""A world is run from its start to its end, and leaves nothing behind in its process."""

import gc
import logging
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from unittest import mock

from tests.simulation.checks import logged_by
from tests.simulation.entropy import taken_from_the_world
from tests.simulation.plan import Plan, Result
from tests.simulation.world import World


def run_seed(plan: Plan) -> Result:
    """One world from start to end. Leaves nothing behind."""
    folder = Path(tempfile.mkdtemp(prefix="weir-simulation-", dir="/dev/shm"))
    _collect_quietly()
    gc.disable()  # no `finally` runs because of when a collection happens to come
    try:
        return _run_in(plan, folder)
    finally:
        _collect_quietly()
        shutil.rmtree(folder, ignore_errors=True)
        gc.enable()


def _collect_quietly() -> None:
    """What never ended: its `finally` finds a loop that does nothing."""
    with (
        mock.patch.object(sys, "unraisablehook"),
        logged_by(logging.NullHandler()),
        warnings.catch_warnings(action="ignore"),
    ):
        gc.collect()


def _run_in(plan: Plan, folder: Path) -> Result:
    world = World(plan, folder)
    with taken_from_the_world(world.loop, world.rng, world.threads):
        result = world.run()
    for host in world.hosts:
        if host.segment is not None:
            host.segment.close()
    return result
