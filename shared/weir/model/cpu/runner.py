"""Runs steps on a CPU with 8-bit integers: compiled, batch-invariant to the bit, and without torch."""

import numpy as np
import numpy.typing as npt

from weir.core.sampling import SamplingParams, TokenLogprobs
from weir.engine.plan import ChunkPlan, SampleSpec, StepPlan, StepResult
from weir.kv.geometry import PAGE_TOKENS, num_pages_for
from weir.model.architecture import ModelConfig
from weir.model.cpu.compiling import compiling_beside
from weir.model.cpu.core_share import CoreShare
from weir.model.cpu.forward import ATTEND, NUM_STAGES, forward
from weir.model.cpu.packed_weights import PackedWeights
from weir.model.cpu.slices import SliceArrays, StepSlice, cut_slices
from weir.model.cpu.threads import ThreadTeam, most_chunks
from weir.model.cpu.workspace import MAX_SLICE_ROWS, BrainFloats, Extent, Ints, Longs, Workspace, make_model
from weir.model.precision import page_geometry
from weir.model.rows import ordered_chunks
from weir.model.sampler import Scan, compile_kernels, sample_step, token_logprobs
from weir.ops.simd.jit import compiling_alone
from weir.ops.simd.phases import PhaseState

_WARM_UP_TOKENS = 40
_ROW_LAYERS_A_CALL = 256
"""Rows times layers after which the share of cores is looked at again: some milliseconds."""
_LEAST_NARROWING = 4
"""Rows beside one with logits from which on only those go through the last layer, each with an attention of its own."""


class CpuDecoder:
    """A model over paged keys and values in int8 arithmetic. Holds no state of any sequence."""

    def __init__(
        self, config: ModelConfig, packed: PackedWeights, share: CoreShare, times_ns: Longs | None = None
    ) -> None:
        """`times_ns` [most_chunks(share.most), NUM_TIMES]: what the chunks of each stage take is added there."""
        self._config = config
        self._model = make_model(config, packed)
        self._workspace = Workspace(config, most_chunks(share.most))
        self._team = ThreadTeam(share)
        self._times_ns = times_ns

    def compute(self, step_slice: StepSlice, pages: BrainFloats) -> Scan:
        """Writes keys and values into `pages`, the view that `page_numbers` makes.

        Returns the logits [logit rows, vocabulary], scanned; the next call overwrites them.
        """
        arrays = step_slice.arrays
        num_rows, num_logits, num_layers = step_slice.num_rows, len(arrays.logit_rows), self._config.num_layers
        # of the last layer all rows' keys and values are wanted, the rest only where there are logits
        is_narrow = num_logits * _LEAST_NARROWING <= num_rows
        layers_a_call = max(1, _ROW_LAYERS_A_CALL // num_rows)
        extent = self._workspace.plan_attention(arrays)
        for first in range(0, num_layers, layers_a_call):
            last = min(first + layers_a_call, num_layers)
            last_stage = ATTEND if is_narrow and last == num_layers else NUM_STAGES
            here = extent._replace(first_layer=first, last_layer=last, last_stage=last_stage)
            self._call(arrays, pages, here)
        if is_narrow and num_logits > 0:
            self._finish(arrays.of_logit_rows(), arrays.logit_rows, pages)
        buffers = self._workspace.buffers
        scan = Scan(buffers.logits, buffers.block_maxima, buffers.highest, buffers.argmax)
        return scan.first_rows(num_logits)

    def _finish(self, arrays: SliceArrays, rows: Ints, pages: BrainFloats) -> None:
        """The last layer from its attention on, and logits, of `rows` of the slice before."""
        extent, num_layers = self._workspace.plan_attention(arrays), self._config.num_layers
        self._workspace.gather(rows)
        self._call(
            arrays,
            pages,
            extent._replace(
                first_layer=num_layers - 1, last_layer=num_layers, first_stage=ATTEND, last_stage=NUM_STAGES
            ),
        )

    def _call(self, arrays: SliceArrays, pages: BrainFloats, extent: Extent) -> None:
        model, buffers, times_ns = self._model, self._workspace.buffers, self._times_ns

        def work(state: PhaseState, base: int, num_chunks: int) -> None:
            forward(model, buffers, arrays, pages, extent, times_ns, state, base, num_chunks)

        self._team.run(work, len(arrays.token_ids))


class CpuRunner:
    """Implements `weir.engine.plan.ModelRunner` over pages [num_pages, page_bytes] uint8, which stay where they are."""

    def __init__(
        self,
        config: ModelConfig,
        packed: PackedWeights,
        pages: npt.NDArray[np.uint8],
        share: CoreShare,
        times_ns: Longs | None = None,
    ) -> None:
        """`times_ns` as for `CpuDecoder`. Raises ValueError for pages of another geometry."""
        self._config = config
        self._pages = page_numbers(config, pages)
        self._share = share
        self._decoder = CpuDecoder(config, packed, share, times_ns)

    def run(self, plan: StepPlan) -> StepResult:
        """Raises InternalError on a plan that makes no sense, or if the logits are not numbers."""
        return self._run(plan, self._pages)

    def warm_up(self) -> None:
        """Compiles, or loads what was compiled before, and touches every weight, over pages of its own."""
        with compiling_alone(), compiling_beside(lambda: self._warm_up_passes(None)):
            compile_kernels()
            self._warm_up_passes(SampleSpec(SamplingParams(temperature=1.0, top_p=0.9), output_index=0))

    def _warm_up_passes(self, sampled: SampleSpec | None) -> None:
        num_tokens = min(_WARM_UP_TOKENS, self._config.max_context_tokens - 1)
        num_pages = num_pages_for(num_tokens + 1)
        page_bytes = page_geometry(self._config, "int8").page_bytes
        scratch = page_numbers(self._config, np.zeros((num_pages, page_bytes), np.uint8))
        table = tuple(range(num_pages))
        self._run(StepPlan(0, (ChunkPlan(0, 0, (0,) * num_tokens, table, sampled),)), scratch)
        start = min(PAGE_TOKENS, num_tokens)
        self._run(StepPlan(0, (ChunkPlan(0, start, (0,), table, sampled),)), scratch)

    def _run(self, plan: StepPlan, pages: BrainFloats) -> StepResult:
        config = self._config
        chunks = ordered_chunks(plan, len(pages), config.vocab_size, config.max_context_tokens)
        token_ids: dict[int, int] = {}
        logprobs: dict[int, TokenLogprobs] = {}
        prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        for step_slice in cut_slices(*chunks, MAX_SLICE_ROWS):
            scan = self._decoder.compute(step_slice, pages)
            if step_slice.sampled:
                result = sample_step(scan.first_rows(len(step_slice.sampled)), step_slice.sampled)
                token_ids |= result.token_ids
                logprobs |= result.logprobs
            first = len(step_slice.sampled)
            for slot, _, spec in step_slice.scored:
                last = first + len(spec.next_token_ids)
                found = token_logprobs(scan.logits[first:last], spec.next_token_ids, spec.num_top)
                prompt_logprobs[slot] = prompt_logprobs.get(slot, ()) + found
                first = last
        return StepResult(
            token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            mean_others=self._share.take_mean_others(),
        )


def page_numbers(config: ModelConfig, pages: npt.NDArray[np.uint8]) -> BrainFloats:
    """`pages` [num_pages, page_bytes] as [num_pages, num_layers, 2, num_kv_heads, PAGE_TOKENS * head_dim].

    The memory is the same. Raises ValueError for pages of another geometry.
    """
    page_bytes = page_geometry(config, "int8").page_bytes
    if pages.ndim != 2 or pages.shape[1] != page_bytes:
        raise ValueError(f"pages have shape {pages.shape}, expected [num_pages, {page_bytes}]")
    if not pages.flags.c_contiguous or not pages.flags.writeable:
        raise ValueError("pages must be C-contiguous and writeable")
    shape = (len(pages), config.num_layers, 2, config.num_kv_heads, PAGE_TOKENS * config.head_dim)
    return pages.view(np.uint16).reshape(shape)
