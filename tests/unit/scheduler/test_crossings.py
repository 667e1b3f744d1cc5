"""Prompts that one host computes for the decode workers of another one."""

from dataclasses import replace

import pytest
from tests.unit.scheduler.rig import Rig, make_submit, make_worker
from tests.unit.scheduler.test_placer import COST, exchanging, make_rig, packed, send, tell

from weir.bus.messages import HeldRequest, WorkerRecord
from weir.scheduling.limits import Crossing, PlacingLimits


def apart(num_decode: int = 1, **changes: int) -> list[WorkerRecord]:
    """Host h00 has a prefill worker alone, each other one a decode worker that is not to prefill."""
    made = [make_worker("p00", "prefill", host="h00", context=100_000, pages=9000)]
    made += [
        make_worker(f"d{number:02}", "decode", host=f"h{number:02}", context=100_000, pages=9000, **changes)  # type: ignore[arg-type]
        for number in range(1, num_decode + 1)
    ]
    return exchanging([replace(record, cost=COST) for record in made])


def test_a_prompt_is_computed_at_one_host_for_the_decode_worker_of_another() -> None:
    rig = make_rig(*apart())
    pages = range(1, 41)
    assert send(rig, "r", pages) == "d01", "the worker that is asked, and samples the first token"
    placement = rig.placement("r")
    assert placement.is_local
    assert (placement.prefix_worker_id, placement.prefix_worker_address) == ("p00", "address-of-p00")
    assert (placement.prefix_source, placement.decode_worker_id) == ("h00:7000", "d01")
    assert placement.reason.startswith("crossing: first token in about")
    assert rig.core.check_integrity() == ()


def test_what_is_short_or_has_no_hashes_is_computed_where_it_is_answered() -> None:
    rig = make_rig(*apart())
    assert send(rig, "short", range(1, 8)) == "d01"
    assert send(rig, "unknown", prompt=1600) == "d01"
    assert {rig.placement(request_id).prefix_worker_id for request_id in ("short", "unknown")} == {""}


def test_what_the_decode_worker_has_cached_does_not_cross() -> None:
    rig = make_rig(*apart())
    tell(rig, "h01", range(1, 41))
    send(rig, "r", range(1, 41))
    assert (rig.placement("r").prefix_worker_id, rig.placement("r").prefix_source) == ("", "")


def test_no_more_crosses_at_a_time_than_a_quarter_of_an_arena_and_the_pages_are_free_once_it_is_there() -> None:
    rig = make_rig(*(replace(record, num_arena_pages=200) for record in apart()))
    send(rig, "first", range(1, 41))
    assert rig.placement("first").prefix_worker_id == "p00"
    submit = replace(make_submit("second", prompt=641), page_hashes=packed(range(101, 141)))
    assert rig.core.submit(submit).queued
    rig.decide()
    assert "second" not in rig.granted, "80 pages are more than 50"
    rig.prefilled("first")
    rig.decide()
    assert rig.placement("second").prefix_worker_id == "p00"
    rig.finish("first")
    rig.finish("second")
    assert rig.core.check_integrity() == ()


def test_a_prompt_that_can_never_cross_is_computed_by_the_worker_that_answers() -> None:
    rig = make_rig(*(replace(record, num_arena_pages=200) for record in apart()))
    assert send(rig, "long", range(1, 61)) == "d01"
    assert rig.placement("long").prefix_worker_id == ""


def test_a_prompt_that_would_come_too_slowly_is_computed_by_the_worker_that_answers() -> None:
    rig = make_rig(*apart(), placing=PlacingLimits(link_mbit_s=1))
    assert send(rig, "long", range(1, 101)) == "d01"
    assert rig.placement("long").prefix_worker_id == "", "1.6 MB take 13 s"
    send(rig, "short", range(1001, 1041))
    assert rig.placement("short").prefix_worker_id == "p00"


def test_no_prompt_crosses_from_a_worker_that_would_not_begin_before_its_offer_is_given_up() -> None:
    rig = make_rig(*apart())
    for number in range(3):
        send(rig, f"long{number}", range(1000 * number + 1, 1000 * number + 501))
    submit = replace(make_submit("next", prompt=641), page_hashes=packed(range(5001, 5041)))
    assert rig.core.submit(submit).queued
    rig.decide()
    assert "next" not in rig.granted, "2.4 s of prompts are before it"
    rig.prefilled("long0")
    rig.decide()
    assert rig.placement("next").prefix_worker_id == "p00"


def test_pages_that_leave_an_arena_are_promised_to_nobody_there() -> None:
    at_sender = make_worker("d00", "decode", host="h00", context=100_000, draining=True)
    at_sender = exchanging([replace(at_sender, cost=COST)])[0]
    workers = [replace(record, num_arena_pages=200) for record in (*apart(), at_sender)]
    rig = make_rig(*workers)
    send(rig, "crossing", range(1, 41))
    assert rig.placement("crossing").prefix_worker_id == "p00"
    rig.put(replace(workers[-1], is_draining=False))
    large = make_submit("large", prompt=160, max_tokens=2560)
    assert rig.core.submit(large).queued
    rig.decide()
    assert "large" not in rig.granted, "of 200 pages 170 are free at neither host"
    rig.prefilled("crossing")
    rig.decide()
    assert rig.placement("large").decode_worker_id == "d00"


def test_nothing_crosses_where_hosts_do_not_exchange_pages() -> None:
    rig = make_rig(*(replace(record, pages_address="") for record in apart()))
    submit = replace(make_submit("r", prompt=641), page_hashes=packed(range(1, 41)))
    reply = rig.core.submit(submit)
    assert not reply.queued or rig.metric("queued") == 1


@pytest.mark.parametrize("crossing", ["nothing", "prefixes"])
def test_a_host_that_no_prompt_may_cross_to_counts_for_nothing(crossing: Crossing) -> None:
    rig = make_rig(*apart(), placing=PlacingLimits(crossing=crossing))
    workers = rig.core.workers
    assert not workers.can_serve("m")
    pool = rig.core._placer.pools.pool("m", "")
    assert (pool.host_sizes, pool.num_pages, pool.candidates) == ((), 0, ())
    here = [make_worker(f"{role}-09", role, host="h09", context=100_000, pages=10) for role in ("prefill", "decode")]
    rig.put(*exchanging(here))
    assert (workers.can_serve("m"), workers.can_spare("decode-09"), workers.can_spare("p00")) == (True, False, True)
    assert rig.core._placer.pools.pool("m", "").host_sizes == ((10, 100_000),)
    rig.core.set_limits(replace(rig.limits, placing=PlacingLimits(crossing="prompts")))
    assert workers.can_spare("decode-09"), "h00 computes for h01 now"
    assert len(rig.core._placer.pools.pool("m", "").host_sizes) == 2


def test_a_busy_host_has_a_prompt_computed_by_an_idle_one_only_where_that_is_sooner() -> None:
    """Host h00 has the decode worker, h01 an idle prefill worker: what would wait long enough is computed there."""
    records = [
        make_worker("p00", "prefill", host="h00", context=100_000, pages=9000),
        make_worker("d00", "decode", host="h00", context=100_000, pages=9000, seqs=64),
        make_worker("p01", "prefill", host="h01", context=100_000, pages=9000),
    ]
    rig = make_rig(*exchanging([replace(record, cost=COST) for record in records]))
    for number in range(4):
        send(rig, f"r{number}", range(1000 * number + 1, 1000 * number + 101))
    read_by = [rig.placement(f"r{number}").reading_worker_id for number in range(4)]
    assert read_by[0] == "p00"
    assert "p01" in read_by


def test_a_prompt_whose_request_goes_on_elsewhere_crosses_no_more() -> None:
    rig = make_rig(*apart(num_decode=2))
    send(rig, "r", range(1, 41))
    placement = rig.placement("r")
    assert sum(arriving(rig).values()) == 40
    there = replace(placement, dispatch=2, decode_worker_id="d09", prefix_worker_id="", prefix_worker_address="")
    submit = replace(make_submit("r", prompt=641), page_hashes=packed(range(1, 41)))
    rig.gateways["g"] = [HeldRequest(submit, there)]
    rig.say_held()
    rig.decide()
    assert rig.core.is_granted("r", there)
    assert sum(arriving(rig).values()) == 0
    rig.prefilled("r", dispatch=2)
    rig.finish("r", dispatch=2)
    assert rig.metric("reserved_pages") == 0


def arriving(rig: Rig) -> dict[str, int]:
    """Pages of prompts that other hosts are computing, by decode worker."""
    reservations = rig.core._requests.reservations
    return {one: reservations.decode_load(one).num_arriving_pages for one in ("d01", "d02", "d09")}
