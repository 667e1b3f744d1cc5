"""Page memory that is passed on as a descriptor, and a model over it: memory of the host in the interpreter, of a GPU
where there is one."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.kernels.triton_cases.support import DEVICE, IS_INTERPRETED
from tests.unit.model.device_model import empty_pages

from weir.core.device import Device
from weir.core.sampling import SamplingParams
from weir.engine.plan import ChunkPlan, ModelRunner, SampleSpec, StepPlan
from weir.kv.geometry import ArenaGeometry, num_pages_for
from weir.kv.memory.device import DeviceMemory, MemoryKind, try_memory_kind
from weir.kv.memory.server import MemoryServer, fetch_memory
from weir.model.files.source import resolve_model
from weir.model.precision import page_geometry
from weir.model.triton.batch import TritonLimits
from weir.model.triton.load import DeviceWeights, load_on_device
from weir.model.triton.memory import memory_tensor, page_tensor
from weir.model.triton.runner import TritonRunner

NAME: Device = "interpreter" if IS_INTERPRETED else "cuda"
ARENA = "a" * 32
NUM_PAGES = 12
GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=1.0, seed=7)
PROMPT = tuple(7 * i % 1024 for i in range(37))


@pytest.fixture(scope="module")
def kind() -> MemoryKind:
    found = try_memory_kind(NAME)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def weights() -> DeviceWeights:
    return load_on_device(resolve_model("dummy:tiny"), "fp32", NAME, num_threads=1)


@pytest.fixture
def mappings(kind: MemoryKind, weights: DeviceWeights) -> Iterator[tuple[DeviceMemory, DeviceMemory]]:
    """Two workers' mappings of the same pages. The server is closed: they have outlived who made the memory."""
    num_bytes = geometry_of(weights).page_memory_bytes
    with tempfile.TemporaryDirectory(prefix="weir-") as directory:
        server = MemoryServer(Path(directory) / "pages.sock", ARENA, num_bytes, kind.open, kind.create(num_bytes))
        server.start()
        first, second = (fetch_memory(server.path, ARENA, kind.open) for _ in range(2))
        server.close()
    yield first, second
    first.close()
    second.close()


def geometry_of(weights: DeviceWeights) -> ArenaGeometry:
    page_bytes = page_geometry(weights.config, weights.arithmetic).page_bytes
    return ArenaGeometry(page_bytes, NUM_PAGES, num_slots=4, max_context_tokens=128, pages_on_device=True)


def decode(runner: ModelRunner, tokens: list[int], params: SamplingParams, num_tokens: int) -> list[int]:
    """Samples more tokens of a sequence in the first pages, all but the last of whose tokens are computed."""
    for _ in range(num_tokens):
        table = tuple(range(num_pages_for(len(tokens))))
        chunk = ChunkPlan(0, len(tokens) - 1, tuple(tokens[-1:]), table, SampleSpec(params, len(tokens) - len(PROMPT)))
        tokens.append(runner.run(StepPlan(0, (chunk,))).token_ids[0])
    return tokens[len(PROMPT) :]


def prefill(runner: ModelRunner, params: SamplingParams) -> list[int]:
    chunk = ChunkPlan(0, 0, PROMPT, tuple(range(num_pages_for(len(PROMPT)))), SampleSpec(params, 0))
    return [*PROMPT, runner.run(StepPlan(0, (chunk,))).token_ids[0]]


def runner_over(weights: DeviceWeights, memory: DeviceMemory) -> TritonRunner:
    return weights.runner_over(memory, geometry_of(weights), max_rows=64, max_sequences=4)


def plain_runner(weights: DeviceWeights) -> TritonRunner:
    """Over memory of PyTorch's own."""
    pages = empty_pages(weights.config, NUM_PAGES, DEVICE, torch.float32)
    return TritonRunner(weights.config, weights.weights, pages, TritonLimits(64, 4, 128))


def test_what_one_mapping_writes_the_other_reads(mappings: tuple[DeviceMemory, DeviceMemory]) -> None:
    first, second = (memory_tensor(memory, DEVICE) for memory in mappings)
    first[:5] = torch.arange(1, 6, dtype=torch.uint8)
    first[-1] = 9
    assert second[:5].tolist() == [1, 2, 3, 4, 5]
    assert int(second[-1]) == 9
    assert mappings[1].pointer == second.data_ptr()
    assert mappings[1].num_bytes == len(second)
    del first, second


def test_closing_a_mapping_twice_is_closing_it_once(kind: MemoryKind) -> None:
    memory = kind.create(4096)
    assert memory.num_bytes >= 4096
    memory.close()
    memory.close()


def test_a_prompt_of_one_worker_is_decoded_by_the_other(
    weights: DeviceWeights, mappings: tuple[DeviceMemory, DeviceMemory]
) -> None:
    first, second = (runner_over(weights, memory) for memory in mappings)
    plain = plain_runner(weights)
    expected = decode(plain, prefill(plain, WARM), WARM, 3)
    assert len(set(expected)) > 2
    assert decode(second, prefill(first, WARM), WARM, 3) == expected


def test_warming_up_writes_to_no_page(weights: DeviceWeights, mappings: tuple[DeviceMemory, DeviceMemory]) -> None:
    pages = memory_tensor(mappings[0], DEVICE)
    pages.fill_(1)  # numbers of about 1e-38: page 0 is read
    runner_over(weights, mappings[1]).warm_up()
    assert bool((pages == 1).all())


def test_a_page_goes_to_the_host_and_into_another_page(
    weights: DeviceWeights, mappings: tuple[DeviceMemory, DeviceMemory]
) -> None:
    runner = runner_over(weights, mappings[0])
    prefill(runner, GREEDY)
    page = runner.pages.read(1).copy()
    assert page.any()

    def bring(target: npt.NDArray[np.uint8]) -> bool:
        target[:] = page
        return True

    def spoil(target: npt.NDArray[np.uint8]) -> bool:
        target[:] = 0
        return False

    assert runner.pages.fill(7, bring)
    assert (runner.pages.read(7) == page).all()
    assert not runner.pages.fill(7, spoil)
    assert (runner.pages.read(7) == page).all()


def test_memory_that_is_smaller_than_the_arena_is_refused(weights: DeviceWeights, kind: MemoryKind) -> None:
    memory = kind.create(4096)
    with pytest.raises(ValueError, match=r"page memory has \d+ bytes, 4096 pages of this model need 67108864"):
        page_tensor(memory, weights.config, 4096, DEVICE, torch.float32)
    memory.close()
