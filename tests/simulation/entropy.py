"""Time, ids and chance of the whole program, from the world. What takes a clock is given the loop; this is for the
places that only label something with a time or an id, in some thirty files, and for what an import has bound.
"""

import os
import random
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

from tests.simulation.loop import SimLoop
from tests.simulation.mortal import MortalSegment
from tests.simulation.threads import SimThreads
from weir_scheduler.counters_store import CountersStore
from weir_scheduler.leadership import Leadership

_UNIX_S = 1_700_000_000.0
"""A third of what a world takes, and nobody reads it."""


@contextmanager
def taken_from_the_world(loop: SimLoop, rng: random.Random, threads: SimThreads) -> Iterator[None]:
    """One world at a time: the functions of the modules are exchanged."""

    def unix_s() -> float:
        return _UNIX_S + loop.time()

    def unix_ns() -> int:
        return int(unix_s() * 1e9)

    def monotonic_ns() -> int:
        return int(loop.time() * 1e9)

    def new_id() -> uuid.UUID:
        return uuid.UUID(int=rng.getrandbits(128), version=4)

    exchanged: tuple[AbstractContextManager[Any], ...] = (
        mock.patch.object(time, "time", unix_s),
        mock.patch.object(time, "time_ns", unix_ns),
        mock.patch.object(time, "monotonic", loop.time),
        mock.patch.object(time, "perf_counter", loop.time),
        mock.patch.object(time, "monotonic_ns", monotonic_ns),
        mock.patch.object(uuid, "uuid4", new_id),
        mock.patch.object(os, "urandom", rng.randbytes),
        mock.patch("weir.kv.movers.pull.threading", threads),
        mock.patch("weir.kv.movers.stream_pull.threading", threads),
        mock.patch("weir.kv.movers.source.threading", threads),
        mock.patch("weir.kv.arena.segment.Segment", MortalSegment),
        mock.patch("weir.rpc.arena.lease_stream.Segment", MortalSegment),
        *(mock.patch.dict(owner.__init__.__kwdefaults__, unix_time_s=unix_s) for owner in (Leadership, CountersStore)),
    )
    random_state = random.getstate()
    random.seed(rng.getrandbits(64))
    with ExitStack() as stack:
        for one in exchanged:
            stack.enter_context(one)
        yield
    random.setstate(random_state)
