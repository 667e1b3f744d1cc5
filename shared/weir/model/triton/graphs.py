"""Decode steps as CUDA graphs, one a number of rows: a step of small kernels costs its kernels, not launches.

A graph ends with the logits. Sampling follows it in launches, which the host makes while the graph runs, so that no
parameter of a row keeps a batch from its graph.

A graph replays the same kernels on the same addresses, so a batch is filled up to its graph's rows. How long
the sequences are is data: attention goes through a list of work.
"""

from collections.abc import Callable, Sequence

import torch

from weir.model.triton.batch import EMPTY_BATCH, DeviceBatch, HostBatch

_WARM_UPS = 2

Capture = Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]]
"""Takes a step that was run before, and gives back what runs it again on the same memory."""


def graph_sizes(max_sequences: int) -> tuple[int, ...]:
    """Rows by powers of two, and the limit itself; the smallest first."""
    sizes = [1]
    while sizes[-1] < max_sequences:
        sizes.append(min(2 * sizes[-1], max_sequences))
    return tuple(sizes)


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
        sizes: Sequence[int],
        prepare: Callable[[HostBatch, int], DeviceBatch],
        run_step: Callable[[DeviceBatch], torch.Tensor],
        capture: Capture,
    ) -> None:
        """`prepare`: a batch of decodes on the device, filled up to so many rows, at the same addresses each time."""
        self._sizes = tuple(sizes)
        self._prepare = prepare
        self._run_step = run_step
        self._capture = capture
        self._replays: dict[int, Callable[[], torch.Tensor]] = {}

    def capture_all(self) -> None:
        """Largest first, so that the others find its memory."""
        for num_rows in reversed(self._sizes):
            index = self._prepare(EMPTY_BATCH, num_rows)
            self._replays[num_rows] = self._capture(lambda index=index: self._run_step(index))  # type: ignore[misc]

    def try_run(self, batch: HostBatch) -> torch.Tensor | None:
        """The logits [decodes, vocabulary], until the next run; None for a batch that is more than decodes, or larger
        than any graph."""
        count = len(batch.decodes)
        num_rows = next((size for size in self._sizes if size >= count), None)
        if count == 0 or batch.prefills or num_rows is None:
            return None
        self._prepare(batch, num_rows)
        return self._replays[num_rows]()[:count]
