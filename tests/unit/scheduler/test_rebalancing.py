"""Running sequences go on at another host where that evens out decode workers; room is booked there before."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.scheduler.rig import LANES, Rig, make_limits, make_worker
from tests.unit.scheduler.test_migrations import answer, asked, drain, hold, move

from weir.bus.messages import WorkerRecord
from weir.bus.migration import Migrate
from weir.core.cost import StepCost
from weir.scheduling.commands import SendGrant
from weir.scheduling.limits import CoreLimits, MemoryFitName, PlacingLimits
from weir.scheduling.migrations import MAX_AT_A_TIME

COST = StepCost(5.0, 0.1, 0.0, 2.0, 0.0)
"""Steps of a worker that gains by having fewer sequences."""


def worker(host: str, role: str, *, pages: int = 400, seqs: int = 8) -> WorkerRecord:
    made = make_worker(f"{role}-{host}", role, host=host, pages=pages, seqs=seqs)
    return replace(made, pages_address=f"{host}:9", serves_locally=role == "decode", cost=COST, page_bytes=4096)


def rebalancing_limits(**changes: float) -> CoreLimits:
    return make_limits(max_prefills=32, max_prefill_tokens=4096, rebalances=True, **changes)


def late_host(
    num_requests: int, *, limits: CoreLimits | None = None, num_tokens: int = 100, pages: int = 400, lane: str = ""
) -> Rig:
    """All requests have decoded at b for a while, then a comes. Each may come to 26 pages."""
    rig = Rig(limits or rebalancing_limits()).start(*(worker("b", role) for role in ("prefill", "decode")))
    for number in range(num_requests):
        rig.submit(f"r{number}", lane, max_tokens=400)
        rig.prefilled(f"r{number}")
    progress(rig, num_tokens)
    rig.put(*(worker("a", role, pages=pages) for role in ("prefill", "decode")))
    return rig


def progress(rig: Rig, num_tokens: int) -> None:
    """Whatever is granted has so many tokens, as its gateway's next list says."""
    granted = {command.grant.request_id for command in rig.commands if isinstance(command, SendGrant)}
    rig.gateways["g"] = [
        replace(
            entry, placement=rig.placement(entry.submit.request_id), is_prefilled=True, num_output_tokens=num_tokens
        )
        if entry.submit.request_id in granted
        else entry
        for entry in rig.gateways["g"]
    ]
    rig.run(1.0)


def move_all(rig: Rig, first: int = 0) -> int:
    """All that was asked for from this one on happens. Returns how many there are by then."""
    done = first
    for migrate in asked(rig)[first:]:
        answer(rig, migrate)
        move(rig, migrate)
        done += 1
    return done


def test_a_host_that_comes_late_gets_its_part_and_then_there_is_rest() -> None:
    rig, done = late_host(6), 0
    for _ in range(4):
        rig.run(1.5)
        done = move_all(rig, done)
    assert {migrate.placement.decode_worker_id for migrate in asked(rig)} == {"decode-a"}
    assert len({migrate.request_id for migrate in asked(rig)}) == len(asked(rig)) == 3
    assert rig.metric("rebalanced_total") == rig.metric("migrations_moved_total") == 3
    rig.run(60.0)
    assert len(asked(rig)) == 3, "three and three"
    assert rig.metric("freeness_min") == rig.metric("freeness_max") > 0


def test_room_is_booked_before_and_a_pair_is_left_alone_until_all_have_come() -> None:
    rig = late_host(8)
    rig.run(1.5)
    assert len(asked(rig)) == MAX_AT_A_TIME
    num_pages = rig.metric("reserved_pages")
    assert num_pages == (8 + MAX_AT_A_TIME) * 26
    for migrate in asked(rig):
        answer(rig, migrate)
        hold(rig, migrate.request_id, is_migrating=True)
    rig.run(3.0)
    assert len(asked(rig)) == MAX_AT_A_TIME
    first, _ = asked(rig)
    assert first.pages_address == "b:9"
    assert first.placement.reason == "migration: from decode-b, it is crowded"
    assert first.placement.prefill_worker_id == "decode-a"


def test_nothing_moves_where_it_is_switched_off_or_nothing_may_cross() -> None:
    for changed in ({"rebalances": False}, {"placing": PlacingLimits(crossing="nothing")}):
        rig = late_host(6, limits=replace(rebalancing_limits(), **changed))
        rig.run(5.0)
        assert asked(rig) == []
    rig.core.set_limits(rebalancing_limits())
    rig.run(2.0)
    assert asked(rig) != []


def test_how_crowded_workers_are_is_shown_while_it_is_looked_at_also_of_one_alone() -> None:
    rig = late_host(6, limits=replace(rebalancing_limits(), rebalances=False))
    assert "freeness_min" not in rig.core.metrics()
    rig = Rig(rebalancing_limits()).start(*(worker("b", role) for role in ("prefill", "decode")))
    rig.submit("r", max_tokens=400)
    rig.prefilled("r")
    rig.run(1.5)
    assert rig.metric("freeness_min") == rig.metric("freeness_max") == 7
    rig.clock.advance(4.0)
    assert "freeness_min" not in rig.core.metrics()
    rig.run(1.5)
    rig.core.set_limits(replace(rebalancing_limits(), rebalances=False))
    assert "freeness_max" not in rig.core.metrics()


def test_what_came_or_was_to_come_stays_for_half_a_minute() -> None:
    rig = late_host(2)
    rig.run(1.5)
    [migrate] = asked(rig)
    answer(rig, migrate, accepted=False)
    rig.run(20.0)
    assert {one.request_id for one in asked(rig)} == {"r0", "r1"}
    answer(rig, asked(rig)[1], accepted=False)
    num_asked = len(asked(rig))
    rig.run(8.0)
    assert len(asked(rig)) == num_asked
    rig.run(25.0)
    assert len(asked(rig)) > num_asked


def test_a_host_that_is_being_emptied_neither_gives_nor_takes_by_this() -> None:
    rig = late_host(6)
    drain(rig, "a")
    rig.run(5.0)
    assert asked(rig) == []
    rig = late_host(6)
    drain(rig, "b")
    rig.run(5.0)
    assert {migrate.placement.reason for migrate in asked(rig)} == {"migration: decode-b is being emptied"}


def test_where_there_is_no_room_for_all_that_it_may_come_to_it_does_not_go() -> None:
    for num_pages, num_asked in ((25, 0), (30, 1), (70, 2)):
        rig = late_host(8, pages=num_pages)
        rig.run(3.0)
        assert len(asked(rig)) == num_asked


def test_what_is_guaranteed_to_a_lane_that_waits_is_not_taken() -> None:
    lanes = (replace(LANES[0], guaranteed_share=0.9), *LANES[1:])
    for num_asked, lent_share in ((2, 1.0), (0, 0.0)):
        limits = replace(rebalancing_limits(), lanes=lanes, lent_share=lent_share)
        rig = Rig(limits).start(*(worker("b", role, pages=4000) for role in ("prefill", "decode")))
        for number in range(6):
            rig.submit(f"r{number}", "batch", max_tokens=400)
            rig.prefilled(f"r{number}")
        progress(rig, 100)
        rig.put(*(worker("a", role, pages=200) for role in ("prefill", "decode")))
        rig.run(1.5)
        assert len(asked(rig)) == num_asked


@pytest.mark.parametrize("fit", ["conservative", "past-future", "aggressive", "predicted"])
def test_pages_in_use_count_where_less_than_the_worst_case_is_reserved(fit: MemoryFitName) -> None:
    """Of 26 pages all may be needed by one, and eight are in use."""
    rig = late_host(4, limits=replace(rebalancing_limits(), placing=PlacingLimits(memory_fit=fit)), pages=26)
    rig.run(2.0)
    assert len(asked(rig)) == (0 if fit == "conservative" else 1)


def test_what_could_not_begin_may_go_as_soon_as_it_can() -> None:
    lanes = (replace(LANES[0], guaranteed_share=0.9), *LANES[1:])
    limits = replace(rebalancing_limits(), lanes=lanes, lent_share=0.0)
    rig = Rig(limits).start(*(worker("b", role, pages=4000) for role in ("prefill", "decode")))
    for number in range(3):
        rig.submit(f"r{number}", "batch", max_tokens=400)
        rig.prefilled(f"r{number}")
    progress(rig, 100)
    rig.put(*(worker("a", role, pages=200) for role in ("prefill", "decode")))
    rig.run(1.5)
    assert asked(rig) == []
    rig.core.set_limits(replace(limits, lent_share=1.0))
    rig.run(1.5)
    assert [migrate.request_id for migrate in asked(rig)] == ["r0"]


def test_room_is_made_for_a_large_request_in_one_of_two_memories() -> None:
    """Both have 400 pages and four sequences of 26 pages; one that needs 310 fits into neither."""
    hosts = [worker(host, role) for host in "ab" for role in ("prefill", "decode")]
    rig = Rig(rebalancing_limits()).start(*(replace(one, max_context_tokens=8192) for one in hosts))
    for number in range(8):
        rig.submit(f"r{number}", max_tokens=400)
        rig.prefilled(f"r{number}")
    progress(rig, 100)
    at_b = [
        e.submit.request_id for e in rig.gateways["g"] if e.placement and e.placement.decode_worker_id == "decode-b"
    ]
    assert len(at_b) == 4
    rig.submit("large", prompt=64, max_tokens=310 * 16 - 64)
    assert rig.metric("queued") == 1
    rig.run(1.5)
    [migrate] = asked(rig)
    assert migrate.placement.reason.endswith("a large request waits for its place")
    answer(rig, migrate)
    move(rig, migrate)
    rig.run(1.0)
    assert rig.metric("queued") == 0
    rig.run(10.0)
    assert rig.metric("rebalanced_total") == 1


def is_on_its_way(rig: Rig, migrate: Migrate) -> bool:
    found = rig.core.migrations._moves.get(migrate.request_id)
    return found is not None and found.plan.placement == migrate.placement


STEPS = st.sampled_from(
    ["accept", "decline", "move", "give up", "finish", "submit", "large", "grow", "drain", "undo", "time"]
)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(STEPS, st.integers(0, 99)), max_size=40))
def test_whatever_happens_no_memory_is_promised_twice(steps: list[tuple[str, int]]) -> None:
    rig = late_host(6)
    dispatch, num_submitted = 1, 0
    for what, pick in steps:
        live = {entry.submit.request_id: entry for entry in rig.gateways["g"]}
        open_ones = [migrate for migrate in asked(rig)[-8:] if migrate.request_id in live]
        migrate = open_ones[pick % len(open_ones)] if open_ones else None
        match what:
            case "accept" | "decline" if migrate is not None:
                answer(rig, migrate, accepted=what == "accept")
                hold(rig, migrate.request_id, is_migrating=what == "accept")
            case "move" if migrate is not None and is_on_its_way(rig, migrate):
                dispatch += 1
                move(rig, migrate, dispatch)
            case "give up" if migrate is not None:
                hold(rig, migrate.request_id)
            case "finish" if live:
                entry = live[sorted(live)[pick % len(live)]]
                rig.finish(entry.submit.request_id, dispatch=entry.placement.dispatch if entry.placement else 1)
            case "submit" | "large":
                num_submitted += 1
                rig.submit(f"s{num_submitted}", max_tokens=400 if what == "submit" else 2000)
                rig.prefilled(f"s{num_submitted}")
            case "grow":
                progress(rig, 60 + pick)
            case "drain":
                drain(rig, "ab"[pick % 2])
            case "undo":
                rig.put(*(replace(one, is_draining=False) for one in list(rig.workers.values())))
            case _:
                rig.run(0.5 + pick % 4)
        rig.decide()
        for load in rig.core._requests.reservations._decode.values():
            assert load.num_pages <= 400
            assert len(load.priorities) <= 8
