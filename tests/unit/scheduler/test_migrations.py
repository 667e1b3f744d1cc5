"""Requests of a host that is being emptied go on at another one: few at a time, each with room reserved before."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.scheduler.rig import Rig, make_limits, make_submit, make_worker

from weir.bus.messages import Held, HeldRequest, Placement, WorkerRecord
from weir.bus.migration import Migrate
from weir.scheduling.commands import SendMigrate
from weir.scheduling.limits import PlacingLimits
from weir.scheduling.migrations import MAX_AT_A_TIME

HOSTS = ("a", "b")


def worker(host: str, role: str, *, pages: int = 100, seqs: int = 8, draining: bool = False) -> WorkerRecord:
    made = make_worker(f"{role}-{host}", role, host=host, pages=pages, seqs=seqs, draining=draining)
    return replace(made, pages_address=f"{host}:9", serves_locally=role == "decode")


def two_hosts(num_requests: int, pages: int = 100, seqs: int = 8) -> Rig:
    """All requests decode at b, before a comes."""
    rig = Rig(make_limits(max_prefills=32, max_prefill_tokens=4096)).start(
        *(worker("b", role, seqs=32) for role in ("prefill", "decode"))
    )
    for number in range(num_requests):
        rig.submit(f"r{number}")
        rig.prefilled(f"r{number}")
    rig.gateways["g"] = [
        replace(entry, placement=rig.placement(entry.submit.request_id), is_prefilled=True, num_output_tokens=3)
        for entry in rig.gateways["g"]
    ]
    rig.put(*(worker("a", role, pages=pages, seqs=seqs) for role in ("prefill", "decode")))
    rig.run(1.0)
    return rig


def drain(rig: Rig, host: str = "b") -> None:
    rig.put(*(replace(rig.workers[f"{role}-{host}"], is_draining=True) for role in ("prefill", "decode")))
    rig.decide()


def asked(rig: Rig) -> list[Migrate]:
    return [command.migrate for command in rig.commands if isinstance(command, SendMigrate)]


def answer(rig: Rig, migrate: Migrate, *, accepted: bool = True) -> None:
    rig.core.migration_answered(migrate.request_id, migrate.placement, accepted=accepted)
    rig.decide()


def hold(rig: Rig, request_id: str, placement: Placement | None = None, *, is_migrating: bool = False) -> None:
    """Its gateway's lists say this from now on. None: as before."""
    rig.gateways["g"] = [
        entry
        if entry.submit.request_id != request_id
        else HeldRequest(entry.submit, placement or entry.placement, True, entry.num_output_tokens, is_migrating)
        for entry in rig.gateways["g"]
    ]


def move(rig: Rig, migrate: Migrate, dispatch: int = 2) -> None:
    hold(rig, migrate.request_id, replace(migrate.placement, dispatch=dispatch))
    rig.run(0.5)


def test_nothing_moves_while_nobody_is_emptied() -> None:
    rig = two_hosts(4)
    rig.run(5.0)
    assert asked(rig) == []


def test_nothing_moves_where_nothing_may_cross() -> None:
    rig = two_hosts(2)
    rig.core.set_limits(replace(rig.limits, placing=PlacingLimits(crossing="nothing")))
    drain(rig)
    rig.run(3.0)
    assert asked(rig) == []


def test_what_a_drained_host_runs_goes_to_the_other_a_few_at_a_time() -> None:
    rig = two_hosts(5)
    drain(rig)
    assert len(asked(rig)) == MAX_AT_A_TIME
    first = asked(rig)[0]
    assert (first.pages_address, first.placement.decode_worker_id, first.placement.dispatch) == ("b:9", "decode-a", 0)
    assert first.placement.prefill_worker_id == "decode-a", "who computes the rest decodes it too"
    rig.run(1.0)
    assert len(asked(rig)) == MAX_AT_A_TIME, "each has to end before the next begins"
    for number in range(5):
        migrate = asked(rig)[number]
        answer(rig, migrate)
        move(rig, migrate)
    assert {migrate.request_id for migrate in asked(rig)} == {f"r{number}" for number in range(5)}
    assert len(asked(rig)) == 5
    assert rig.metric("migrations_moved_total") == 5
    assert rig.metric("migrations_under_way") == 0
    for number in range(5):
        rig.finish(f"r{number}", dispatch=2)
    assert rig.metric("reserved_pages") == 0


def test_there_is_room_reserved_at_both_until_it_has_moved() -> None:
    rig = two_hosts(1)
    num_pages = rig.metric("reserved_pages")
    drain(rig)
    assert rig.metric("reserved_pages") == 2 * num_pages
    [migrate] = asked(rig)
    answer(rig, migrate)
    move(rig, migrate)
    assert rig.metric("reserved_pages") == num_pages


def test_where_nothing_is_free_it_stays_until_something_is() -> None:
    rig = two_hosts(2, pages=2, seqs=8)
    drain(rig)
    assert len(asked(rig)) == 1, "one of two pages each"
    rig = two_hosts(1, pages=1)
    drain(rig)
    rig.run(3.0)
    assert asked(rig) == []


def test_what_nobody_has_room_for_is_looked_at_less_and_less_often() -> None:
    rig = two_hosts(1, pages=1)
    migrations = rig.core.migrations
    drain(rig)
    rests = [migrations._rests["r0"].length_s]
    for _ in range(40):
        rig.run(1.0)
        rests += [migrations._rests["r0"].length_s]
    assert sorted(set(rests)) == [1, 2, 4, 8]
    rig.put(*(replace(rig.workers[f"{role}-a"], num_arena_pages=100) for role in ("prefill", "decode")))
    rig.run(8.0)
    assert len(asked(rig)) == 1


def test_what_waits_for_its_turn_does_not_rest() -> None:
    rig = two_hosts(4)
    drain(rig)
    rig.run(10.0)
    answer(rig, asked(rig)[0])
    move(rig, asked(rig)[0])
    assert len(asked(rig)) == 3


def test_pages_that_leave_a_host_are_room_for_nobody() -> None:
    for num_leaving in (98, 99):
        rig = two_hosts(1)
        reservations = rig.core._requests.reservations
        reservations.prefill_load("prefill-a").num_leaving_pages = num_leaving
        rig.put(*(replace(rig.workers[f"{role}-b"], is_draining=True) for role in ("prefill", "decode")))
        is_begun = any(isinstance(command, SendMigrate) for command in rig.core.decide())
        assert is_begun == (num_leaving == 98), "of 100 pages it needs two"


def test_pages_of_another_size_are_of_no_use_there() -> None:
    rig = two_hosts(1)
    rig.put(*(replace(rig.workers[f"{role}-a"], page_bytes=4096) for role in ("prefill", "decode")))
    drain(rig)
    rig.run(3.0)
    assert asked(rig) == []


def test_a_gateway_that_does_not_begin_is_asked_again_later() -> None:
    rig = two_hosts(1)
    drain(rig)
    answer(rig, asked(rig)[0], accepted=False)
    assert len(asked(rig)) == 1
    rig.run(1.5)
    assert len(asked(rig)) == 2


def test_what_its_gateway_gives_up_stays_where_it_is_and_is_tried_again() -> None:
    rig = two_hosts(1)
    num_pages = rig.metric("reserved_pages")
    drain(rig)
    answer(rig, asked(rig)[0])
    hold(rig, "r0", is_migrating=True)
    rig.run(3.0)
    assert rig.metric("migrations_under_way") == 1
    hold(rig, "r0", is_migrating=False)
    rig.run(0.5)
    assert rig.metric("migrations_abandoned_total") == 1
    assert rig.metric("reserved_pages") == num_pages
    rig.run(2.0)
    assert len(asked(rig)) == 2
    move(rig, asked(rig)[1], dispatch=3)
    assert rig.metric("migrations_moved_total") == 1


def test_a_list_that_comes_late_gives_nothing_up() -> None:
    rig = two_hosts(1)
    late = Held("g", 1, tuple(rig.gateways["g"]))
    drain(rig)
    answer(rig, asked(rig)[0])
    hold(rig, "r0", is_migrating=True)
    rig.run(3.0)
    rig.core.held(late)
    rig.decide()
    assert rig.metric("migrations_abandoned_total") == 0
    assert rig.metric("migrations_under_way") == 1


def test_one_that_ends_meanwhile_leaves_nothing() -> None:
    for ends_under in (1, 2):
        rig = two_hosts(1)
        drain(rig)
        answer(rig, asked(rig)[0])
        rig.finish("r0", dispatch=ends_under)
        rig.decide()
        assert rig.metric("reserved_pages") == 0
        assert rig.metric("migrations_under_way") == 0


def test_a_gateway_that_says_nothing_does_not_keep_the_room() -> None:
    rig = two_hosts(1)
    drain(rig)
    hold(rig, "r0", is_migrating=True)
    rig.run(16.0)
    assert rig.metric("migrations_late_total") == 1


def test_a_worker_of_the_same_memory_takes_it_without_this() -> None:
    rig = two_hosts(2)
    rig.put(replace(worker("b", "decode"), worker_id="decode-b2"))
    rig.put(replace(rig.workers["decode-b"], is_draining=True))
    rig.run(2.0)
    assert asked(rig) == []


def test_prompts_that_are_read_stay() -> None:
    rig = two_hosts(0)
    rig.put(replace(rig.workers["decode-a"], is_draining=True))
    rig.submit("r0")
    assert rig.placement("r0").decode_worker_id == "decode-b"
    rig.put(replace(rig.workers["decode-a"], is_draining=False))
    drain(rig)
    rig.run(1.0)
    assert asked(rig) == []


def test_prompts_that_another_host_reads_for_it_stay() -> None:
    rig = two_hosts(0)
    here = "decode-b", "address-of-decode-b"
    placement = Placement(1, *here, *here, num_reserved_pages=2, prefix_worker_id="prefill-a", prefix_source="a:9")
    rig.gateways["g"] = [HeldRequest(make_submit("r0"), placement)]
    rig.run(0.5)
    drain(rig)
    assert asked(rig) == []
    rig.prefilled("r0")
    assert len(asked(rig)) == 1


STEPS = st.sampled_from(["drain", "undo", "accept", "decline", "move", "give up", "finish", "submit", "time"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(STEPS, st.integers(0, 99)), max_size=40))
def test_whatever_happens_counts_add_up_and_bounds_hold(steps: list[tuple[str, int]]) -> None:
    rig = two_hosts(4)
    dispatch, num_submitted = 1, 0
    for what, pick in steps:
        live = {entry.submit.request_id: entry for entry in rig.gateways["g"]}
        open_ones = [migrate for migrate in asked(rig)[-8:] if migrate.request_id in live]
        migrate = open_ones[pick % len(open_ones)] if open_ones else None
        match what:
            case "drain":
                drain(rig, HOSTS[pick % 2])
            case "undo":
                rig.put(*(replace(one, is_draining=False) for one in list(rig.workers.values())))
            case "accept" | "decline" if migrate is not None:
                answer(rig, migrate, accepted=what == "accept")
                hold(rig, migrate.request_id, is_migrating=what == "accept")
            case "move" if migrate is not None:
                dispatch += 1
                move(rig, migrate, dispatch)
            case "give up" if migrate is not None:
                hold(rig, migrate.request_id)
            case "finish" if live:
                entry = live[sorted(live)[pick % len(live)]]
                rig.finish(entry.submit.request_id, dispatch=entry.placement.dispatch if entry.placement else 1)
            case "submit":
                num_submitted += 1
                rig.submit(f"s{num_submitted}")
            case _:
                rig.run(0.5 + pick % 4)
        rig.decide()
        assert rig.metric("migrations_under_way") <= 2 * MAX_AT_A_TIME
    for request_id in sorted(entry.submit.request_id for entry in rig.gateways["g"]):
        rig.finish(request_id, dispatch=dispatch)
    rig.decide()
    assert rig.metric("reserved_pages") == 0
    assert rig.metric("migrations_under_way") == 0
