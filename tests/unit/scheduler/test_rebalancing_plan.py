"""A round of moves, from loads alone: nobody gets more than it has room for, and what is even stays as it is."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from weir.core.cost import StepCost
from weir.scheduling.migrations import MAX_AT_A_TIME
from weir.scheduling.rebalancing.freeness import Loads, QueuedRequest, RunningSequence, SequenceMove, WorkerLoad
from weir.scheduling.rebalancing.plan import DEFAULT_RULES, plan_moves
from weir.scheduling.routing.links import LinkCost

COST = StepCost(5.0, 0.05, 0.0, 1.0, 0.001)
LINK = LinkCost.of_rate(10_000, 1.0)
SLOTS = 8


@dataclass
class Fleet:
    """Workers, and what runs on each, as moves change it."""

    workers: list[WorkerLoad]
    running: dict[str, list[RunningSequence]]
    queued: QueuedRequest | None = None
    arrivals_a_s: float = 0.0
    link: LinkCost | None = LINK
    asked: list[str] = field(default_factory=list)

    def loads(self) -> list[WorkerLoad]:
        pages = {worker.arena_id: 0 for worker in self.workers}
        for worker in self.workers:
            pages[worker.arena_id] += sum(one.num_used_pages for one in self.running[worker.worker_id])
        return [
            replace(
                worker,
                num_used_pages=pages[worker.arena_id],
                num_seqs=len(self.running[worker.worker_id]),
                num_context_tokens=sum(one.num_tokens for one in self.running[worker.worker_id]),
            )
            for worker in self.workers
        ]

    def plan(self) -> tuple[SequenceMove, ...]:
        def sequences_of(worker_id: str) -> Sequence[RunningSequence]:
            self.asked.append(worker_id)
            return self.running[worker_id]

        return plan_moves(
            self.loads(),
            sequences_of,
            lambda source, receiver: self.link,
            self.queued,
            arrivals_a_s=self.arrivals_a_s,
        )

    def apply(self, moves: Sequence[SequenceMove]) -> None:
        for move in moves:
            [sequence] = [one for one in self.running[move.source_id] if one.request_id == move.request_id]
            self.running[move.source_id].remove(sequence)
            self.running[move.receiver_id].append(sequence)

    def counts(self) -> list[int]:
        return [len(self.running[worker.worker_id]) for worker in self.workers]


def worker(name: str, *, arena: str = "", pages: int = 100, cost: StepCost | None = COST) -> WorkerLoad:
    return WorkerLoad(name, arena or name, pages, 0, 0, SLOTS, 0, 4096, cost, 1 << 20)


def sequence(name: str, *, pages: int = 5, lane: int = 1, tokens: int = 64, left: float = 400.0) -> RunningSequence:
    return RunningSequence(name, lane, tokens, left, pages, pages, 512)


def fleet(*counts: int, pages: int = 5, arena_pages: int = 100) -> Fleet:
    names = [f"d{number}" for number in range(len(counts))]
    workers = [worker(name, pages=arena_pages) for name in names]
    running = {
        name: [sequence(f"{name}-{i}", pages=pages) for i in range(count)]
        for name, count in zip(names, counts, strict=True)
    }
    return Fleet(workers, running)


def test_what_runs_on_one_worker_spreads_over_both() -> None:
    two = fleet(6, 0)
    for _ in range(4):
        two.apply(two.plan())
    assert two.counts() == [3, 3]
    assert two.plan() == ()


def test_the_most_crowded_gives_to_the_least_and_the_next_to_the_next() -> None:
    moves = fleet(8, 1, 7, 0).plan()
    assert {(move.source_id, move.receiver_id) for move in moves} == {("d0", "d3"), ("d2", "d1")}
    assert len(moves) == 2 * DEFAULT_RULES.max_moves


def test_out_of_an_arena_and_into_one_no_more_go_than_may_be_on_their_way() -> None:
    for arenas in (("a", "a", "b", "c"), ("a", "b", "c", "c")):
        four = fleet(8, 8, 0, 0)
        four.workers = [replace(one, arena_id=arena) for one, arena in zip(four.workers, arenas, strict=True)]
        assert len(four.plan()) == MAX_AT_A_TIME
    many = fleet(5, 5, pages=4)
    many.queued = QueuedRequest(90, lane_priority=1, num_waiting=16)
    assert many.plan() == (), "three would have to go, which takes more than a round"


def test_sequences_are_looked_at_of_crowded_workers_alone() -> None:
    many = fleet(8, 4, 4, 4, 4, 1)
    assert many.plan()
    assert set(many.asked) == {"d0"}


def test_pairs_that_differ_little_stay() -> None:
    assert fleet(4, 3).plan() == ()
    assert fleet(1, 0).plan() == (), "it would be the same, the other way round"


def test_the_least_urgent_lane_gives_first_whatever_it_saves() -> None:
    two = fleet(4, 0)
    two.running["d0"] = [replace(one, lane_priority=2, num_steps_left=2000.0) for one in two.running["d0"]]
    two.running["d0"][2] = sequence("batch", lane=0, left=100.0)
    assert two.plan()[0].request_id == "batch"


def test_what_is_about_to_end_or_pinned_stays() -> None:
    for changes in ({"num_steps_left": 31.0}, {"is_pinned": True}):
        two = fleet(6, 0)
        two.running["d0"] = [replace(one, **changes) for one in two.running["d0"]]
        assert two.plan() == ()


def test_what_costs_more_than_it_saves_stays() -> None:
    """A long sequence over a slow link; and steps that take as long whoever is in them."""
    two = fleet(6, 0)
    two.running["d0"] = [replace(one, num_tokens=3000, max_tokens=4000) for one in two.running["d0"]]
    assert two.plan() != ()
    two.link = LinkCost.of_rate(10, 1.0)
    assert two.plan() == ()
    two = fleet(6, 0)
    two.workers = [replace(one, cost=StepCost(20.0, 0.05, 0.0, 0.0, 0.0)) for one in two.workers]
    assert two.plan() == ()


def test_where_new_requests_even_them_out_soon_nobody_has_to_move() -> None:
    two = fleet(6, 2)
    two.arrivals_a_s = 1.0
    assert two.plan() != ()
    two.arrivals_a_s = 100.0
    assert two.plan() == ()


def test_where_pages_run_out_it_pays_to_move_though_steps_take_as_long() -> None:
    two = fleet(6, 0, pages=16)
    flat = StepCost(1.0, 0.5, 0.0, 0.0, 0.0)
    two.workers = [replace(one, cost=flat, preempts=True) for one in two.workers]
    two.running["d0"] = [replace(one, num_tokens=256, num_steps_left=100.0) for one in two.running["d0"]]
    assert len(two.plan()) == 1, "then it is not tight any more"
    two.workers = [replace(one, preempts=False) for one in two.workers]
    assert two.plan() == ()


def test_workers_that_exchange_nothing_and_those_not_measured_yet() -> None:
    two = fleet(6, 0)
    two.link = None
    assert two.plan() == ()
    two = fleet(6, 0)
    two.workers[1] = worker("d1", cost=None)
    assert len(two.plan()) == 2, "the one is taken to be as quick as the other"
    two.workers = [worker("d0", cost=None), worker("d1")]
    assert len(two.plan()) == 2
    two.running["d0"] = [replace(one, num_steps_left=50.0) for one in two.running["d0"]]
    assert len(two.plan()) == 2
    two.workers = [worker("d0", cost=None), worker("d1", cost=None)]
    assert two.plan() == (), "of steps that nobody has measured little is expected"


def test_room_is_made_for_a_request_that_all_could_hold_together() -> None:
    """Sixty pages are free at each of two, it needs eighty: one gives four sequences of five pages to the other."""
    two = fleet(8, 8, pages=5)
    two.queued = QueuedRequest(80, lane_priority=1, num_waiting=4)
    assert two.plan() == (), "nobody has a free slot"
    two = fleet(4, 4, pages=10)
    two.queued = QueuedRequest(80, lane_priority=1, num_waiting=4)
    moves = two.plan()
    assert len(moves) == 2
    assert len({move.source_id for move in moves}) == 1
    two.apply(moves)
    assert min(load.num_used_pages for load in two.loads()) == 20
    assert two.plan() == (), "balancing would take its place away"


def test_no_room_is_made_that_would_not_be_enough_or_of_who_is_more_urgent() -> None:
    two = fleet(4, 4, pages=10)
    two.queued = QueuedRequest(101, lane_priority=1)
    assert two.plan() == ()
    two.queued = QueuedRequest(80, lane_priority=0)
    assert two.plan() == ()


def test_where_no_room_can_be_made_others_are_balanced_and_the_freest_is_left_alone() -> None:
    """Who waits is less urgent than all that run."""
    three = fleet(8, 3, 2, pages=10)
    three.queued = QueuedRequest(85, lane_priority=0)
    moves = three.plan()
    assert {(move.source_id, move.receiver_id, move.reason) for move in moves} == {("d0", "d1", "it is crowded")}


def test_no_room_is_made_where_it_comes_by_itself_as_soon() -> None:
    two = fleet(4, 4, pages=10)
    two.running["d0"] = [replace(one, num_steps_left=1.0) for one in two.running["d0"]]
    two.running["d1"] = [replace(one, num_steps_left=1.0) for one in two.running["d1"]]
    two.queued = QueuedRequest(80, lane_priority=1)
    assert two.plan() == ()


def test_the_one_that_is_just_enough_goes_not_many_small_ones() -> None:
    two = fleet(0, 4, pages=12)
    two.running["d0"] = [sequence(f"s{i}", pages=pages) for i, pages in enumerate((2, 3, 12, 25))]
    two.queued = QueuedRequest(70, lane_priority=1)
    assert [move.request_id for move in two.plan()] == ["s2"]


COSTS = st.sampled_from([COST, StepCost(2.0, 0.5, 0.0, 0.1, 0.0), StepCost(10.0, 0.01, 0.0, 5.0, 0.01), None])


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    num_arenas = draw(st.integers(1, 4))
    workers, running = [], {}
    for arena in range(num_arenas):
        num_pages, preempts = draw(st.integers(1, 200)), draw(st.booleans())
        for number in range(draw(st.integers(1, 2))):
            name = f"a{arena}-{number}"
            made = worker(name, arena=f"a{arena}", pages=num_pages, cost=draw(COSTS))
            workers.append(replace(made, max_num_seqs=draw(st.integers(1, 8)), preempts=preempts))
            running[name] = [
                RunningSequence(
                    f"{name}-{i}",
                    draw(st.integers(0, 2)),
                    draw(st.integers(1, 2000)),
                    draw(st.integers(0, 3000)),
                    num_pages := draw(st.integers(1, 40)),
                    num_pages + draw(st.integers(0, 10)),
                    draw(st.integers(1, 4096)),
                    draw(st.booleans()) and draw(st.booleans()),
                )
                for i in range(draw(st.integers(0, 10)))
            ]
    queued = st.builds(QueuedRequest, st.integers(1, 150), st.integers(0, 2), st.integers(1, 16))
    return Fleet(workers, running, draw(st.one_of(st.none(), queued)))


@settings(max_examples=150, deadline=None)
@given(fleets())
def test_nobody_is_overcommitted_and_pinned_ones_stay(made: Fleet) -> None:
    before = {load.worker_id: load for load in made.loads()}
    sequences = {one.request_id: one for found in made.running.values() for one in found}
    moves = made.plan()
    assert len({move.request_id for move in moves}) == len(moves)
    assert not any(sequences[move.request_id].is_pinned for move in moves)
    assert all(sequences[move.request_id].max_tokens <= before[move.receiver_id].max_context_tokens for move in moves)
    # While they move, each is in both places: nothing is counted as free that leaves.
    for load in before.values():
        coming = [sequences[move.request_id] for move in moves if move.receiver_id == load.worker_id]
        if coming:
            assert load.num_seqs + len(coming) <= load.max_num_seqs
    for arena_id in {load.arena_id for load in before.values()}:
        into = [sequences[m.request_id] for m in moves if before[m.receiver_id].arena_id == arena_id]
        num_used, num_pages = next((o.num_used_pages, o.num_pages) for o in before.values() if o.arena_id == arena_id)
        if into:
            assert num_used + sum(one.num_room_pages for one in into) <= num_pages


@settings(max_examples=150, deadline=None)
@given(fleets())
def test_it_comes_to_rest(made: Fleet) -> None:
    """Without arrivals, and while whoever waits goes on waiting. No sequence comes back to where it was in a round."""
    num_sequences = sum(made.counts())
    for _ in range(num_sequences * len(made.workers) + 2):
        moves = made.plan()
        if not moves:
            return
        made.apply(moves)
    raise AssertionError("it goes on and on")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, SLOTS), min_size=1, max_size=5), st.integers(1, 12))
def test_an_even_fleet_stays_as_it_is(names: list[int], num_pages: int) -> None:
    assert fleet(*(names[:1] * len(names)), pages=num_pages).plan() == ()


@settings(max_examples=100, deadline=None)
@given(fleets())
def test_balancing_never_makes_the_least_freeness_less(made: Fleet) -> None:
    made.queued = None
    loads = made.loads()
    before, moves = Loads(loads), made.plan()
    made.apply(moves)
    after = Loads(made.loads())
    assert min(map(after.freeness, after.workers.values())) >= min(map(before.freeness, loads)) - 1e-9
