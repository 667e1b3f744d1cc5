"""Computes slices of steps on the threads of a crew."""

import numpy as np
import numpy.typing as npt

from weir.kv.geometry import PAGE_TOKENS
from weir.model.architecture import ModelConfig
from weir.model.cpu.core_share import CoreShare
from weir.model.cpu.forward import forward
from weir.model.cpu.packed_file import PackedWeights
from weir.model.cpu.slices import SliceArrays, StepSlice
from weir.model.cpu.state import BrainFloats, Extent
from weir.model.cpu.threads import ThreadTeam, most_chunks
from weir.model.cpu.workspace import Workspace, make_model
from weir.model.precision import page_geometry
from weir.model.sampler import Scan
from weir.ops.simd.phases import PhaseState

_ROW_LAYERS_A_CALL = 256
"""Rows times layers after which the share of cores is looked at again: some milliseconds."""


class CpuDecoder:
    """A model over paged keys and values in int8 arithmetic. Holds no state of any sequence."""

    def __init__(self, config: ModelConfig, packed: PackedWeights, share: CoreShare) -> None:
        self._config = config
        self._model = make_model(config, packed)
        self._workspace = Workspace(config, most_chunks(share.most))
        self._team = ThreadTeam(share)

    def compute(self, step_slice: StepSlice, pages: BrainFloats) -> Scan:
        """Writes keys and values into `pages`, the view that `page_numbers` makes.

        Returns the logits [logit rows, vocabulary], looked through; the next call overwrites them.
        """
        extent = self._workspace.plan_attention(step_slice.arrays)
        num_layers = self._config.num_layers
        layers_a_call = max(1, _ROW_LAYERS_A_CALL // step_slice.num_rows)
        for first in range(0, num_layers, layers_a_call):
            last = min(first + layers_a_call, num_layers)
            self._call(step_slice.arrays, pages, extent._replace(first_layer=first, last_layer=last))
        buffers = self._workspace.buffers
        scan = Scan(buffers.logits, buffers.block_maxima, buffers.highest, buffers.argmax)
        return scan.first_rows(len(step_slice.arrays.logit_rows))

    def _call(self, arrays: SliceArrays, pages: BrainFloats, extent: Extent) -> None:
        model, buffers = self._model, self._workspace.buffers

        def work(state: PhaseState, base: int, num_chunks: int) -> None:
            forward(model, buffers, arrays, pages, extent, state, base, num_chunks)

        self._team.run(work, len(arrays.token_ids))


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
