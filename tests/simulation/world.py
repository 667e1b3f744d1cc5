"""One world: a whole stack in one event loop, from a seed. It is started, struck, healed, and must be well again."""

import asyncio
import gc
import logging
import random
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.simulation.arenas import PAGE_BYTES, Host, Killer, ProcessHandle
from tests.simulation.bus import SimHub
from tests.simulation.checks import LogWatch, check_arena, logged_by, try_find_unrest
from tests.simulation.clients import BrokenPromise, Client, Outcome, RequestSpec, draw_specs
from tests.simulation.exchange import Exchange, PageLedger
from tests.simulation.exchange_faults import strike_crossing
from tests.simulation.faults import LOSSES, death_in_write, draw_mix, set_rates, strike
from tests.simulation.loop import ProcessDied, SimLoop, SimProcess, Stuck
from tests.simulation.network import Network
from tests.simulation.page_streams import PageTraffic
from tests.simulation.plan import CROSSING_ROLES, Plan, Result
from tests.simulation.roles import DIGEST, MAX_CONTEXT, ROLES, Place, run_process
from tests.simulation.threads import SimThreads
from weir.bus.protocol import Bus
from weir.core.process import ProcessIdentity
from weir.scheduling.limits import PlacingLimits, RouterName

_MAX_EVENTS = 250_000
_START_S = 30.0
_ENDS_WITHIN_S = 60.0
"""Of the last fault: every request has ended."""
_IDLE_WITHIN_S = 60.0
_CHECK_EVERY_WRITES = 8
_STORY_LINES = 400
_NUM_REQUESTS_OF_CUTS = {1: 3, 2: 4}
"""By the number of hosts: two of those of two hosts begin alike."""


class World(Killer):
    """Everything is drawn from the seed."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan = plan
        shape = random.Random(plan.seed)
        self.rng = random.Random(shape.getrandbits(64))
        self._cut = plan.cut
        num_hosts, exchanges = _draw_hosts(shape, plan)
        self.mix = draw_mix(shape, exchanges=exchanges) if plan.cut is None else frozenset()
        if plan.mix is not None:
            self.mix &= plan.mix
        self.loop = self.clock = SimLoop(self.rng, _MAX_EVENTS)
        self.loop.set_exception_handler(self._on_loop_error)
        self.network = Network(self.loop, self.rng)
        self.threads = SimThreads(self.loop, self.rng)
        self.loop.run_work = self.threads.run
        self.exchange = Exchange(self, PageTraffic(self.network, self.threads, self.rng)) if exchanges else None
        """None: the hosts have nothing to do with one another."""
        self.hub = SimHub(self.loop, self.rng)
        self.step_s = shape.choice((0.01, 0.03, 0.05) if exchanges else (0.002, 0.01, 0.03))
        self.plans_ahead = shape.random() < 0.25
        self.page_overcommit = shape.choice((1.0, 1.0, 2.0))
        self.swap_bytes = shape.choice((0, 0, 8 * PAGE_BYTES))
        self.hosts = [
            Host(index, folder, shape.choice((48, 60, 120) if exchanges else (36, 60, 120)), MAX_CONTEXT)
            for index in range(num_hosts)
        ]
        self.placing = _draw_placing(shape, plan.seed) if exchanges else PlacingLimits()
        are_apart = exchanges and plan.cut is None and shape.random() < 0.3
        self.places = self._draw_places(shape, are_apart=are_apart)
        self.struck: Counter[str] = Counter()
        """How often each kind of fault had an effect."""
        self.may_fail = False
        """Whether requests may from now on: something went wrong that was more than the one death of a cut."""
        self._num_faults_wanted = shape.randrange(3, 9) if plan.cut is None else 0
        self._span_s = shape.choice((2.0, 4.0, 8.0)) if plan.cut is None else 0.3
        self._specs = self._draw_specs(shape, begin_long=exchanges)[: plan.max_requests]
        self.ledger = PageLedger(DIGEST)
        self.ledger.add(self._specs)
        self.outcomes: list[Outcome] = []
        self.story: deque[str] = deque(maxlen=_STORY_LINES)
        self.broken = ""
        self.trace = 0
        self._num_pids = 0
        self._processes: dict[int, SimProcess] = {}
        self._handles: dict[int, SimProcess] = {}
        self._num_fds = 100
        self._is_over = False
        self._num_writes_checked: dict[str, int] = {}
        self._clients = self._new_process("clients")

    def _draw_specs(self, shape: random.Random, *, begin_long: bool) -> list[RequestSpec]:
        num_gateways = sum(place.role == "gateway" for place in self.places)
        num_requests = shape.randrange(8, 17) if self._cut is None else _NUM_REQUESTS_OF_CUTS[len(self.hosts)]
        span_s, mix = self._span_s, self.mix
        return draw_specs(
            shape, num_requests, span_s, num_gateways, mix, max_context=MAX_CONTEXT, begin_long=begin_long
        )

    def _draw_places(self, shape: random.Random, *, are_apart: bool) -> list[Place]:
        """`are_apart`: the first host has prefill workers alone, the others have none."""
        counts = {"transfer": 1, "scheduler": shape.choice((1, 2)), "gateway": shape.choice((1, 2))}
        if self._cut is not None:
            counts = dict.fromkeys(ROLES, 1)
        places: list[Place] = []
        for host in self.hosts:
            for role in ("transfer", "prefill", "decode"):
                if are_apart and role == ("decode" if host.index == 0 else "prefill"):
                    continue
                for _ in range(counts.get(role) or shape.choice((1, 1, 2, 3) if len(self.hosts) == 1 else (1, 1, 2))):
                    index = sum(place.role == role for place in places)
                    address = f"unix:{host.socket}" if role == "transfer" else f"10.0.{host.index}.1:{len(places)}"
                    places.append(Place(role, index, host, address))
        for role in ("scheduler", "gateway"):
            for index in range(counts[role]):
                places.append(Place(role, index, self.hosts[0], f"10.1.0.1:{len(places)}"))
        return places

    # What the processes need of it.

    async def connect_bus(self) -> Bus:
        await asyncio.sleep(self.hub.draw_delay_s())
        while not self.hub.is_up:  # noqa: ASYNC110 - as the client of NATS does
            await asyncio.sleep(0.2)
        return self.hub.connect()

    def identity_of(self, process: SimProcess) -> ProcessIdentity:
        return ProcessIdentity(process.pid, 1)

    def try_open_process(self, owner: SimProcess, identity: ProcessIdentity) -> ProcessHandle | None:
        del owner
        process = self._processes.get(identity.pid)
        if process is None or process.is_dead:
            return None
        self._num_fds += 1
        self._handles[self._num_fds] = process
        return ProcessHandle(self, process, self._num_fds)

    def forget_handle(self, fd: int) -> None:
        self._handles.pop(fd, None)

    def kill(self, process: SimProcess) -> None:
        self.note(f"{process} is fenced")
        self.loop.call_later(self.rng.random() * 0.005, self.crash, process, context=self._nobody())

    # What faults do to them.

    def crash(self, process: SimProcess) -> None:
        """As kill -9, between two callbacks or inside of one."""
        if process.is_dead:
            return
        self.note(f"{process} is dead")
        self.loop.bury(process)
        self.network.end_process(process)
        self.hub.end_process(process)
        for notice in process.on_death:
            notice()
        for fd, one in list(self._handles.items()):
            if one is process:
                self.loop.call_later(self.rng.random() * 0.005, self.loop.make_readable, fd, context=self._nobody())
        place = next((one for one in self.places if one.process is process), None)
        if place is not None:
            place.process = place.component = place.ask_to_end = None
            place.is_ready = False
            self.loop.call_later(self.rng.uniform(0.1, 1.5), self._start, place, context=self._nobody())

    def _die_in_write(self, process: SimProcess) -> None:
        self.may_fail = self._cut is None
        self.struck[death_in_write(process.name)] += 1
        self.crash(process)

    def stop(self, process: SimProcess) -> None:
        self.loop.stop_process(process)
        self.network.on_stopped(process)

    def proceed(self, process: SimProcess) -> None:
        self.loop.continue_process(process)

    def on_exit(self, place: Place) -> None:
        if place.process is not None:
            self.crash(place.process)

    def place(self, name: str) -> Place:
        return next(place for place in self.places if place.name == name)

    def try_draw_place(self, *roles: str) -> Place | None:
        living = [
            place
            for place in self.places
            if place.role in roles and place.process is not None and not place.process.is_stopped
        ]
        return self.rng.choice(living) if living else None

    def is_one_host(self, one: SimProcess, other: SimProcess) -> bool:
        """Between whom no network lies: a worker and its transfer service."""
        hosts = {place.host for place in self.places if place.process in (one, other)}
        return len(hosts) == 1 and any(process.name.startswith("transfer") for process in (one, other))

    def gateway_address(self, number: int) -> str:
        gateways = [place for place in self.places if place.role == "gateway"]
        return gateways[number % len(gateways)].address

    # The story.

    def note(self, text: str) -> None:
        self.story.append(f"{self.loop.time() - 1000:9.4f}  {text}")

    def begin_fault(self, text: str) -> None:
        self.may_fail = True
        self.note(text)

    def note_log(self, process: SimProcess | None, record: logging.LogRecord) -> None:
        self.story.append(f"{self.loop.time() - 1000:9.4f}  {process}: {record.levelname}: {record.getMessage()}")

    def fail(self, broken: str, exc_info: Any = None) -> None:
        """The first one counts; the world ends."""
        if self.broken or self._is_over:
            return
        self.broken = broken
        self.note(f"BROKEN: {broken}")
        if exc_info and exc_info[1] is not None:
            self.story.extend("".join(traceback.format_exception(exc_info[1])).splitlines())
        self.loop.stop()

    # Its life.

    def run(self) -> Result:
        log_watch = LogWatch(self)
        with logged_by(log_watch):
            self.loop.after_event = self._after_event
            living = self.loop.create_task(self._live())
            living.add_done_callback(self._on_end)
            try:
                self.loop.run_forever()
            except Stuck as stuck:
                self.fail(f"liveness: {stuck}")
            with warnings.catch_warnings(action="ignore"):  # of tasks of the dead that never began
                gc.collect()  # those that ended with an error that nobody took say so now
            self._is_over = True
            self.loop.end()
            self.threads.end()
        lost = dict(zip(LOSSES, (self.network.num_lost_answers, self.hub.num_lost), strict=True))
        return Result(
            self._plan,
            tuple(sorted(self.mix)),
            len(self._specs),
            self.loop.num_events,
            self.struck.total(),
            self.loop.time() - 1000,
            self.trace,
            self.broken,
            list(self.story) if self.broken else [],
            dict(Counter(outcome.end for outcome in self.outcomes if not outcome.spec.is_probe)),
            {one.name.split("-")[0]: one.num_writes for one in self._processes.values() if one.name.endswith("-0.1")}
            | ({} if self.exchange is None or self._cut is None else {self._cut[0]: self.exchange.num_events}),
            {} if self.exchange is None else self.exchange.figures,
            dict(self.struck + Counter(lost)),
        )

    async def _live(self) -> None:
        for place in self.places:
            self._start(place)
        await self._until(lambda: try_find_unrest(self), _START_S, "the stack did not start")
        self.note("the stack is up")
        set_rates(self)
        clients = [self._start_client(spec) for spec in self._specs]
        if self._cut is not None and self._cut[0] in CROSSING_ROLES:
            await strike_crossing(self, *self._cut)
        await strike(self, self._num_faults_wanted, self._span_s)
        self.note("all faults have ended")
        self._heal()
        await self._wait_for(clients, _ENDS_WITHIN_S)
        await self._come_to_rest()
        await self._probe()
        await self._come_to_rest()

    async def _come_to_rest(self) -> None:
        await self._until(lambda: try_find_unrest(self), _IDLE_WITHIN_S, "it does not come to rest")

    def _heal(self) -> None:
        self.network.heal()
        self.hub.heal()

    async def _probe(self) -> None:
        """Liveness: once all is well, what is asked is answered, at the first try."""
        shape = random.Random(self.rng.getrandbits(64))
        now_s = 0.0
        specs = draw_specs(shape, 2, now_s, 1, frozenset(), max_context=MAX_CONTEXT)
        probes = [
            RequestSpec(f"probe-{i}", one.prompt, one.seed, one.max_tokens, one.lane, 0.0, i, is_probe=True)
            for i, one in enumerate(specs)
        ]
        self.ledger.add(probes)
        await self._wait_for([self._start_client(spec) for spec in probes], _ENDS_WITHIN_S)

    def _start_client(self, spec: RequestSpec) -> "asyncio.Task[None]":
        client = Client(self, spec)
        self.outcomes.append(client.outcome)

        async def run() -> None:
            await asyncio.sleep(spec.starts_at_s)
            await client.run()

        task = self.loop.create_task(run(), context=self._clients.context.copy())
        task.add_done_callback(self._on_client_end)
        return task

    def _on_client_end(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            text = str(error) if isinstance(error, BrokenPromise) else f"a client failed: {error!r}"
            self.fail(text, (type(error), error, None))

    async def _wait_for(self, clients: list["asyncio.Task[None]"], within_s: float) -> None:
        _, late = await asyncio.wait(clients, timeout=within_s)
        if late:
            names = [outcome.spec.name for outcome in self.outcomes if not outcome.end]
            raise BrokenPromise(f"liveness: {', '.join(names)} did not end within {within_s:g} s of the last fault")

    async def _until(self, find_unrest: Callable[[], str], within_s: float, what: str) -> None:
        ends_at_s = self.loop.time() + within_s
        while unrest := find_unrest():
            if self.loop.time() > ends_at_s:
                raise BrokenPromise(f"{what} within {within_s:g} s: {unrest}")
            await asyncio.sleep(0.5)

    def _on_end(self, living: "asyncio.Task[None]") -> None:
        if not living.cancelled() and (error := living.exception()) is not None:
            text = str(error) if isinstance(error, BrokenPromise) else f"the world failed: {error!r}"
            self.fail(text, None if isinstance(error, BrokenPromise) else (type(error), error, None))
        self.loop.stop()

    def _start(self, place: Place) -> None:
        if place.process is not None or self._is_over:
            return
        place.num_starts += 1
        process_id = f"{place.role}-{place.index}-{self.rng.getrandbits(32):08x}"
        process = place.process = self._new_process(f"{place.name}.{place.num_starts}")
        if self._cut is not None and place.num_starts == 1 and place.role == self._cut[0]:
            process.dies_at_write = self._cut[1]
        task = self.loop.create_task(run_process(self, place, process_id), context=process.context.copy())
        task.add_done_callback(lambda ended: self._on_main_end(process, ended))

    def _on_main_end(self, process: SimProcess, ended: "asyncio.Task[None]") -> None:
        if ended.cancelled() or (error := ended.exception()) is None or isinstance(error, ProcessDied):
            return
        self.fail(f"{process} failed: {error!r}", (type(error), error, None))

    def _new_process(self, name: str) -> SimProcess:
        self._num_pids += 1
        process = SimProcess(name, self._num_pids)
        process.die = self._die_in_write
        self._processes[process.pid] = process
        return process

    def _nobody(self) -> Any:
        return _NOBODY.context

    def _after_event(self, process: SimProcess | None) -> None:
        pid = 0 if process is None else process.pid
        self.trace = (self.trace * 1_000_003 + int(self.loop.time() * 1e9) + pid) & 0xFFFF_FFFF_FFFF_FFFF
        if self.exchange is not None:
            self.exchange.after_event(process)
        if process is None or process.is_dead or not process.name.startswith("transfer"):
            return
        checked = self._num_writes_checked.get(process.name, 0)
        if process.num_writes < checked + _CHECK_EVERY_WRITES:
            return
        self._num_writes_checked[process.name] = process.num_writes
        place = next((one for one in self.places if one.process is process), None)
        if place is not None:
            try:
                check_arena(self, place)
            except BrokenPromise as error:
                self.fail(str(error))

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        del loop
        error = context.get("exception")
        if self._is_over or isinstance(error, ProcessDied):
            return
        self.fail(f"nobody took an error: {context['message']}: {error!r}", (type(error), error, None))


def _draw_hosts(shape: random.Random, plan: Plan) -> tuple[int, bool]:
    """How many, and whether they exchange pages."""
    if plan.cut is not None:
        return (2, True) if plan.cut[0] in CROSSING_ROLES else (1, False)
    num_hosts = shape.choice((1, 1, 2, 2, 3))
    return num_hosts, num_hosts > 1 and shape.random() < 0.5


def _draw_placing(shape: random.Random, seed: int) -> PlacingLimits:
    """Where hosts exchange pages: mostly so that many cross."""
    routers: tuple[RouterName, ...] = ("random", "random", "estimated-ttft")
    return PlacingLimits(router=shape.choice(routers), link_round_trip_ms=0.5, fetch_gain=0.0, seed=seed)


_NOBODY = SimProcess("nobody", 0)
