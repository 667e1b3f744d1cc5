"""A small segment for the tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from weir.core.life import Attempt
from weir.core.sampling import SamplingParams, StopRules
from weir.kv.arena.segment import Segment
from weir.kv.geometry import ArenaGeometry
from weir.kv.records.record import SequenceParams


@pytest.fixture
def geometry() -> ArenaGeometry:
    return ArenaGeometry(page_bytes=4096, num_pages=40, num_slots=6, max_context_tokens=256)


@pytest.fixture
def segment(tmp_path: Path, geometry: ArenaGeometry) -> Iterator[Segment]:
    made = Segment.create(tmp_path / "arena", geometry, "digest")
    yield made
    made.close()


@pytest.fixture
def params() -> SequenceParams:
    return SequenceParams(
        request_id="0123456789abcdef0123456789abcdef",
        attempt=Attempt(2, 1),
        gateway_id="gateway-0-1234abcd",
        prompt_token_ids=(5, 6, 7, 49151),
        sampling=SamplingParams(temperature=0.75, top_k=40, top_p=0.9, seed=2**64 - 1),
        stop=StopRules(max_tokens=64, stop_token_ids=(0, 2)),
        num_reserved_pages=9,
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        decode_worker_id="decode-0-1234abcd",
    )
