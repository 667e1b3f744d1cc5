"""The graphs of steps take one pool of memory and one stream together, in place of one each."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

pytest.importorskip("triton", reason="Triton is installed on Linux only")

import torch

from weir.core.sampling import SamplingParams
from weir.engine.plan import ChunkPlan, SampleSpec, StepPlan
from weir.model.triton.batch import BatchMaker, DeviceBatch, HostBatch, TritonLimits, padded_decodes
from weir.model.triton.graphs import ResultT, StepGraphs, cuda_graph_capture, decode_sizes, mixed_sizes
from weir.model.triton.memory import StepUpload
from weir.ops.gpu.decode_work import WorkSize, decode_tiles

LIMITS = TritonLimits(max_rows=64, max_sequences=12, max_context_tokens=1024)


class FakeStream:
    def __init__(self, cuda: "FakeCuda", name: str) -> None:
        self._cuda = cuda
        self.name = name

    def wait_stream(self, other: "FakeStream") -> None:
        self._cuda.events.append(f"{self.name} waits for {other.name}")


class FakeGraph:
    def __init__(self, cuda: "FakeCuda") -> None:
        self._cuda = cuda

    def replay(self) -> None:
        self._cuda.events.append("replay")


@dataclass
class FakeCuda:
    """What capturing asks of `torch.cuda`, with what was asked."""

    events: list[str] = field(default_factory=list)
    captures: list[tuple[object, str, str]] = field(default_factory=list)
    """Pool, stream and error mode of each."""
    num_pools: int = 0
    num_streams: int = 0

    def __post_init__(self) -> None:
        self.current = FakeStream(self, "main")

    def make_stream(self) -> FakeStream:
        self.num_streams += 1
        return FakeStream(self, f"side {self.num_streams}")

    def make_graph(self) -> FakeGraph:
        return FakeGraph(self)

    def make_pool(self) -> tuple[int, int]:
        self.num_pools += 1
        return (0, self.num_pools)

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def capturing(
        self,
        graph: FakeGraph,
        pool: object = None,
        stream: FakeStream | None = None,
        capture_error_mode: str = "global",
    ) -> Iterator[None]:
        del graph
        self.captures.append((pool, stream.name if stream is not None else "", capture_error_mode))
        with self.on(stream or self.make_stream()):
            yield

    def step(self) -> torch.Tensor:
        self.events.append(f"step on {self.current.name}")
        return torch.zeros(1, 8)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "Stream", fake.make_stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", fake.make_graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", fake.make_pool)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: fake.current)
    monkeypatch.setattr(torch.cuda, "stream", fake.on)
    monkeypatch.setattr(torch.cuda, "graph", fake.capturing)
    return fake


UPLOAD, TILES = StepUpload(LIMITS.upload_bytes, torch.device("cpu")), decode_tiles(64, torch.float32)


def prepare(batch: HostBatch, num_rows: int) -> DeviceBatch:
    return padded_decodes(batch, num_rows, UPLOAD, TILES, WorkSize(8, 2))


def decodes(count: int) -> HostBatch:
    spec = SampleSpec(SamplingParams(temperature=0.0), 1)
    plan = StepPlan(0, tuple(ChunkPlan(slot, 5, (1,), (slot,), spec) for slot in range(count)))
    return BatchMaker(LIMITS.max_sequences, 100, LIMITS).make(plan)


def test_graphs_are_made_for_few_rows_by_small_steps() -> None:
    assert [decode_sizes(most) for most in (1, 4, 6)] == [(1,), (1, 2, 4), (1, 2, 4, 6)]
    assert mixed_sizes(2048) == (16, 32, 64, 128, 192, 256, 320, 384, 448, 512)
    assert [mixed_sizes(most) for most in (10, 16, 40, 200)] == [
        (10,),
        (16,),
        (16, 32, 40),
        (16, 32, 64, 128, 192, 200),
    ]


@pytest.mark.parametrize(("num_decodes", "num_rows"), [(1, 2), (2, 2), (3, 4), (8, 8)])
def test_a_step_is_filled_up_to_the_smallest_graph_that_holds_it(num_decodes: int, num_rows: int) -> None:
    graphs = StepGraphs((2, 4, 8), prepare, lambda index: len(index.token_ids), run_again)
    graphs.capture_all()
    found = graphs.try_run(decodes(num_decodes))
    assert found is not None
    assert found.result == num_rows
    assert found.index.slot_mapping.tolist().count(-1) == num_rows - num_decodes
    assert graphs.try_run(decodes(9)) is None


def run_again(step: Callable[[], ResultT]) -> Callable[[], ResultT]:
    return step


def test_all_graphs_share_a_pool_and_a_stream(cuda: FakeCuda) -> None:
    def run_step(index: DeviceBatch) -> torch.Tensor:
        return cuda.step()[: len(index.token_ids)]

    sizes = decode_sizes(LIMITS.max_sequences)
    StepGraphs(sizes, prepare, run_step, cuda_graph_capture()).capture_all()
    assert len(cuda.captures) == len(sizes) == 5
    assert set(cuda.captures) == {((0, 1), "side 1", "thread_local")}
    assert (cuda.num_pools, cuda.num_streams) == (1, 1)


def test_a_step_is_warmed_up_where_it_is_captured_and_the_streams_wait_for_each_other(cuda: FakeCuda) -> None:
    replay: Callable[[], torch.Tensor] = cuda_graph_capture()(cuda.step)
    assert cuda.events == [
        "side 1 waits for main",
        *["step on side 1"] * 2,
        "main waits for side 1",
        "step on side 1",
    ]
    cuda.events.clear()
    assert replay() is replay(), "the result stays where it is"
    assert cuda.events == ["replay"] * 2
