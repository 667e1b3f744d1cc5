"""A segment in which bits have turned: it is refused, or replaced, or what is in it is consistent and nothing is read
that nobody wrote. Also with the header's checksum made right again, as a program with a mistake would leave it."""

import contextlib
import struct
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.fuzz.choices import Choices, edited
from tests.fuzz.target import Check, Target
from tests.unit.transfer.conftest import World
from tests.unit.transfer.test_core_deaths import CACHED, COMPUTED, Scene
from weir.core.grammar import Grammar
from weir.core.life import Attempt
from weir.core.sampling import SamplingParams, StopRules
from weir.kv.arena.segment import Segment, SegmentError, claim_segment, try_read_header
from weir.kv.layout import HEADER_BYTES, PageState, SegmentMismatch, layout_of
from weir.kv.messages import Claims
from weir.kv.records.record import SequenceParams, SequenceSnapshot
from weir_transfer.messages import AttachRefused

_GRAMMAR = Grammar("regex", "[ab]+")
_CRC_AT = HEADER_BYTES - 4


class _Scene:
    """A segment as a restart finds it: two workers with a sequence each, one of them with a grammar, and a prefix."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "arena"
        self.world = World(self.path, adoption_wait_ms=1000)
        scene = Scene.begin(self.world)
        scene.hand_off(scene.prefill, "decode")
        slot = scene.others.slots[0]
        record = self.world.segment.record(slot)
        sampling = SamplingParams(grammar=_GRAMMAR, logprobs=1)
        record.begin(SequenceParams("r2", Attempt(1, 0), "g", (1, 2, 3), sampling, StopRules(8), 2, ""))
        record.set_block_table(scene.others.page_ids[:2])
        record.append_token(5)
        record.publish(3)
        self.claims = {
            "decode": Claims(page_ids=(*scene.page_ids, *scene.others.page_ids), slots=(scene.slot, slot)),
            "prefill": Claims(),
        }
        self.leases = {name: getattr(scene, name).lease_id for name in self.claims}
        segment = self.world.segment
        self.geometry, self.layout = segment.geometry, layout_of(segment.geometry)
        self.written = [_plain(segment.record(slot).read()) for slot in range(self.geometry.num_slots)]
        self.pages_of = {page_hash: self._page_of(page_hash) for page_hash in (*CACHED, *COMPUTED)}
        segment.close()
        self.content = self.path.read_bytes()
        self.path.unlink()

    def _page_of(self, page_hash: bytes) -> list[int]:
        return self.world.core.prefixes.find_prefix([page_hash])


def _plain(snapshot: SequenceSnapshot | None) -> SequenceSnapshot | None:
    """Log-probabilities have no checksum: they are a convenience of an adoption."""
    return None if snapshot is None else replace(snapshot, output_logprobs=())


@contextlib.contextmanager
def _segments() -> Iterator[Check]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        scene = _Scene(Path(folder))

        def check(data: bytes) -> None:
            scene.path.unlink(missing_ok=True)
            scene.path.touch(0o600)
            scene.path.write_bytes(_spoilt(scene, Choices(data)))
            try_read_header(scene.path)
            _go_on(scene)

        yield check
        scene.path.unlink(missing_ok=True)


def _spoilt(scene: _Scene, choices: Choices) -> bytes:
    """In one part of the metadata, whose place stays what it is; sometimes cut."""
    layout, content = scene.layout, scene.content
    starts = (0, layout.counters, layout.leases, layout.slots, layout.pages, layout.records, layout.annexes)
    start = choices.pick(starts)
    size = 512 if start < layout.records else layout.record_bytes * 6 if start == layout.records else 400_000
    spoilt = edited(choices, content[start : start + size], in_place=start > 0)[:size]
    whole = bytearray(content)
    whole[start : start + len(spoilt)] = spoilt
    if start == 0 and choices.below(2):
        struct.pack_into("<I", whole, _CRC_AT, zlib.crc32(whole[:_CRC_AT]))
    return bytes(whole[: choices.below(len(whole))]) if choices.below(32) == 1 else bytes(whole)


def _go_on(scene: _Scene) -> None:
    """As a transfer service does that starts again."""
    claimed = claim_segment(scene.path, scene.geometry, "digest")
    try:
        _check_records(scene, claimed.segment)
        world = scene.world
        world.segment = claimed.segment
        world.restart()
        assert world.core.integrity_errors() == ()
        for page_hash, page_ids in scene.pages_of.items():
            assert world.core.prefixes.find_prefix([page_hash]) in ([], page_ids), "another page than was sealed"
        for name, claims in scene.claims.items():
            with contextlib.suppress(AttachRefused):
                world.core.attach(world.registration(name, scene.leases[name], claims))
        assert world.core.integrity_errors() == ()
        for lease in world.core.leases():
            world.core.end_lease(lease.lease_id)
            world.core.adopt_orphans()
        world.clock.advance(10.0)
        world.core.tick()
        assert world.core.integrity_errors() == ()
        states = claimed.segment.page_rows["state"]
        assert set(states.tolist()) <= {PageState.FREE, PageState.CACHED}, "a page is lost"
    finally:
        claimed.segment.close()


def _check_records(scene: _Scene, segment: Segment) -> None:
    for slot, written in enumerate(scene.written):
        found = _plain(segment.record(slot).read())
        assert found is None or found == written, "a sequence that nobody wrote"


TARGETS = (Target("segments", _segments, (SegmentError, SegmentMismatch), max_bytes=256, ci_examples=100),)
