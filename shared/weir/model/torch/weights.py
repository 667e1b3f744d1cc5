"""Weights as the decoders of PyTorch want them: from a model's files in fp32, or random ones made on a device."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from weir.model.architecture import ModelConfig, tensor_shapes
from weir.model.errors import ModelError
from weir.model.files.dummy import DUMMY_SEED, SPREAD, is_norm, tensor_seed
from weir.model.files.source import ModelSource
from weir.model.files.tensors import open_tensors

_MEMINFO = Path("/proc/meminfo")
_GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Matrices are `[out, in]`; `query_key_value` and `gate_up` are stacked along `out`: one product does all.

    Biases are None where the model has none.
    """

    attention_norm: torch.Tensor
    query_key_value: torch.Tensor
    query_key_value_bias: torch.Tensor | None
    attention_output: torch.Tensor
    attention_output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """`output` is `embedding` itself where the model ties them."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    output: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """What one step has to read, at least: every matrix once."""
        tensors = [self.final_norm, self.output]
        for layer in self.layers:
            tensors += [layer.attention_norm, layer.query_key_value, layer.attention_output]
            tensors += [layer.mlp_norm, layer.gate_up, layer.down]
            tensors += [bias for bias in (layer.query_key_value_bias, layer.attention_output_bias) if bias is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def load_weights(source: ModelSource, config: ModelConfig) -> Weights:
    """Reads and, where they are quantized, dequantizes all tensors: 1 s for 135 M parameters.

    Raises:
        ModelError: names every tensor that is missing, unknown or of another shape than `config` asks for; or the
            memory of this machine is too small for them, which is checked before any is read.
    """
    tensors = open_tensors(source, config)
    check_memory(source, config, bytes_a_weight=4)
    return stack_weights(lambda name: torch.from_numpy(tensors.read(name)), config)


def stack_weights(read_tensor: Callable[[str], torch.Tensor], config: ModelConfig) -> Weights:
    """Of tensors by the names of `tensor_shapes`, each read once, on the device that they are on."""
    embedding = read_tensor("model.embed_tokens.weight")
    return Weights(
        embedding=embedding,
        layers=tuple(_stack_layer(read_tensor, config, layer) for layer in range(config.num_layers)),
        final_norm=read_tensor("model.norm.weight"),
        output=embedding if config.tie_word_embeddings else read_tensor("lm_head.weight"),
    )


def _stack_layer(read_tensor: Callable[[str], torch.Tensor], config: ModelConfig, layer: int) -> LayerWeights:
    def read(name: str) -> torch.Tensor:
        return read_tensor(f"model.layers.{layer}.{name}")

    def read_bias(*names: str, exists: bool) -> torch.Tensor | None:
        return torch.cat([read(f"self_attn.{name}.bias") for name in names]) if exists else None

    return LayerWeights(
        attention_norm=read("input_layernorm.weight"),
        query_key_value=torch.cat([read(f"self_attn.{part}_proj.weight") for part in "qkv"]),
        query_key_value_bias=read_bias("q_proj", "k_proj", "v_proj", exists=config.query_key_value_bias),
        attention_output=read("self_attn.o_proj.weight"),
        attention_output_bias=read_bias("o_proj", exists=config.attention_output_bias),
        mlp_norm=read("post_attention_layernorm.weight"),
        gate_up=torch.cat([read("mlp.gate_proj.weight"), read("mlp.up_proj.weight")]),
        down=read("mlp.down_proj.weight"),
    )


def dummy_tensor_on(
    device: torch.device, dtype: torch.dtype, name: str, shape: tuple[int, ...], seed: int = DUMMY_SEED
) -> torch.Tensor:
    """Made there, so that nothing of it passes through the host; depends on its name and the seed alone.

    The numbers are not those of `DummyTensors`, nor equal on two kinds of device: each has a generator of its own.
    """
    if is_norm(name):
        return torch.ones(shape, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(tensor_seed(name, seed))
    return torch.empty(shape, dtype=dtype, device=device).uniform_(-SPREAD, SPREAD, generator=generator)


def dummy_weights_on(device: torch.device, dtype: torch.dtype, config: ModelConfig, seed: int = DUMMY_SEED) -> Weights:
    """A whole model, each tensor as `dummy_tensor_on` makes it."""
    shapes = tensor_shapes(config)
    return stack_weights(lambda name: dummy_tensor_on(device, dtype, name, shapes[name], seed), config)


def check_memory(source: ModelSource, config: ModelConfig, bytes_a_weight: float) -> None:
    """Raises ModelError if all weights together need more memory than there is. Call it before the first is read."""
    needed_bytes = bytes_a_weight * sum(math.prod(shape) for shape in tensor_shapes(config).values())
    found_bytes = available_bytes(_MEMINFO, _GROUP_LIMIT)
    if needed_bytes > found_bytes:
        raise ModelError(
            f"model {source.name!r} needs {needed_bytes / 2**30:.1f} GiB for its weights at {bytes_a_weight:g} bytes "
            f"each, but only {found_bytes / 2**30:.1f} GiB of memory are available; choose a smaller model, or a "
            "precision of fewer bytes"
        )


def available_bytes(meminfo: Path, group_limit: Path) -> float:
    """What Linux says that it can still give, and no more than this process's control group (v2) may have in all."""
    lines = meminfo.read_text().splitlines() if meminfo.is_file() else []
    bounds = [float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    limit = group_limit.read_text().strip() if group_limit.is_file() else "max"
    if limit != "max":
        bounds.append(float(limit))
    return min(bounds, default=math.inf)
