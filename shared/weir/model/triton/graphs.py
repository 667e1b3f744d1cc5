"""Steps as CUDA graphs, one a number of rows: a step of small kernels costs its kernels, not launches.

A step of decodes alone is a graph up to its logits. One with prompts is a graph of the forward pass: of few of its rows
logits are wanted, of other ones each time. What follows is launched by the host while the graph runs, so that no
parameter of a row keeps a batch from its graph.

A graph replays the same kernels on the same addresses, so a batch is filled up to its graph's rows. How long
the sequences are is data: attention goes through a list of work.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from weir.model.triton.batch import EMPTY_BATCH, DeviceBatch, HostBatch

_WARM_UPS = 2
_MOST_MIXED_ROWS = 512
"""From there on the GPU computes for longer than the host launches."""

ResultT = TypeVar("ResultT")


class Capture(Protocol):
    """Takes a step that was run before, and gives back what runs it again on the same memory."""

    def __call__(self, step: Callable[[], ResultT], /) -> Callable[[], ResultT]: ...


def decode_sizes(max_sequences: int) -> tuple[int, ...]:
    """Rows by powers of two, and the limit itself; the smallest first."""
    sizes = [1]
    while sizes[-1] < max_sequences:
        sizes.append(min(2 * sizes[-1], max_sequences))
    return tuple(sizes)


def mixed_sizes(max_rows: int) -> tuple[int, ...]:
    """Of steps with prompts: products take as long as they have rows from some hundred on, so few rows may be in
    vain."""
    most = min(max_rows, _MOST_MIXED_ROWS)
    return (*(size for size in (16, 32, 64, *range(128, most, 64)) if size < most), most)


def cuda_graph_capture() -> Capture:
    """As PyTorch asks for it: each step is warmed up on a side stream, then captured there.

    The graphs share that stream, and so its workspaces, and one pool of memory: they never run at the same time, and
    none reads what another has left there.
    """
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(step: Callable[[], ResultT], /) -> Callable[[], ResultT]:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # a call that other threads make to the driver meanwhile is none of this graph's, and must not end its capture
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            result = step()

        def replay() -> ResultT:
            graph.replay()
            return result

        return replay

    return capture


@dataclass(frozen=True, slots=True)
class Replayed(Generic[ResultT]):
    """A step that a graph computes: what it was given, and what `run_step` returns, until the next step."""

    index: DeviceBatch
    result: ResultT


class StepGraphs(Generic[ResultT]):
    """Graphs of steps of one kind. What `run_step` returns is in memory that stays where it is."""

    def __init__(
        self,
        sizes: Sequence[int],
        prepare: Callable[[HostBatch, int], DeviceBatch],
        run_step: Callable[[DeviceBatch], ResultT],
        capture: Capture,
    ) -> None:
        """`prepare`: a batch on the device, filled up to so many rows, at the same addresses each time."""
        self._sizes = tuple(sizes)
        self._prepare = prepare
        self._run_step = run_step
        self._capture = capture
        self._replays: dict[int, Callable[[], ResultT]] = {}

    def capture_all(self) -> None:
        """Largest first, so that the others find its memory."""
        for num_rows in reversed(self._sizes):
            index = self._prepare(EMPTY_BATCH, num_rows)
            self._replays[num_rows] = self._capture(lambda index=index: self._run_step(index))  # type: ignore[misc]

    def try_run(self, batch: HostBatch) -> Replayed[ResultT] | None:
        """None for a batch with more rows than any graph."""
        num_rows = next((size for size in self._sizes if size >= batch.num_rows), None)
        if num_rows is None:
            return None
        index = self._prepare(batch, num_rows)
        return Replayed(index, self._replays[num_rows]())
