"""Weights as the decoders of PyTorch want them: from a model's files in fp32, or random ones made on a device."""

import math
from collections.abc import Callable, Iterator
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
    return filled_weights(torch.device("cpu"), torch.float32, config, lambda name: torch.from_numpy(tensors.read(name)))


def weights_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Of `weights_over`, gaps included."""
    layout = _Layout(torch.empty(0, dtype=dtype, device="meta"))
    _lay_out(layout, config)
    return layout.num_bytes


def weights_over(memory: torch.Tensor, dtype: torch.dtype, config: ModelConfig) -> Weights:
    """Views of `memory`, uint8 [at least `weights_bytes`], whatever is in it. The same places for the same model."""
    return _lay_out(_Layout(memory.view(dtype)), config)


def filled_weights(
    device: torch.device, dtype: torch.dtype, config: ModelConfig, read_tensor: Callable[[str], torch.Tensor]
) -> Weights:
    """In memory of their own. `read_tensor` as for `fill_weights`."""
    memory = torch.empty(weights_bytes(config, dtype), dtype=torch.uint8, device=device)
    weights = weights_over(memory, dtype, config)
    fill_weights(weights, config, read_tensor)
    return weights


def fill_weights(weights: Weights, config: ModelConfig, read_tensor: Callable[[str], torch.Tensor]) -> None:
    """`read_tensor` gives tensors by the names of `tensor_shapes`, each once, on any device and of any type."""
    shapes = tensor_shapes(config)
    for name, target in _parts(weights, config):
        target.copy_(read_tensor(name).view(shapes[name]))


_ALIGN_BYTES = 256


class _Layout:
    """Hands out views of a flat tensor one after the other; of an empty one on the device "meta" it only counts."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat = flat
        self.num_bytes = 0

    def take(self, *shape: int) -> torch.Tensor:
        start, num_elements = self.num_bytes // self._flat.itemsize, math.prod(shape)
        self.num_bytes += -(-num_elements * self._flat.itemsize // _ALIGN_BYTES) * _ALIGN_BYTES
        if self._flat.is_meta:
            return torch.empty(shape, dtype=self._flat.dtype, device="meta")
        return self._flat[start : start + num_elements].view(shape)


def _lay_out(layout: _Layout, config: ModelConfig) -> Weights:
    hidden, take = config.hidden_size, layout.take
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    stacked = query + 2 * key
    embedding = take(config.vocab_size, hidden)
    layers = tuple(
        LayerWeights(
            attention_norm=take(hidden),
            query_key_value=take(stacked, hidden),
            query_key_value_bias=take(stacked) if config.query_key_value_bias else None,
            attention_output=take(hidden, query),
            attention_output_bias=take(hidden) if config.attention_output_bias else None,
            mlp_norm=take(hidden),
            gate_up=take(2 * config.intermediate_size, hidden),
            down=take(hidden, config.intermediate_size),
        )
        for _ in range(config.num_layers)
    )
    final_norm = take(hidden)
    output = embedding if config.tie_word_embeddings else take(config.vocab_size, hidden)
    return Weights(embedding, layers, final_norm, output)


def _parts(weights: Weights, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Where each tensor of `tensor_shapes` goes."""
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "model.embed_tokens.weight", weights.embedding
    for number, layer in enumerate(weights.layers):
        prefix, attention = f"model.layers.{number}", f"model.layers.{number}.self_attn"
        yield f"{prefix}.input_layernorm.weight", layer.attention_norm
        matrices = torch.split(layer.query_key_value, [query, key, key])
        yield from zip((f"{attention}.{part}_proj.weight" for part in "qkv"), matrices, strict=True)
        if layer.query_key_value_bias is not None:
            biases = torch.split(layer.query_key_value_bias, [query, key, key])
            yield from zip((f"{attention}.{part}_proj.bias" for part in "qkv"), biases, strict=True)
        yield f"{attention}.o_proj.weight", layer.attention_output
        if layer.attention_output_bias is not None:
            yield f"{attention}.o_proj.bias", layer.attention_output_bias
        yield f"{prefix}.post_attention_layernorm.weight", layer.mlp_norm
        gate, up = layer.gate_up.chunk(2)
        yield from ((f"{prefix}.mlp.gate_proj.weight", gate), (f"{prefix}.mlp.up_proj.weight", up))
        yield f"{prefix}.mlp.down_proj.weight", layer.down
    yield "model.norm.weight", weights.final_norm
    if not config.tie_word_embeddings:
        yield "lm_head.weight", weights.output


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
    return filled_weights(device, dtype, config, lambda name: dummy_tensor_on(device, dtype, name, shapes[name], seed))


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
