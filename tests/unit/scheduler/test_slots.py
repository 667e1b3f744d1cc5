"""The open slots that are kept from one decision to the next are those that a look at every worker would find."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.scheduler.rig import LANES, make_limits, make_submit, make_worker

from weir.bus.messages import Placement
from weir.core.life import SchedulingParams
from weir.policy.registry import PolicySpec
from weir.scheduling.pools import OpenSlots, WorkerPools, slot_bound
from weir.scheduling.request import PlacementPlan, PriorityKey, RequestFactory, ScheduledRequest
from weir.scheduling.reservations import Reservations
from weir.scheduling.workers import Workers

NUM_WORKERS = 3
SLOT_OVERCOMMIT = 0.5
FACTORY = RequestFactory(make_limits(), PolicySpec("fcfs").make())


class World:
    """Some pairs of workers, whose slots are taken and become free by hand."""

    def __init__(self, max_num_seqs: int) -> None:
        self.reservations, self.workers = Reservations(), Workers(10.0)
        for number in range(NUM_WORKERS):
            for role in ("prefill", "decode"):
                record = make_worker(f"{role}{number}", role, host=f"h{number}", seqs=max_num_seqs)
                self.workers.put(record, 1, 0.0)
        self.pools = WorkerPools(self.workers, self.reservations, SLOT_OVERCOMMIT)
        self.running: list[ScheduledRequest] = []
        self._num_made = 0

    def take(self, worker: int, lane: int, rank: float) -> None:
        self._num_made += 1
        submit = make_submit(f"r{self._num_made}", LANES[lane].name)
        request = FACTORY.request(submit, LANES[lane].name, 0.0, 0.0, 1)
        address = f"address-{worker}"
        scheduling = SchedulingParams(request.scheduling.lane_priority, rank)
        placement = Placement(1, f"prefill{worker}", address, f"decode{worker}", address, 2, scheduling)
        request.plan = PlacementPlan(placement, 2)
        self.reservations.add(request, 0.0)
        self.running.append(request)

    def free(self, number: int) -> None:
        if self.running:
            self.reservations.remove(self.running.pop(number % len(self.running)), 0.0)

    @property
    def slots(self) -> OpenSlots:
        return self.pools.pool("m", "").slots

    def open_by_a_look_at_each(self, priority: PriorityKey) -> set[str]:
        return {
            worker.worker_id
            for candidate in self.pools.pool("m", "").candidates
            for worker in candidate.decode_workers
            if priority < slot_bound(worker.decode.priorities, worker.max_num_seqs, SLOT_OVERCOMMIT)
        }


TAKE = st.tuples(st.integers(0, NUM_WORKERS - 1), st.integers(0, 2), st.integers(0, 3))
MOVES = st.lists(st.one_of(TAKE, st.integers(0, 100)), max_size=200)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3), MOVES, st.integers(1, 90))
def test_open_slots_are_those_that_a_look_at_each_worker_finds(
    max_num_seqs: int, moves: list[tuple[int, int, int] | int], ask_every: int
) -> None:
    world = World(max_num_seqs)
    for number, move in enumerate(moves):
        if isinstance(move, int):
            world.free(move)
        else:
            world.take(move[0], move[1], float(move[2]))
        if number % ask_every:
            continue
        slots = world.slots
        for lane_priority in range(3):
            for rank in (0.0, 1.5, 3.0):
                priority = (-lane_priority, rank)
                opened = world.open_by_a_look_at_each(priority)
                assert set(slots.open_to(priority)) == opened
                assert {i for i in (f"decode{n}" for n in range(NUM_WORKERS)) if slots.is_open(i, priority)} == opened
                assert (priority < slots.bound) == bool(opened)
                assert slots.num_open_to(priority) == len(opened)


def shared_host(num_prefill: int, num_decode: int, num_hosts: int) -> WorkerPools:
    """Hosts that exchange pages, each with so many workers; every other one's decode workers prefill too."""
    workers = Workers(10.0)
    workers.let_prompts_cross(True)
    for host in range(num_hosts):
        ids = [("prefill", f"p{host}-{i}") for i in range(num_prefill)]
        ids += [("decode", f"d{host}-{i}") for i in range(num_decode)]
        for role, worker_id in ids:
            record = make_worker(worker_id, role, host=f"h{host}")
            changed = replace(record, pages_address=f"h{host}:7000", page_bytes=1, serves_locally=host % 2 == 0)
            workers.put(changed, 1, 0.0)
    return WorkerPools(workers, Reservations(), SLOT_OVERCOMMIT)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3), st.integers(1, 3), st.integers(1, 4), st.data())
def test_candidates_with_an_open_worker_are_those_that_a_look_at_each_finds(
    num_prefill: int, num_decode: int, num_hosts: int, data: st.DataObject
) -> None:
    pool = shared_host(num_prefill, num_decode, num_hosts).pool("m", "")
    all_ids = sorted({worker.worker_id for one in pool.candidates for worker in one.decode_workers})
    open_ids = set(data.draw(st.lists(st.sampled_from(all_ids), unique=True)))
    found = pool.open_candidates(open_ids)
    expected = [one for one in pool.candidates if not one.decode_ids.isdisjoint(open_ids)]
    assert [one for one in found if not one.decode_ids.isdisjoint(open_ids)] == expected
    assert len(open_ids) > 4 or list(found) == expected
    if pool.senders:
        receivers = pool.senders[0].decode_workers
        assert pool.open_receivers(open_ids) == [one for one in receivers if one.worker_id in open_ids]


def test_however_many_moves_there_were_since_no_worker_is_forgotten() -> None:
    world = World(max_num_seqs=1)
    assert len(world.slots.open_to((0, 0.0))) == NUM_WORKERS
    world.take(0, 0, 0.0)
    for _ in range(100):
        world.take(1, 0, 0.0)
        world.free(1)
    assert set(world.slots.open_to((0, 0.0))) == {"decode1", "decode2"}


def test_a_worker_that_comes_has_its_slots_open_at_once() -> None:
    world = World(max_num_seqs=1)
    for worker in range(NUM_WORKERS):
        world.take(worker, 0, 0.0)
    assert not world.slots.open_to((0, 0.0))
    for role in ("prefill", "decode"):
        world.workers.put(make_worker(f"{role}9", role, host="h9", seqs=1), 1, 0.0)
    assert set(world.slots.open_to((0, 0.0))) == {"decode9"}
