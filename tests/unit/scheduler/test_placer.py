"""Where requests go: by the soonest first token, with what is cached counted, and who may not go where."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.scheduler.rig import Rig, make_limits, make_submit, make_worker

from weir.bus.messages import RefusalReason, Submit, WorkerRecord
from weir.bus.prefix_news import PrefixChanged
from weir.core.cost import StepCost
from weir.policy.registry import PolicySpec
from weir.scheduling.limits import PlacingLimits
from weir.scheduling.pools import PrefillCandidate
from weir.scheduling.routing.router import Option, Router

COST = StepCost(5.0, 0.1, 0.0, 0.01, 0.0)


def pairs(num: int) -> list[WorkerRecord]:
    return [
        replace(
            make_worker(f"{role[0]}{number:02}", role, host=f"h{number:02}", context=100_000, pages=9000), cost=COST
        )
        for number in range(num)
        for role in ("prefill", "decode")
    ]


def local(worker_id: str, host: str = "h", **changes: int) -> WorkerRecord:
    record = make_worker(worker_id, "decode", host=host, context=100_000, pages=9000, **changes)  # type: ignore[arg-type]
    return replace(record, serves_locally=True, cost=COST, max_num_batched_tokens=512)


def make_rig(*workers: WorkerRecord, placing: PlacingLimits | None = None, max_prefill_tokens: int = 100_000) -> Rig:
    limits = replace(make_limits(max_prefill_tokens=max_prefill_tokens), placing=placing or PlacingLimits())
    return Rig(limits).start(*workers)


def packed(pages: Sequence[int]) -> bytes:
    return b"".join(page.to_bytes(8, "little") for page in pages)


def tell(rig: Rig, arena_id: str, pages: Sequence[int], sequence: int = 0) -> None:
    rig.core.prefixes_changed(PrefixChanged(arena_id, 1, sequence, None, packed(pages)))


def send(rig: Rig, request_id: str, pages: Sequence[int] = (), **changes: int) -> str:
    """Submits a prompt of 1,600 tokens, or of these pages and one token more; returns its prefill worker."""
    prompt = changes.pop("prompt", 16 * len(pages) + 1 if pages else 1600)
    submit = replace(make_submit(request_id, prompt=prompt, **changes), page_hashes=packed(pages))  # type: ignore[arg-type]
    assert rig.core.submit(submit).queued
    rig.decide()
    return rig.placement(request_id).prefill_worker_id


def test_a_prompt_goes_where_its_beginning_is_cached() -> None:
    rig = make_rig(*pairs(4))
    for number in range(4):
        tell(rig, f"h{number:02}", [1, 2, 3] if number == 2 else [])
    assert send(rig, "a", [1, 2, 3, 4]) == "p02"
    assert rig.placement("a").reason.startswith("split_cached: first token in about")
    assert rig.metric("placed_split_cached_total") == 1


def test_it_goes_elsewhere_when_the_wait_there_is_longer_than_a_prefill_anew() -> None:
    rig = make_rig(*pairs(2))
    tell(rig, "h00", [])
    tell(rig, "h01", range(1, 11))
    assert [send(rig, f"r{number}", range(1, 21)) for number in range(2)] == ["p01", "p01"], "together, and half cached"
    send(rig, "long", prompt=6000)
    on_cached = send(rig, "more", prompt=6000)
    assert {rig.placement("long").prefill_worker_id, on_cached} == {"p00", "p01"}
    assert send(rig, "same", [100, 101]) in ("p00", "p01")


def test_a_burst_with_one_new_beginning_goes_together() -> None:
    rig = make_rig(*pairs(4))
    for number in range(4):
        tell(rig, f"h{number:02}", [])
    pages = list(range(1, 61))
    assert len({send(rig, f"r{number}", [*pages, 100 + number]) for number in range(3)}) == 1


def exchanging(records: Sequence[WorkerRecord], page_bytes: int = 16 << 10) -> list[WorkerRecord]:
    """Of hosts that get pages from one another."""
    return [replace(one, pages_address=f"{one.host_id}:7000", page_bytes=page_bytes) for one in records]


def place_beside(rig: Rig, num_pages_there: int) -> str:
    """Fills host h01, which has the prefix, until a prompt that begins with it goes to h00; returns that one."""
    tell(rig, "h00", [])
    tell(rig, "h01", range(1, num_pages_there + 1))
    pages = range(1, num_pages_there + 1)
    assert send(rig, "cached", pages) == "p01"
    assert rig.placement("cached").prefix_source == "", "it is there already"
    number = 0
    while send(rig, f"more{number}", [*pages, *range(1000 * number + 1000, 1000 * number + 1300)]) == "p01":
        number += 1
    return f"more{number}"


@pytest.mark.parametrize(
    ("num_pages_there", "page_bytes", "is_fetched"),
    [(40, 16 << 10, True), (40, 1 << 20, False), (7, 16 << 10, False), (40, 0, False)],
)
def test_what_is_placed_beside_a_long_prefix_gets_it_from_there(
    num_pages_there: int, page_bytes: int, is_fetched: bool
) -> None:
    """If it is long enough, and comes sooner than it is computed: 640 tokens are 64 ms, and a link has 1 Gb/s as long
    as nobody knows better."""
    rig = make_rig(*exchanging(pairs(2), page_bytes), placing=PlacingLimits(crossing="prefixes"))
    placed = rig.placement(place_beside(rig, num_pages_there))
    assert placed.prefix_source == ("h01:7000" if is_fetched else "")
    assert ("more from h01:7000" in placed.reason) == is_fetched


def test_a_host_that_is_drained_gives_its_prefixes_away() -> None:
    rig = make_rig(*(replace(record, is_draining=record.host_id == "h01") for record in exchanging(pairs(2))))
    tell(rig, "h00", [])
    tell(rig, "h01", range(1, 41))
    assert send(rig, "r", range(1, 41)) == "p00"
    assert rig.placement("r").prefix_source == "h01:7000"


def test_each_of_several_that_begin_alike_knows_the_source_for_any_may_be_the_first_to_begin() -> None:
    rig = make_rig(*(replace(record, is_draining=record.host_id == "h01") for record in exchanging(pairs(2))))
    tell(rig, "h00", [])
    tell(rig, "h01", range(1, 41))
    for request_id, own in (("first", 100), ("second", 200)):
        assert send(rig, request_id, [*range(1, 41), own]) == "p00"
    sources = [rig.placement(request_id).prefix_source for request_id in ("first", "second")]
    assert sources == ["h01:7000", "h01:7000"]


def test_where_no_pages_pass_between_hosts_nothing_is_fetched() -> None:
    rig = make_rig(*pairs(2))
    tell(rig, "h00", [])
    tell(rig, "h01", range(1, 41))
    number = 0
    while send(rig, f"r{number}", [*range(1, 41), *range(1000 * number + 1000, 1000 * number + 1300)]) == "p01":
        number += 1
    assert rig.placement(f"r{number}").prefix_source == ""


def test_longest_prefix_herds_and_the_estimate_does_not() -> None:
    spread = {}
    for router in ("longest-prefix", "estimated-ttft"):
        rig = make_rig(*pairs(4), placing=PlacingLimits(router=router))
        for number in range(4):
            tell(rig, f"h{number:02}", [1] if number == 3 else [])
        spread[router] = {
            send(rig, f"r{number}", [1, *range(100 * number + 2, 100 * number + 60)]) for number in range(4)
        }
    assert spread["longest-prefix"] == {"p03"}
    assert len(spread["estimated-ttft"]) >= 3


def test_a_worker_that_was_given_enough_takes_another_only_for_what_it_has_cached() -> None:
    rig = make_rig(*pairs(2), max_prefill_tokens=256)
    tell(rig, "h00", range(1, 200))
    tell(rig, "h01", [])
    assert send(rig, "first", prompt=200) in ("p00", "p01")
    other = {"p00": "p01", "p01": "p00"}[rig.placement("first").prefill_worker_id]
    cached = send(rig, "cached", [*range(1, 151), *range(900, 920)])
    assert cached == "p00", f"though {other} is idle, or p00 is over its bound"


def test_pools_of_many_workers_are_placed_by_a_few_sampled_ones_and_the_holders_of_the_prefix() -> None:
    rig = make_rig(*pairs(40))
    for number in range(40):
        tell(rig, f"h{number:02}", range(1, 30) if number == 33 else [])
    assert send(rig, "cached", range(1, 31)) == "p33"
    loads = [send(rig, f"r{number}") for number in range(80)]
    assert max(loads.count(worker) for worker in set(loads)) <= 5
    assert len(set(loads)) > 25


def test_of_many_prefill_workers_a_few_are_looked_at_though_few_workers_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four hosts of 24 and 2, that are taken one by one."""
    roles = [("prefill", 24), ("decode", 2)]
    workers = [
        make_worker(f"{role[0]}{host}-{number:02}", role, host=f"h{host}", seqs=1, pages=900)
        for host in range(4)
        for role, num in roles
        for number in range(num)
    ]
    rig, looked_at, option = make_rig(*workers), list[str](), Router.option

    def counted(self: Router, candidate: PrefillCandidate, *given: Any, **named: Any) -> Option:
        looked_at.append(candidate.worker.worker_id)
        return option(self, candidate, *given, **named)

    monkeypatch.setattr(Router, "option", counted)
    for number in range(7):
        send(rig, f"r{number}", prompt=160)
        assert rig.placement(f"r{number}").decode_worker_id
        assert len(looked_at) <= 2
        looked_at.clear()


def test_of_many_workers_a_sampled_one_without_a_slot_gets_nothing() -> None:
    rig = make_rig(*(replace(one, max_num_seqs=1) for one in pairs(20)))
    for number in range(20):
        send(rig, f"r{number}")
    assert len({rig.placement(f"r{number}").decode_worker_id for number in range(20)}) == 20


def test_what_is_cached_of_a_prompt_is_looked_up_as_it_comes_only_for_an_order_that_reads_it() -> None:
    rig = make_rig(*pairs(1))
    tell(rig, "h00", range(1, 31))
    submit = replace(make_submit("first", prompt=641), page_hashes=packed(range(1, 41)))
    for policy, num_uncached_tokens in (("fcfs", 641), ("shortest-prompt", 641 - 30 * 16)):
        rig.core.set_policy(PolicySpec(policy).make())
        rig.core.submit(replace(submit, request_id=policy))
        request = rig.core._requests.try_get(policy)
        assert request is not None
        assert request.waiting.num_uncached_tokens == num_uncached_tokens


def test_what_waits_is_looked_up_once_an_order_that_reads_it_takes_over() -> None:
    """The longer prompt is cached but for its end."""
    rig = make_rig(*(replace(one, max_num_seqs=1) for one in pairs(1)))
    tell(rig, "h00", range(1, 31))
    rig.core.set_policy(PolicySpec("fcfs").make())
    send(rig, "running")
    rig.prefilled("running")
    for request_id, pages in (("short", range(101, 111)), ("cached", range(1, 32))):
        submit = make_submit(request_id, prompt=16 * len(pages) + 1)
        assert rig.core.submit(replace(submit, page_hashes=packed(pages))).queued
    rig.decide()
    rig.core.set_policy(PolicySpec("shortest-prompt").make())
    rig.finish("running")
    rig.decide()
    assert rig.placement("cached").decode_worker_id == "d00"
    request = rig.core._requests.try_get("cached")
    assert request is not None
    assert request.waiting.num_uncached_tokens == 17


def test_of_many_workers_those_few_that_have_a_slot_are_all_compared_and_nothing_crosses_to_them() -> None:
    """A sample of all hosts would hardly meet them, and have the prompt computed at another host."""
    rig = make_rig(*exchanging([replace(one, max_num_seqs=1) for one in pairs(40)]))
    for number in range(40):
        tell(rig, f"h{number:02}", [])
        send(rig, f"r{number}", prompt=32)
        rig.prefilled(f"r{number}")
    for number in range(40):
        decode_worker_id = rig.placement(f"r{number}").decode_worker_id
        rig.finish(f"r{number}")
        pages = range(1000 * number + 1, 1000 * number + 41)
        assert send(rig, f"next{number}", pages) == decode_worker_id.replace("d", "p")
        rig.prefilled(f"next{number}")
    assert rig.metric("placed_split_total") == 80


def test_a_decode_worker_with_too_short_a_context_gets_nothing_from_the_prefill_worker_beside_it() -> None:
    rig = make_rig(*(replace(one, max_context_tokens=1000) if one.worker_id == "d00" else one for one in pairs(2)))
    assert [send(rig, f"long{number}") for number in range(3)] == ["p01"] * 3
    assert send(rig, "short", prompt=100) == "p00"


def test_the_same_events_give_the_same_places() -> None:
    def places() -> list[str]:
        rig = make_rig(*pairs(30))
        return [send(rig, f"r{number}") for number in range(40)]

    assert places() == places()


def test_a_decode_worker_without_prefill_workers_prefills_itself() -> None:
    rig = make_rig(local("d"))
    assert send(rig, "a") == "d"
    assert rig.placement("a").is_local
    assert rig.placement("a").reason.startswith("local:")


def test_a_decode_worker_prefills_when_the_prefill_queue_is_long_and_not_otherwise() -> None:
    prefill = replace(make_worker("p", "prefill", context=100_000, pages=9000), cost=COST)
    rig = make_rig(prefill, local("d"))
    assert send(rig, "first", prompt=6000) == "p"
    assert send(rig, "short", prompt=200) == "d"
    assert rig.placement("short").reason.startswith("local_queue:")
    rig.prefilled("first")
    rig.prefilled("short")
    assert send(rig, "third", prompt=6000) == "p", "it would hold up what runs there"


def test_a_prefill_beside_decodes_that_would_have_to_cost_nothing_cannot_be_asked_for() -> None:
    with pytest.raises(ValueError, match=r"local_gain 1: must be in \[0, 0.99\]"):
        PlacingLimits(local_gain=1)


def test_pages_of_workers_with_memory_of_their_own_are_reserved_there() -> None:
    prefill = replace(make_worker("p", "prefill", seqs=99), num_own_pages=50)
    decodes = [replace(make_worker(f"d{number}", "decode", seqs=99), num_own_pages=10) for number in range(2)]
    rig = make_rig(prefill, *decodes)
    for number in range(5):
        rig.submit(f"r{number}", prompt=64, max_tokens=16)
    assert sorted(rig.placement(name).decode_worker_id for name in rig.granted) == ["d0", "d0", "d1", "d1"]


def test_where_no_decode_worker_keeps_the_pace_the_one_with_the_most_room_is_taken() -> None:
    small = replace(make_worker("d1", "decode"), num_own_pages=20, cost=COST)
    large = replace(make_worker("d2", "decode"), num_own_pages=99, cost=replace(COST, base_ms=9.0))
    prefill = replace(make_worker("p", "prefill"), cost=COST)
    rig = make_rig(prefill, small, large)
    for target_ms, expected in ((0, "d1"), (8, "d1"), (2, "d2")):
        submit = replace(make_submit(f"r{target_ms}", prompt=16, max_tokens=16), itl_target_ms=target_ms)
        assert rig.core.submit(submit).queued
        rig.decide()
        assert rig.placement(f"r{target_ms}").decode_worker_id == expected


def test_past_future_grants_more_than_the_worst_case_once_it_has_seen_short_outputs() -> None:
    counts = {}
    for name in ("conservative", "past-future"):
        placing = PlacingLimits(memory_fit=name)
        rig = make_rig(*[replace(one, num_arena_pages=200, max_num_seqs=999) for one in pairs(1)], placing=placing)
        for number in range(200):
            send(rig, f"past{number}", prompt=16, max_tokens=1000)
            rig.prefilled(f"past{number}")
            rig.finish(f"past{number}")
        for number in range(20):
            rig.submit(f"r{number}", prompt=160, max_tokens=1000)
            rig.prefilled(f"r{number}")
        counts[name] = int(rig.metric("granted"))
    assert counts["conservative"] == 2
    assert counts["past-future"] >= 10


def with_deadline(deadline_ms: int, *, ttft_ms: int = 0, expected: int = 0) -> Submit:
    submit = make_submit("late", prompt=1000, max_tokens=500, deadline_ms=deadline_ms)
    return replace(submit, ttft_target_ms=ttft_ms, expected_output_tokens=expected)


@pytest.mark.parametrize(
    ("submit", "is_queued", "may_come_again"),
    [
        (with_deadline(0, ttft_ms=1), True, False),
        (with_deadline(2000), True, False),
        (with_deadline(2000, ttft_ms=50), False, False),
        (with_deadline(50), False, False),
        (replace(with_deadline(50), takes_partial=True), True, False),
        (with_deadline(1000, expected=300), False, False),
        (with_deadline(3000, expected=300), True, False),
    ],
)
def test_what_cannot_meet_its_deadline_is_refused_at_once(
    submit: Submit, is_queued: bool, may_come_again: bool
) -> None:
    rig = make_rig(*pairs(1))
    reply = rig.core.submit(submit)
    assert (reply.queued, reply.retry_after_ms > 0) == (is_queued, may_come_again)
    assert reply.reason is (None if is_queued else RefusalReason.DEADLINE)


def test_what_would_be_in_time_without_the_others_is_told_when_to_come_again() -> None:
    rig = make_rig(*pairs(1))
    send(rig, "before", prompt=6000)
    reply = rig.core.submit(with_deadline(300))
    assert (reply.queued, reply.reason) == (False, RefusalReason.DEADLINE)
    assert 400 <= reply.retry_after_ms <= 600
    assert "its deadline is in 300 ms" in reply.message


def test_workers_that_have_not_told_their_cost_are_given_the_benefit_of_the_doubt() -> None:
    rig = make_rig(*[replace(one, cost=None) for one in pairs(1)])
    assert rig.core.submit(with_deadline(1)).queued
