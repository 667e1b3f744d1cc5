"""Runs steps on a CPU with 8-bit integers: compiled, batch-invariant to the bit, and without torch."""

import numpy as np
import numpy.typing as npt

from weir.core.logprobs import TokenLogprobs
from weir.core.sampling import SamplingParams
from weir.engine.plan import ChunkPlan, SampleSpec, StepPlan, StepResult
from weir.kv.geometry import PAGE_TOKENS, num_pages_for
from weir.model.architecture import ModelConfig
from weir.model.core_share import CoreShare
from weir.model.cpu_forward import forward
from weir.model.cpu_state import Extent, Floats
from weir.model.cpu_workspace import MAX_SLICE_ROWS, Workspace, make_model
from weir.model.crew import Crew
from weir.model.packed_file import PackedWeights
from weir.model.plan_check import ordered_chunks
from weir.model.sampler import compile_kernels, sample_step, score_rows
from weir.model.step_slices import SliceArrays, StepSlice, cut_slices
from weir.ops.simd.barrier import BarrierState
from weir.ops.simd.jit import compiling_alone

_ROW_LAYERS_A_CALL = 256
"""Rows times layers after which the share of cores is looked at again: some milliseconds."""
_WARM_UP_TOKENS = 40


class CpuRunner:
    """Implements `weir.engine.plan.ModelRunner` over pages [num_pages, page_bytes] uint8, which stay where they are."""

    def __init__(
        self, config: ModelConfig, packed: PackedWeights, pages: npt.NDArray[np.uint8], share: CoreShare
    ) -> None:
        """Raises ValueError for pages of another geometry."""
        self._config = config
        self._model = make_model(config, packed)
        self._workspace = Workspace(config, share.most)
        self._crew = Crew(share)
        self._pages = _as_floats(config, pages)

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
        page_bytes = self._config.page_geometry.page_bytes
        scratch = _as_floats(self._config, np.zeros((num_pages, page_bytes), np.uint8))
        table = tuple(range(num_pages))
        sampled = SampleSpec(SamplingParams(temperature=1.0, top_p=0.9), output_index=0)
        self._run(StepPlan(0, (ChunkPlan(0, 0, (0,) * num_tokens, table, sampled),)), scratch)
        start = min(PAGE_TOKENS, num_tokens)
        self._run(StepPlan(0, (ChunkPlan(0, start, (0,), table, sampled),)), scratch)

    def _run(self, plan: StepPlan, pages: Floats) -> StepResult:
        config = self._config
        chunks = ordered_chunks(plan, len(pages), config.vocab_size, config.max_context_tokens)
        token_ids: dict[int, int] = {}
        logprobs: dict[int, TokenLogprobs] = {}
        scores: dict[int, tuple[TokenLogprobs, ...]] = {}
        for step_slice in cut_slices(*chunks, MAX_SLICE_ROWS):
            self._compute(step_slice, pages)
            logits = self._workspace.buffers.logits
            if step_slice.sampled:
                slots, specs = zip(*step_slice.sampled, strict=True)
                drawn = sample_step(logits[: len(slots)], slots, specs)
                token_ids |= drawn.token_ids
                logprobs |= drawn.logprobs
            for slot, first, next_token_ids, num_top in step_slice.scored:
                rows = logits[first : first + len(next_token_ids)]
                scores[slot] = scores.get(slot, ()) + score_rows(rows, next_token_ids, num_top)
        return StepResult(token_ids, logprobs=logprobs, prompt_logprobs=scores)

    def _compute(self, step_slice: StepSlice, pages: Floats) -> None:
        """Keys and values into the pages, logits into the workspace."""
        extent = self._workspace.plan_attention(step_slice.arrays)
        num_layers = self._config.num_layers
        layers_a_call = max(1, _ROW_LAYERS_A_CALL // step_slice.num_rows)
        for first in range(0, num_layers, layers_a_call):
            last = min(first + layers_a_call, num_layers)
            self._call(step_slice.arrays, pages, extent._replace(first_layer=first, last_layer=last))

    def _call(self, arrays: SliceArrays, pages: Floats, extent: Extent) -> None:
        model, buffers = self._model, self._workspace.buffers

        def work(barrier: BarrierState, base: int, thread: int, num_threads: int) -> None:
            forward(model, buffers, arrays, pages, extent, barrier, base, thread, num_threads)

        self._crew.run(work)


def _as_floats(config: ModelConfig, pages: npt.NDArray[np.uint8]) -> Floats:
    """[num_pages, num_layers, 2, num_kv_heads, PAGE_TOKENS * head_dim], in the same memory."""
    page_bytes = config.page_geometry.page_bytes
    if pages.ndim != 2 or pages.shape[1] != page_bytes:
        raise ValueError(f"pages have shape {pages.shape}, expected [num_pages, {page_bytes}]")
    if not pages.flags.c_contiguous or not pages.flags.writeable:
        raise ValueError("pages must be C-contiguous and writeable")
    shape = (len(pages), config.num_layers, 2, config.num_kv_heads, PAGE_TOKENS * config.head_dim)
    return pages.view(np.float32).reshape(shape)
