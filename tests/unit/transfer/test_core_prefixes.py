"""Prefixes in the core: matched, waited for, sealed by hand-off, release and death, and claimed after a restart."""

from dataclasses import replace

import pytest
from tests.unit.transfer.conftest import World

from weir.core.errors import Overloaded
from weir.core.life import Attempt
from weir.core.sampling import SamplingParams, StopRules
from weir.kv.arena.ownership import NotOwned
from weir.kv.geometry import PAGE_TOKENS
from weir.kv.messages import Claims, PageChain, PrefixMatch
from weir.kv.prefixes import page_hashes, prefix_seed
from weir.kv.records.record import SequenceParams
from weir_transfer.messages import Attachment, HandOffRequest, MatchRequest, StaleAttachment

_SEED = prefix_seed("digest")
_TEXT = tuple(range(100))


def _hashes(num_tokens: int) -> tuple[bytes, ...]:
    return page_hashes(_TEXT[:num_tokens], _SEED)


def _request(num_tokens: int) -> MatchRequest:
    return MatchRequest(_hashes(num_tokens), -(-num_tokens // PAGE_TOKENS), 1)


@pytest.fixture
def prefill(world: World) -> Attachment:
    return world.core.attach(world.registration("prefill"))


@pytest.fixture
def decode(world: World) -> Attachment:
    return world.core.attach(world.registration("decode"))


def _match(world: World, worker: Attachment, num_tokens: int = 100) -> PrefixMatch:
    match = world.core.match(worker.lease_id, worker.number, _request(num_tokens), wait_from_pages=None)
    assert match is not None
    return match


def _has_to_wait(world: World, worker: Attachment, num_tokens: int = 100) -> bool:
    match = world.core.match(worker.lease_id, worker.number, _request(num_tokens), wait_from_pages=4)
    if match is not None:
        _give_back(world, worker, match)
    return match is None


def _give_back(world: World, worker: Attachment, match: PrefixMatch) -> None:
    chain = PageChain((*match.page_ids, *match.acquired.page_ids))
    world.core.release(worker.lease_id, worker.number, [chain], match.acquired.slots, [match.match_id])


def _begin(world: World, match: PrefixMatch, num_tokens: int, num_computed: int) -> PageChain:
    """The sequence of a matched prompt, computed up to there."""
    (slot,) = match.acquired.slots
    record = world.segment.record(slot)
    record.begin(
        SequenceParams(
            request_id="r1",
            attempt=Attempt(1, 0),
            gateway_id="gateway-0-00000000",
            prompt_token_ids=_TEXT[:num_tokens],
            sampling=SamplingParams(),
            stop=StopRules(max_tokens=8),
            num_reserved_pages=16,
            traceparent="",
            prefix_seed=_SEED,
        )
    )
    page_ids = (*match.page_ids, *match.acquired.page_ids)
    record.set_block_table(page_ids)
    record.publish(num_computed)
    return PageChain(page_ids, _hashes(num_computed))


def _cache(world: World, worker: Attachment, num_tokens: int) -> tuple[int, ...]:
    match = _match(world, worker, num_tokens)
    page_ids = (*match.page_ids, *match.acquired.page_ids)
    world.core.release(worker.lease_id, worker.number, [PageChain(page_ids, _hashes(num_tokens))], match.acquired.slots)
    return page_ids[: num_tokens // PAGE_TOKENS]


def test_a_match_pins_what_is_cached_and_acquires_the_rest(world: World, prefill: Attachment) -> None:
    cached = _cache(world, prefill, 64)
    assert world.core.metrics()["prefix_pending"] == 0
    match = _match(world, prefill, 100)
    assert match.page_ids == cached
    assert (len(match.acquired.page_ids), len(match.acquired.slots)) == (3, 1)
    assert world.core.metrics()["shared_pages"] == 4
    with pytest.raises(Overloaded):  # 33 others at most: pinned pages are not evicted
        world.core.acquire(prefill.lease_id, prefill.number, 34, 0)
    _give_back(world, prefill, match)
    metrics = world.core.metrics()
    assert (metrics["cached_pages"], metrics["free_pages"], metrics["prefix_pending"]) == (4, 36, 0)
    assert (metrics["prefix_hit_pages_total"], metrics["prefix_missed_pages_total"]) == (4, 3 + 2)


@pytest.mark.parametrize(("num_tokens", "num_matched"), [(63, 3), (64, 3), (65, 4), (15, 0), (17, 1)])
def test_the_last_token_of_a_prompt_is_never_matched(
    world: World, prefill: Attachment, num_tokens: int, num_matched: int
) -> None:
    _cache(world, prefill, 96)
    assert len(_match(world, prefill, num_tokens).page_ids) == num_matched


def test_a_match_gives_no_part_of_what_is_not_free(world: World, prefill: Attachment) -> None:
    world.core.acquire(prefill.lease_id, prefill.number, 36, 0)
    match = _match(world, prefill, 100)
    assert (match.page_ids, match.acquired.page_ids, match.acquired.slots) == ((), (), ())


def test_who_wants_pages_that_are_being_computed_waits_until_they_are_sealed(
    world: World, prefill: Attachment, decode: Attachment
) -> None:
    match = _match(world, prefill)
    chain = _begin(world, match, 100, 100)
    assert _has_to_wait(world, decode)
    before = world.num_notifications
    world.core.seal(prefill.lease_id, prefill.number, PageChain(chain.page_ids[:2], chain.hashes[:2]))
    assert world.num_notifications == before + 1
    assert _has_to_wait(world, decode)  # four pages are still to come
    world.core.hand_off(
        prefill.lease_id,
        prefill.number,
        HandOffRequest(match.acquired.slots[0], "r1", Attempt(1, 0), "decode", chain.hashes),
    )
    assert not _has_to_wait(world, decode)
    assert _match(world, decode).page_ids == chain.page_ids[:6]
    assert world.core.metrics()["prefix_pending"] == 0


def test_few_pages_are_not_waited_for(world: World, prefill: Attachment, decode: Attachment) -> None:
    _match(world, prefill, 60)
    assert not _has_to_wait(world, decode)


@pytest.mark.parametrize("how", ["gives up", "attaches again", "detaches", "dies"])
def test_nobody_waits_for_an_owner_that_is_gone(
    world: World, prefill: Attachment, decode: Attachment, how: str
) -> None:
    match = _match(world, prefill)
    before = world.num_notifications
    match how:
        case "gives up":
            world.core.release(prefill.lease_id, prefill.number, [], (), [match.match_id])
        case "attaches again":
            claims = Claims(match.acquired.page_ids, match.acquired.slots)
            world.core.attach(world.registration("prefill", prefill.lease_id, claims))
        case "detaches":
            world.core.detach(prefill.lease_id, prefill.number)
        case _:
            world.core.end_lease(prefill.lease_id)
    assert world.num_notifications > before
    assert not _has_to_wait(world, decode)


def test_a_match_of_somebody_else_cannot_be_given_up(world: World, prefill: Attachment, decode: Attachment) -> None:
    match = _match(world, prefill)
    world.core.release(decode.lease_id, decode.number, [], (), [match.match_id, 999])
    assert _has_to_wait(world, decode)


def test_a_hand_off_passes_pins_and_seals_only_what_is_computed(
    world: World, prefill: Attachment, decode: Attachment
) -> None:
    cached = _cache(world, prefill, 32)
    match = _match(world, prefill)
    chain = _begin(world, match, 100, 70)
    request = HandOffRequest(match.acquired.slots[0], "r1", Attempt(1, 0), "decode", _hashes(100))
    committed = world.core.hand_off(prefill.lease_id, prefill.number, request)
    assert committed.receipt.num_pages == 7
    assert world.core.metrics()["shared_pages"] == 4
    world.core.end_lease(prefill.lease_id)
    assert world.core.metrics()["shared_pages"] == 4
    assert chain.page_ids[:2] == cached
    world.core.release(decode.lease_id, decode.number, [PageChain(chain.page_ids)], match.acquired.slots)
    assert world.core.metrics()["cached_pages"] == 4


def test_what_a_dead_worker_computed_is_found_by_the_next(world: World, prefill: Attachment) -> None:
    match = _match(world, prefill)
    chain = _begin(world, match, 100, 90)
    world.core.end_lease(prefill.lease_id)
    assert world.core.integrity_errors() == ()
    world.core.tick()
    other = world.core.attach(world.registration("other"))
    assert _match(world, other).page_ids == chain.page_ids[:5]


@pytest.mark.parametrize("way", ["hand-off", "death"])
@pytest.mark.parametrize("is_prefix_kept", [True, False], ids=["all kept", "beginning freed"])
def test_a_sequence_without_its_first_pages_offers_what_is_behind_pages_that_are_kept(
    world: World, prefill: Attachment, decode: Attachment, way: str, is_prefix_kept: bool
) -> None:
    """Each page under its own hash, however it came to be shared."""
    match = _match(world, prefill)
    chain, (slot,) = _begin(world, match, 100, 90), match.acquired.slots
    record = world.segment.record(slot)
    record.read()
    record.drop_first_pages(3)
    given = PageChain(chain.page_ids[:3], _hashes(48) if is_prefix_kept else ())
    world.core.release(prefill.lease_id, prefill.number, [given], ())
    assert world.core.integrity_errors() == ()
    if way == "hand-off":
        request = HandOffRequest(slot, "r1", Attempt(1, 0), "decode", _hashes(100))
        committed = world.core.hand_off(prefill.lease_id, prefill.number, request)
        assert committed.receipt.num_pages == 4
    else:
        world.core.end_lease(prefill.lease_id)
        world.core.tick()
    assert world.core.integrity_errors() == ()
    other = world.core.attach(world.registration("other"))
    found = _match(world, other)
    assert found.page_ids == (chain.page_ids[:5] if is_prefix_kept else ())
    _give_back(world, other, found)


@pytest.mark.parametrize("named", ["no page of the arena", "one page twice"])
def test_of_a_dead_worker_whose_block_table_is_damaged_nothing_is_kept(
    world: World, prefill: Attachment, named: str
) -> None:
    match = _match(world, prefill)
    _begin(world, match, 100, 90)
    block_table = world.segment.record(match.acquired.slots[0])._block_table
    block_table[1] = 1 << 20 if named == "no page of the arena" else block_table[0]
    world.core.end_lease(prefill.lease_id)
    world.core.tick()
    assert world.core.leases() == []
    assert world.core.metrics()["free_pages"] == 40


def test_two_pages_of_one_hash_are_sealed_once(world: World, prefill: Attachment) -> None:
    acquired = world.core.acquire(prefill.lease_id, prefill.number, 2, 0)
    chain = PageChain(acquired.page_ids, _hashes(16) * 2)
    world.core.seal(prefill.lease_id, prefill.number, chain)
    assert world.core.integrity_errors() == ()
    world.core.release(prefill.lease_id, prefill.number, [chain], ())
    assert len(world.core.acquire(prefill.lease_id, prefill.number, 40, 0).page_ids) == 40


def test_after_a_restart_nothing_is_evicted_before_all_have_claimed_what_they_hold(
    world: World, prefill: Attachment, decode: Attachment
) -> None:
    _cache(world, prefill, 96)
    match = _match(world, decode, 33)  # no record shows that decode uses these two pages
    world.restart()
    again = world.core.attach(world.registration("prefill", prefill.lease_id))
    assert world.core.metrics()["cached_pages"] == 6
    with pytest.raises(Overloaded, match="free are 33 and 5; 6 cached pages are kept until every worker"):
        world.core.acquire(again.lease_id, again.number, 34, 0)  # 33 are free, decode's third page aside
    world.core.attach(world.registration("decode", decode.lease_id, _claims(match)))
    assert len(world.core.acquire(again.lease_id, again.number, 37, 0).page_ids) == 37
    metrics = world.core.metrics()
    assert (metrics["shared_pages"], metrics["prefix_evicted_pages_total"]) == (2, 4)


def test_a_worker_that_dies_over_a_restart_stops_no_eviction(world: World, prefill: Attachment) -> None:
    _cache(world, prefill, 96)
    world.restart()
    world.core.end_lease(prefill.lease_id)
    world.core.tick()
    other = world.core.attach(world.registration("other"))
    assert len(world.core.acquire(other.lease_id, other.number, 40, 0).page_ids) == 40


def test_a_sequence_keeps_its_shared_pages_over_a_restart_that_its_worker_sleeps_through(
    world: World, prefill: Attachment
) -> None:
    _cache(world, prefill, 96)
    match = _match(world, prefill)
    _begin(world, match, 100, 96)
    world.restart()
    assert world.core.metrics()["shared_pages"] == 6
    claims = replace(_claims(match), page_ids=match.acquired.page_ids, slots=(), handing_off_slots=match.acquired.slots)
    world.core.attach(world.registration("prefill", prefill.lease_id, claims))
    assert world.core.metrics()["shared_pages"] == 6


def test_a_match_whose_answer_was_lost_is_taken_back(world: World, prefill: Attachment) -> None:
    _cache(world, prefill, 96)
    _match(world, prefill)
    world.core.attach(world.registration("prefill", prefill.lease_id))
    metrics = world.core.metrics()
    assert (metrics["cached_pages"], metrics["free_pages"], metrics["free_slots"]) == (6, 34, 6)


def test_pages_cannot_be_given_back_more_often_than_they_are_pinned(world: World, prefill: Attachment) -> None:
    cached = _cache(world, prefill, 96)
    _match(world, prefill)
    _match(world, prefill)
    chain = PageChain(cached)
    with pytest.raises(NotOwned):
        world.core.release(prefill.lease_id, prefill.number, [chain, chain, chain], ())
    world.core.release(prefill.lease_id, prefill.number, [chain, chain], ())
    with pytest.raises(NotOwned):
        world.core.release(prefill.lease_id, prefill.number, [chain], ())


def test_a_stale_attachment_can_neither_match_nor_seal(world: World, prefill: Attachment) -> None:
    world.core.break_stream(prefill.lease_id, prefill.number)
    with pytest.raises(StaleAttachment):
        _match(world, prefill)
    with pytest.raises(StaleAttachment):
        world.core.seal(prefill.lease_id, prefill.number, PageChain(()))


def test_with_the_cache_off_everything_is_computed_and_freed(world: World) -> None:
    world.settings = replace(world.settings, keeps_prefixes=False)
    world.restart()
    worker = world.core.attach(world.registration("w"))
    assert _cache(world, worker, 96)
    match = _match(world, worker)
    assert (match.match_id, match.page_ids, len(match.acquired.page_ids)) == (0, (), 7)
    _begin(world, match, 100, 96)
    world.core.end_lease(worker.lease_id)
    world.core.tick()
    assert world.core.metrics()["free_pages"] == 40


def _claims(match: PrefixMatch) -> Claims:
    return Claims((*match.page_ids, *match.acquired.page_ids), match.acquired.slots)
