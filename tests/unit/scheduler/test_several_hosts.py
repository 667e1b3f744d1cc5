"""Hosts whose workers look alike: the same roles, indexes and, seen from each machine, addresses."""

from dataclasses import replace

from tests.unit.scheduler.rig import Rig, make_worker

from weir.bus.messages import Placement, WorkerRecord

HOSTS = ("arena-a", "arena-b", "arena-c")


def twins(pages: int = 100) -> list[WorkerRecord]:
    """On each host a prefill and a decode worker at the addresses that those of the other hosts have."""
    return [
        replace(make_worker(f"{role}-0-{host}", role, host=host, pages=pages), address=f"127.0.0.1:{port}")
        for host in HOSTS
        for role, port in (("prefill", 4000), ("decode", 4001))
    ]


def placements(rig: Rig) -> list[Placement]:
    held = (rig.core._requests.try_get(entry.submit.request_id) for entry in rig.gateways["g"])
    return [request.placement for request in held if request is not None and request.placement is not None]


def host_of(worker_id: str) -> str:
    return worker_id.partition("-0-")[2]


def test_a_prefill_worker_is_never_paired_with_a_decode_worker_of_another_host() -> None:
    rig = Rig().start(*twins())
    for number in range(12):
        rig.submit(f"r{number}")
    placed = placements(rig)
    assert len(placed) == 12
    assert {host_of(one.prefill_worker_id) for one in placed} == set(HOSTS)
    assert [one for one in placed if host_of(one.prefill_worker_id) != host_of(one.decode_worker_id)] == []


def test_half_of_one_host_and_half_of_another_serve_nothing() -> None:
    workers = twins()
    rig = Rig().start(workers[0], workers[3])
    rig.submit("r")
    assert placements(rig) == []


def test_what_is_booked_on_a_host_that_is_gone_takes_nothing_from_the_others() -> None:
    """Its arena stays full until its gateways say that those requests ended; then it is forgotten."""
    rig = Rig().start(*twins(pages=6))
    for number in range(6):
        rig.submit(f"r{number}")
    assert len(placements(rig)) == 6
    gone = [worker_id for worker_id in rig.workers if worker_id.endswith(HOSTS[0])]
    for worker_id in gone:
        rig.core.worker_gone(worker_id)
    lost = [one for one in placements(rig) if host_of(one.decode_worker_id) == HOSTS[0]]
    assert len(lost) == 2
    rig.decide()
    assert rig.core.metrics()["workers"] == 4
    assert rig.core.metrics()["reserved_pages"] == 12

    for entry in list(rig.gateways["g"]):
        rig.finish(entry.submit.request_id)
    rig.submit("next")
    (placed,) = placements(rig)
    assert host_of(placed.decode_worker_id) != HOSTS[0]
    assert rig.core.metrics()["reserved_pages"] == placed.num_reserved_pages
    rig.core.tick()
    assert not any(worker_id in rig.core._workers for worker_id in gone)
