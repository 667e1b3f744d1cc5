"""Runs steps on a CPU with 8-bit integers: compiled, batch-invariant to the bit, and without torch."""

import numpy as np
import numpy.typing as npt

from weir.core.logprobs import TokenLogprobs
from weir.core.sampling import SamplingParams
from weir.engine.plan import ChunkPlan, SampleSpec, StepPlan, StepResult
from weir.kv.geometry import PAGE_TOKENS, num_pages_for
from weir.model.architecture import ModelConfig
from weir.model.cpu.core_share import CoreShare
from weir.model.cpu.decoder import CpuDecoder, page_numbers
from weir.model.cpu.packed_file import PackedWeights
from weir.model.cpu.slices import cut_slices
from weir.model.cpu.state import BrainFloats
from weir.model.cpu.workspace import MAX_SLICE_ROWS
from weir.model.plan_check import ordered_chunks
from weir.model.precision import page_geometry
from weir.model.sampler import compile_kernels, sample_scanned, score_rows
from weir.ops.simd.jit import compiling_alone

_WARM_UP_TOKENS = 40


class CpuRunner:
    """Implements `weir.engine.plan.ModelRunner` over pages [num_pages, page_bytes] uint8, which stay where they are."""

    def __init__(
        self, config: ModelConfig, packed: PackedWeights, pages: npt.NDArray[np.uint8], share: CoreShare
    ) -> None:
        """Raises ValueError for pages of another geometry."""
        self._config = config
        self._pages = page_numbers(config, pages)
        self._decoder = CpuDecoder(config, packed, share)

    def run(self, plan: StepPlan) -> StepResult:
        """Raises InternalError on a plan that makes no sense, or if the logits are not numbers."""
        return self._run(plan, self._pages)

    def warm_up(self) -> None:
        """Compiles, or loads what was compiled before, and touches every weight, over pages of its own."""
        with compiling_alone():
            compile_kernels()
            self._warm_up_passes()

    def _warm_up_passes(self) -> None:
        num_tokens = min(_WARM_UP_TOKENS, self._config.max_context_tokens - 1)
        num_pages = num_pages_for(num_tokens + 1)
        page_bytes = page_geometry(self._config, "int8").page_bytes
        scratch = page_numbers(self._config, np.zeros((num_pages, page_bytes), np.uint8))
        table = tuple(range(num_pages))
        sampled = SampleSpec(SamplingParams(temperature=1.0, top_p=0.9), output_index=0)
        self._run(StepPlan(0, (ChunkPlan(0, 0, (0,) * num_tokens, table, sampled),)), scratch)
        start = min(PAGE_TOKENS, num_tokens)
        self._run(StepPlan(0, (ChunkPlan(0, start, (0,), table, sampled),)), scratch)

    def _run(self, plan: StepPlan, pages: BrainFloats) -> StepResult:
        config = self._config
        chunks = ordered_chunks(plan, len(pages), config.vocab_size, config.max_context_tokens)
        token_ids: dict[int, int] = {}
        logprobs: dict[int, TokenLogprobs] = {}
        scores: dict[int, tuple[TokenLogprobs, ...]] = {}
        for step_slice in cut_slices(*chunks, MAX_SLICE_ROWS):
            scan = self._decoder.compute(step_slice, pages)
            if step_slice.sampled:
                slots, specs = zip(*step_slice.sampled, strict=True)
                drawn = sample_scanned(scan.first_rows(len(slots)), slots, specs)
                token_ids |= drawn.token_ids
                logprobs |= drawn.logprobs
            for slot, first, next_token_ids, num_top in step_slice.scored:
                rows = scan.logits[first : first + len(next_token_ids)]
                scores[slot] = scores.get(slot, ()) + score_rows(rows, next_token_ids, num_top)
        return StepResult(token_ids, logprobs=logprobs, prompt_logprobs=scores)
