"""The int8 path of a model, with the logits that its runner would sample from."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
from tests.unit.model.tiny import poisoned_pages

from weir.engine.plan import ChunkPlan, StepPlan
from weir.model.cpu.core_share import CoreShare, FixedShare
from weir.model.cpu.packed_weights import load_packed
from weir.model.cpu.runner import CpuDecoder, page_numbers
from weir.model.cpu.slices import cut_slices
from weir.model.cpu.workspace import MAX_SLICE_ROWS
from weir.model.files.config import load_model_config
from weir.model.files.digest import model_digest
from weir.model.files.source import ModelSource
from weir.model.precision import page_geometry
from weir.model.rows import ordered_chunks

Logits = npt.NDArray[np.float32]


class Int8Probe:
    """Runs plans over pages that are NaN where nothing was written."""

    def __init__(
        self,
        source: ModelSource,
        cache_dir: Path,
        *,
        num_pages: int = 64,
        share: CoreShare | None = None,
        slice_rows: int = MAX_SLICE_ROWS,
    ) -> None:
        self.config = load_model_config(source)
        packed = load_packed(source, self.config, model_digest(source, "int8"), cache_dir)
        self._decoder = CpuDecoder(self.config, packed, share or FixedShare(1))
        self._slice_rows = slice_rows
        self.pages = poisoned_pages(num_pages, page_geometry(self.config, "int8").page_bytes)
        self._numbers = page_numbers(self.config, self.pages)

    def run(self, *chunks: ChunkPlan) -> dict[int, Logits]:
        """Logits [vocabulary] of each chunk that samples, by slot."""
        config = self.config
        plan = StepPlan(0, chunks)
        ordered = ordered_chunks(plan, len(self.pages), config.vocab_size, config.max_context_tokens)
        found: dict[int, Logits] = {}
        for step_slice in cut_slices(*ordered, self._slice_rows):
            logits = self._decoder.compute(step_slice, self._numbers).logits
            found |= {row.slot: logits[number].copy() for number, row in enumerate(step_slice.sampled)}
        return found
