"""In whatever write the transfer service dies: its successor over the same segment finds a whole table."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.unit.transfer.conftest import World

from weir.core.life import Attempt
from weir.core.sampling import SamplingParams, StopRules
from weir.kv.arena.segment import Segment
from weir.kv.messages import Acquired, Claims, PageChain
from weir.kv.prefixes import page_hashes, prefix_seed
from weir.kv.records.record import SequenceParams
from weir_transfer.messages import Attachment, HandOffRequest, MatchRequest

SEED = prefix_seed("digest")
TEXT = tuple(range(100))
COMPUTED = page_hashes(TEXT[:90], SEED)
CACHED = page_hashes(TEXT[:48], SEED)


class Death(BaseException):
    """The process ends here."""


class MortalRows(np.ndarray[Any, Any]):
    """Rows of the segment; the process dies in the write for which none is left, half way if it is of several rows."""

    writes_left: int | None = None

    def __setitem__(self, key: Any, value: Any) -> None:
        if MortalRows.writes_left == 0:
            if isinstance(key, np.ndarray) and key.dtype != np.bool_:
                half = key[: len(key) // 2]
                super().__setitem__(half, value if np.ndim(value) == 0 else np.asarray(value)[: len(half)])
            raise Death
        if MortalRows.writes_left is not None:
            MortalRows.writes_left -= 1
        super().__setitem__(key, value)


class MortalSegment(Segment):
    """Every row of every table is mortal."""

    def _rows(self, dtype: np.dtype[Any], offset: int, count: int) -> NDArray[Any]:
        return super()._rows(dtype, offset, count).view(MortalRows)


@dataclass
class Scene:
    """`prefill` has a sequence of 7 pages, 90 of its 100 tokens computed, the first 3 pages cached before; `decode` has
    a slot and pages without a sequence."""

    world: World
    prefill: Attachment
    decode: Attachment
    slot: int
    page_ids: tuple[int, ...]
    others: Acquired
    given: tuple[int, ...] = ()

    @classmethod
    def begin(cls, world: World) -> "Scene":
        prefill, decode = (world.core.attach(world.registration(name)) for name in ("prefill", "decode"))
        cached = world.core.acquire(prefill.lease_id, prefill.number, 3, 0).page_ids
        world.core.release(prefill.lease_id, prefill.number, [PageChain(cached, CACHED)], ())
        prompt = MatchRequest(page_hashes(TEXT, SEED), num_pages=7, num_slots=1)
        match = world.core.match(prefill.lease_id, prefill.number, prompt, wait_from_pages=None)
        assert match is not None
        (slot,) = match.acquired.slots
        scene = cls(
            world=world,
            prefill=prefill,
            decode=decode,
            slot=slot,
            page_ids=(*match.page_ids, *match.acquired.page_ids),
            others=world.core.acquire(decode.lease_id, decode.number, 4, 1),
        )
        record = world.segment.record(slot)
        record.begin(
            SequenceParams("r1", Attempt(1, 0), "g", TEXT, SamplingParams(), StopRules(8), 16, "", prefix_seed=SEED)
        )
        record.set_block_table(scene.page_ids)
        record.append_token(7)
        record.publish(num_computed_tokens=90)
        return scene

    def hand_off(self, sender: Attachment, to: str) -> None:
        request = HandOffRequest(self.slot, "r1", Attempt(1, 0), to, COMPUTED)
        self.world.core.hand_off(sender.lease_id, sender.number, request)

    def release(self) -> None:
        chain = PageChain.of_sequence(self.page_ids, 7 - len(self.page_ids), COMPUTED)
        self.world.core.release(self.prefill.lease_id, self.prefill.number, [chain], (self.slot,))

    def pass_window(self) -> None:
        """The record says that the first 5 pages are not the sequence's: 3 that are shared, and 2 of its own."""
        record = self.world.segment.record(self.slot)
        record.read()
        record.drop_first_pages(5)
        self.given, self.page_ids = self.page_ids[:5], self.page_ids[5:]

    def give_first_pages_back(self) -> None:
        chain = PageChain.of_sequence(self.given, 0, COMPUTED)
        self.world.core.release(self.prefill.lease_id, self.prefill.number, [chain], ())

    def begin_behind_window(self) -> None:
        self.pass_window()
        self.give_first_pages_back()

    def seal(self) -> None:
        self.world.core.seal(self.prefill.lease_id, self.prefill.number, PageChain(self.page_ids, COMPUTED))

    def bury(self) -> None:
        self.world.core.end_lease(self.prefill.lease_id)
        self.world.core.tick()

    def adopt(self) -> None:
        """The worker is dead, and another one takes its sequence over."""
        self.world.core.end_lease(self.prefill.lease_id)
        self.world.core.adopt_orphans()
        self.world.core.tick()

    def claims(self) -> dict[str, Claims | None]:
        """By worker."""
        return {
            "prefill": Claims(self.page_ids, (self.slot,)),
            "decode": Claims(self.others.page_ids, self.others.slots),
        }


@dataclass(frozen=True)
class Operation:
    """What the service does when it dies, after `before`.

    `claims`: where what a worker claims from the next service differs from `Scene.claims`; None: the worker is dead.
    `receiver` may get the sequence, and be told of it.
    """

    work: Callable[[Scene], object]
    claims: Callable[[Scene], dict[str, Claims | None]] = lambda _: {}
    before: Callable[[Scene], object] = lambda _: None
    receiver: str = ""
    adoption_wait_ms: int = 0


OPERATIONS = {
    "hands off": Operation(
        lambda scene: scene.hand_off(scene.prefill, "decode"),
        lambda scene: {"prefill": Claims(handing_off_slots=(scene.slot,))},
        receiver="decode",
    ),
    "hands off what its worker has given up": Operation(
        lambda scene: scene.hand_off(scene.prefill, "decode"), lambda _: {"prefill": Claims()}, receiver="decode"
    ),
    "hands back": Operation(
        lambda scene: scene.hand_off(scene.decode, "prefill"),
        lambda scene: {
            "prefill": Claims(),
            "decode": Claims(scene.others.page_ids, scene.others.slots, (scene.slot,)),
        },
        before=lambda scene: scene.hand_off(scene.prefill, "decode"),
        receiver="prefill",
    ),
    "releases": Operation(Scene.release, lambda _: {"prefill": Claims()}),
    "seals": Operation(Scene.seal),
    "acquires and evicts": Operation(
        lambda scene: scene.world.core.acquire(scene.prefill.lease_id, scene.prefill.number, 34, 2),
        lambda _: {"prefill": Claims()},
        before=Scene.release,
    ),
    "frees what a dead worker held": Operation(Scene.bury, lambda _: {"prefill": None}),
    "has its sequence adopted": Operation(
        Scene.adopt, lambda _: {"prefill": None}, receiver="decode", adoption_wait_ms=60_000
    ),
    "gives a sequence away": Operation(
        lambda scene: scene.hand_off(scene.prefill, ""),
        lambda scene: {"prefill": Claims(handing_off_slots=(scene.slot,))},
        receiver="decode",
        adoption_wait_ms=60_000,
    ),
    "takes pages back that a sequence has passed": Operation(Scene.give_first_pages_back, before=Scene.pass_window),
    "frees pages that a dead worker's sequence had passed": Operation(
        Scene.bury, lambda _: {"prefill": None}, before=Scene.pass_window
    ),
    "has a sequence adopted whose first pages were on their way back": Operation(
        Scene.adopt, lambda _: {"prefill": None}, Scene.pass_window, receiver="decode", adoption_wait_ms=60_000
    ),
    "hands off what holds its last pages only": Operation(
        lambda scene: scene.hand_off(scene.prefill, "decode"),
        lambda scene: {"prefill": Claims(handing_off_slots=(scene.slot,))},
        before=Scene.begin_behind_window,
        receiver="decode",
    ),
    "releases what holds its last pages only": Operation(
        Scene.release, lambda _: {"prefill": Claims()}, before=Scene.begin_behind_window
    ),
    "attaches": Operation(lambda scene: scene.world.core.attach(scene.world.registration("new"))),
    "takes back": Operation(
        lambda scene: scene.world.core.attach(scene.world.registration("prefill", scene.prefill.lease_id)),
        lambda _: {"prefill": Claims()},
    ),
}


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Callable[[Operation], World]]:
    """Makes worlds for an operation, one after the other."""
    numbers = itertools.count()

    def make(operation: Operation) -> World:
        path = tmp_path / f"arena-{next(numbers)}"
        return World(path, MortalSegment, adoption_wait_ms=operation.adoption_wait_ms)

    yield make
    MortalRows.writes_left = None


def dies(work: Callable[[], object], num_writes: int) -> bool:
    """False: it needs no more writes than that."""
    MortalRows.writes_left = num_writes
    try:
        work()
    except Death:
        return True
    finally:
        MortalRows.writes_left = None
    return False


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_service_that_dies_while_it(name: str, mortal: Callable[[Operation], World]) -> None:
    operation = OPERATIONS[name]
    for num_writes in itertools.count():
        scene = Scene.begin(mortal(operation))
        operation.before(scene)
        has_died = dies(partial(operation.work, scene), num_writes)
        check_successor(scene, operation, f"{num_writes} writes")
        scene.world.segment.close()
        if not has_died:
            assert num_writes > 5
            return


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_successor_that_dies_while_it_makes_whole_what_another_left_that(
    name: str, mortal: Callable[[Operation], World]
) -> None:
    operation = OPERATIONS[name]
    for num_writes, num_writes_after in itertools.product(range(1, 20, 6), range(0, 20, 2)):
        scene = Scene.begin(mortal(operation))
        operation.before(scene)
        dies(partial(operation.work, scene), num_writes)
        dies(scene.world.restart, num_writes_after)
        check_successor(scene, operation, f"{num_writes} and {num_writes_after} writes")
        scene.world.segment.close()


def test_a_sequence_that_was_being_given_away_is_given_by_the_repeated_call(
    mortal: Callable[[Operation], World],
) -> None:
    operation = OPERATIONS["gives a sequence away"]
    for num_writes in itertools.count():
        scene = Scene.begin(mortal(operation))
        has_died = dies(partial(operation.work, scene), num_writes)
        world = scene.world
        world.restart()
        for worker_id, claims in (scene.claims() | operation.claims(scene)).items():
            lease_id = {"prefill": scene.prefill, "decode": scene.decode}[worker_id].lease_id
            attachment = world.core.attach(world.registration(worker_id, lease_id, claims or Claims()))
            if worker_id == "prefill":
                scene.prefill = attachment
        scene.hand_off(scene.prefill, "")
        assert world.core.integrity_errors() == (), num_writes
        summary = world.segment.record(scene.slot).summarize()
        assert summary is not None
        assert summary.attempt.adoption >= 1
        again = world.core.attach(world.registration("decode", scene.decode.lease_id))
        assert [sequence.slot for sequence in again.handed_off] == [scene.slot], num_writes
        world.segment.close()
        if not has_died:
            return


def check_successor(scene: Scene, operation: Operation, when: str) -> None:
    """Nothing is lost, held twice, or held by nobody."""
    world = scene.world
    world.restart()
    assert world.core.integrity_errors() == (), when
    slots, pages = set[int](), set[int]()
    for worker_id, claims in (scene.claims() | operation.claims(scene)).items():
        lease_id = {"prefill": scene.prefill, "decode": scene.decode}[worker_id].lease_id
        if claims is None:
            world.core.end_lease(lease_id)
            continue
        again = world.core.attach(world.registration(worker_id, lease_id, claims))
        assert worker_id == operation.receiver or again.handed_off == (), f"{when}: told of what was its own"
        slots.update(claims.slots, claims.handing_off_slots, (sequence.slot for sequence in again.handed_off))
        pages.update(claims.page_ids)
    slots.update(announcement.sequence.slot for announcement in world.core.adopt_orphans())
    world.core.tick()
    assert world.core.integrity_errors() == (), when
    pages.update(scene.page_ids if scene.slot in slots else ())
    metrics = world.core.metrics()
    assert metrics["leased_pages"] + metrics["shared_pages"] == len(pages), when
    assert metrics["free_slots"] == world.segment.geometry.num_slots - len(slots), when
