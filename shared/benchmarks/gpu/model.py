"""A dummy model on a GPU, over memory that processes share: what the benchmarks of the GPU path run."""

import socket
from collections.abc import Callable
from dataclasses import dataclass

import torch

from weir.core.sampling import SamplingParams
from weir.engine.plan import ChunkPlan, ModelRunner, SampleSpec, StepPlan
from weir.kv.geometry import num_pages_for
from weir.kv.memory.cuda import CudaMemory
from weir.kv.memory.device import DeviceMemory, receive_memory
from weir.model.architecture import ModelConfig
from weir.model.files.dummy import shape_named
from weir.model.precision import page_geometry
from weir.model.torch.weights import WeightFormat, dummy_weights_on
from weir.model.triton.batch import TritonLimits
from weir.model.triton.memory import page_tensor
from weir.model.triton.runner import TritonRunner

_DTYPE = torch.bfloat16
_WARM_UP_TOKENS = 64


@dataclass(frozen=True)
class CudaKind:
    """`benchmarks.gpu.pair.RunnerKind` of a model shape in bf16 on device 0."""

    model_shape: str
    limits: TritonLimits
    uses_graphs: bool = True

    @property
    def config(self) -> ModelConfig:
        return shape_named(self.model_shape)

    @property
    def page_bytes(self) -> int:
        return page_geometry(self.config, "bf16").page_bytes

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def create_memory(self, num_bytes: int) -> DeviceMemory:
        return CudaMemory.create(num_bytes)

    def receive_memory(self, connection: socket.socket) -> DeviceMemory:
        return receive_memory(connection, CudaMemory.open)

    def make_runner(self, memory: DeviceMemory, num_pages: int) -> tuple[ModelRunner, Callable[[], None]]:
        config, device = self.config, torch.device("cuda", 0)
        pages = page_tensor(memory, config, num_pages, device, _DTYPE)
        weights = dummy_weights_on(device, WeightFormat(_DTYPE), config)
        runner = TritonRunner(config, weights, pages, self.limits)

        def warm_up() -> None:
            """While nobody has asked for anything, the pages' contents mean nothing to anybody."""
            length = min(_WARM_UP_TOKENS, self.limits.max_rows)
            prefill_and_decode(runner, (0,) * length, 2)
            if self.uses_graphs:
                runner.capture_graphs()

        return runner, warm_up


def prefill_and_decode(
    runner: ModelRunner, prompt: tuple[int, ...], num_output_tokens: int, chunk_tokens: int = 1 << 30
) -> list[int]:
    """Greedy tokens of one sequence alone, in the first pages."""
    table = tuple(range(num_pages_for(len(prompt) + num_output_tokens)))
    tokens, computed, sampled = list(prompt), 0, 0
    while sampled < num_output_tokens:
        end = min(computed + chunk_tokens, len(tokens))
        spec = SampleSpec(SamplingParams(temperature=0.0), sampled) if end == len(tokens) else None
        chunk = ChunkPlan(0, computed, tuple(tokens[computed:end]), table[: num_pages_for(end)], spec)
        result = runner.run(StepPlan(0, (chunk,)))
        computed = end
        if spec is not None:
            tokens.append(result.token_ids[0])
            sampled += 1
    return tokens[len(prompt) :]
