"""Decode steps as CUDA graphs, one a bucket of batch shapes: a step of small kernels costs its kernels, not launches.

A graph ends with the logits. Sampling follows it in launches, which the host makes while the graph runs, so that no
parameter of a row keeps a batch from its graph.

A graph replays the same kernels on the same addresses, so a batch is filled up to its bucket's shape.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from weir.kv.geometry import num_pages_for
from weir.model.triton.batch import (
    EMPTY_BATCH,
    DecodeRows,
    DeviceBatch,
    HostBatch,
    TritonLimits,
    padded_decodes,
)
from weir.model.triton.memory import StepUpload

_WIDTH_STEP = 4
_LEAST_WIDTH = 32
_WARM_UPS = 2

Capture = Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]]
"""Takes a step that was run before, and gives back what runs it again on the same memory."""


@dataclass(frozen=True, slots=True, order=True)
class GraphShape:
    """Rows, and pages that the longest sequence may have."""

    table_width: int
    num_rows: int


def graph_shapes(limits: TritonLimits) -> tuple[GraphShape, ...]:
    """Rows by powers of two, widths by powers of four, and the limits themselves; the smallest first."""
    rows = [1]
    while rows[-1] < limits.max_sequences:
        rows.append(min(2 * rows[-1], limits.max_sequences))
    most_pages = num_pages_for(limits.max_context_tokens)
    widths = [min(_LEAST_WIDTH, most_pages)]
    while widths[-1] < most_pages:
        widths.append(min(_WIDTH_STEP * widths[-1], most_pages))
    return tuple(sorted(GraphShape(width, count) for width in widths for count in rows))


def cuda_graph_capture() -> Capture:
    """As PyTorch asks for it: each step is warmed up on a side stream, then captured there.

    The graphs share that stream, and so its workspaces, and one pool of memory: they never run at the same time, and
    none reads what another has left there.
    """
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # a call that other threads make to the driver meanwhile is none of this graph's, and must not end its capture
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            result = step()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay

    return capture


class DecodeGraphs:
    """`run_step` computes a batch and returns its logits [rows, vocabulary], in memory that stays where it is."""

    def __init__(
        self,
        shapes: Sequence[GraphShape],
        upload: StepUpload,
        run_step: Callable[[DeviceBatch], torch.Tensor],
        capture: Capture,
        fill_in: Callable[[DecodeRows, torch.Tensor], None],
    ) -> None:
        """`fill_in` is called before each replay, with the batch's decodes and the token ids that the step reads."""
        self._fill_in = fill_in
        self._shapes = tuple(shapes)
        self._upload = upload
        self._run_step = run_step
        self._capture = capture
        self._replays: dict[GraphShape, Callable[[], torch.Tensor]] = {}

    def capture_all(self) -> None:
        """Largest first, so that the others find its memory."""
        for shape in reversed(self._shapes):
            index = padded_decodes(EMPTY_BATCH, shape.num_rows, shape.table_width, self._upload)
            self._replays[shape] = self._capture(lambda index=index: self._run_step(index))  # type: ignore[misc]

    def try_run(self, batch: HostBatch) -> torch.Tensor | None:
        """The logits [decodes, vocabulary], until the next run; None for a batch that is more than decodes, or larger
        than any graph."""
        if not batch.decodes or batch.prefills:
            return None
        width = int(batch.decodes.num_pages[-1])  # the longest is the last
        shape = next((s for s in self._shapes if s.num_rows >= len(batch.decodes) and s.table_width >= width), None)
        if shape is None:
            return None
        index = padded_decodes(batch, shape.num_rows, shape.table_width, self._upload)
        self._fill_in(batch.decodes, index.token_ids)
        return self._replays[shape]()[: len(batch.decodes)]
