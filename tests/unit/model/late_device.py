"""A device without a GPU: what is launched is done when somebody waits for it, and not before."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.unit.model.device_model import empty_pages

from weir.kv.geometry import PAGE_TOKENS
from weir.model.files.dummy import shape_named
from weir.model.torch.weights import WeightFormat, dummy_weights_on
from weir.model.triton import runner as triton_runner
from weir.model.triton.batch import DeviceBatch, TritonLimits
from weir.ops.gpu.decode_work import decode_tiles

WRITTEN = 7.0
_CPU = torch.device("cpu")


class LateStream:
    """What a CUDA stream may do at its worst."""

    def __init__(self) -> None:
        self._launched: list[Callable[[], None]] = []

    @property
    def num_pending(self) -> int:
        return len(self._launched)

    def launch(self, work: Callable[[], None]) -> None:
        self._launched.append(work)

    def synchronize(self) -> None:
        while self._launched:
            self._launched.pop(0)()


class LateDecoder:
    """In place of `TritonDecoder`: keys and values are `WRITTEN`, and late. It has no logits."""

    queries_per_tile = 16
    decode_tiles = decode_tiles(32, torch.float32)

    def __init__(self, pages: torch.Tensor, stream: LateStream) -> None:
        self._pages = pages
        self._stream = stream

    def forward(self, batch: DeviceBatch) -> None:
        slot_mapping = batch.slot_mapping.tolist()  # now: the next step is uploaded to the same place

        def write() -> None:
            for place in slot_mapping:
                self._pages[place // PAGE_TOKENS, ..., place % PAGE_TOKENS, :] = WRITTEN

        self._stream.launch(write)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(f"no logits of {len(rows)} rows")


def late_runner(
    monkeypatch: pytest.MonkeyPatch, stream: LateStream, num_pages: int, limits: TritonLimits
) -> tuple[triton_runner.TritonRunner, torch.Tensor]:
    """A runner on such a device, and its pages, all zero."""
    config = replace(shape_named("tiny"), max_context_tokens=limits.max_context_tokens)
    pages = empty_pages(config, num_pages, _CPU, torch.float32)
    monkeypatch.setattr(triton_runner, "TritonDecoder", lambda *_, **__: LateDecoder(pages, stream))
    weights = dummy_weights_on(_CPU, WeightFormat(torch.float32), config)
    return triton_runner.TritonRunner(config, weights, pages, limits, lambda: stream.synchronize), pages
