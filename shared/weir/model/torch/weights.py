"""Weights as the decoders of PyTorch want them: from a model's files in fp32, or random ones made on a device."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from weir.model.architecture import ModelConfig, mlp_norm_name, tensor_shapes
from weir.model.errors import ModelError
from weir.model.files.dummy import DUMMY_SEED, SPREAD, is_norm, tensor_seed
from weir.model.files.source import ModelSource
from weir.model.files.tensors import open_tensors
from weir.ops.reference_quantized import quantize_rows

_MEMINFO = Path("/proc/meminfo")
_GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True)
class LayerScales:
    """Of matrices in E4M3: fp32 [out] each, what a row of the matrix is to be multiplied by. None: of no other."""

    query_key_value: torch.Tensor | None = None
    attention_output: torch.Tensor | None = None
    gate_up: torch.Tensor | None = None
    down: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Matrices are `[out, in]`; `query_key_value` and `gate_up` are stacked along `out`: one product does all.

    Biases, the norms of queries and keys [head_dim], and those behind attention and the MLP, are None where the model
    has none.
    """

    attention_norm: torch.Tensor
    query_key_value: torch.Tensor
    query_key_value_bias: torch.Tensor | None
    attention_output: torch.Tensor
    attention_output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    scales: LayerScales = LayerScales()
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None
    after_attention_norm: torch.Tensor | None = None
    after_mlp_norm: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Type of the numbers; with `is_fp8` the matrices of the layers are E4M3 with a scale a row. Embedding and output
    stay: rounding the output costs as much as all the layers together (ADR 52)."""

    dtype: torch.dtype
    is_fp8: bool = False

    @property
    def matrix_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn if self.is_fp8 else self.dtype


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
            biases = (layer.query_key_value_bias, layer.attention_output_bias)
            optional = (*biases, layer.query_norm, layer.key_norm, layer.after_attention_norm, layer.after_mlp_norm)
            tensors += [tensor for tensor in optional if tensor is not None]
            tensors += _scales_of(layer)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def load_weights(source: ModelSource, config: ModelConfig) -> Weights:
    """Reads and, where they are quantized, dequantizes all tensors: 1 s for 135 M parameters.

    Raises:
        ModelError: names every tensor that is missing, unknown or of another shape than `config` asks for; or the
            memory of this machine is too small for them, which is checked before any is read.
    """
    tensors = open_tensors(source, config)
    check_memory(source, config, bytes_a_weight=4)
    cpu, fp32 = torch.device("cpu"), WeightFormat(torch.float32)
    return filled_weights(cpu, fp32, config, lambda name: torch.from_numpy(tensors.read(name)))


def weights_bytes(config: ModelConfig, kept: WeightFormat) -> int:
    """Of `weights_over`, gaps included."""
    layout = _Layout(torch.empty(0, dtype=torch.uint8, device="meta"))
    _lay_out(layout, kept, config)
    return layout.num_bytes


def weights_over(memory: torch.Tensor, kept: WeightFormat, config: ModelConfig) -> Weights:
    """Views of `memory`, uint8 [at least `weights_bytes`], whatever is in it. The same places for the same model."""
    return _lay_out(_Layout(memory), kept, config)


def filled_weights(
    device: torch.device, kept: WeightFormat, config: ModelConfig, read_tensor: Callable[[str], torch.Tensor]
) -> Weights:
    """In memory of their own. `read_tensor` as for `fill_weights`."""
    memory = torch.empty(weights_bytes(config, kept), dtype=torch.uint8, device=device)
    weights = weights_over(memory, kept, config)
    fill_weights(weights, config, read_tensor)
    return weights


def fill_weights(weights: Weights, config: ModelConfig, read_tensor: Callable[[str], torch.Tensor]) -> None:
    """`read_tensor` gives tensors by the names of `tensor_shapes`, each once, on any device and of any type. Matrices
    that have scales are quantized where they will be, one at a time."""
    shapes = tensor_shapes(config)
    for name, target, scales in _parts(weights, config):
        tensor = read_tensor(name).view(shapes[name])
        if scales is None:
            target.copy_(tensor)
        else:
            values, row_scales = quantize_rows(tensor.to(target.device))
            target.copy_(values)
            scales.copy_(row_scales)


_ALIGN_BYTES = 256


class _Layout:
    """Hands out views of flat bytes one after the other; of an empty tensor on the device "meta" it only counts."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat = flat
        self.num_bytes = 0

    def take(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        start, num_bytes = self.num_bytes, math.prod(shape) * dtype.itemsize
        self.num_bytes += -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES
        if self._flat.is_meta:
            return torch.empty(shape, dtype=dtype, device="meta")
        return self._flat[start : start + num_bytes].view(dtype).view(shape)


def _lay_out(layout: _Layout, kept: WeightFormat, config: ModelConfig) -> Weights:
    hidden, take, matrix = config.hidden_size, partial(layout.take, kept.dtype), partial(layout.take, kept.matrix_dtype)
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    stacked, gate_up = query + 2 * key, 2 * config.intermediate_size
    # a weight of 1 + w has half the digits of a w that is small
    norm = partial(layout.take, torch.float32) if config.offset_norms else take
    embedding = take(config.vocab_size, hidden)
    layers = tuple(
        LayerWeights(
            attention_norm=norm(hidden),
            query_key_value=matrix(stacked, hidden),
            query_key_value_bias=take(stacked) if config.query_key_value_bias else None,
            attention_output=matrix(hidden, query),
            attention_output_bias=take(hidden) if config.attention_output_bias else None,
            mlp_norm=norm(hidden),
            gate_up=matrix(gate_up, hidden),
            down=matrix(hidden, config.intermediate_size),
            scales=LayerScales(*(layout.take(torch.float32, rows) for rows in (stacked, hidden, gate_up, hidden)))
            if kept.is_fp8
            else LayerScales(),
            query_norm=norm(config.head_dim) if config.query_key_norm else None,
            key_norm=norm(config.head_dim) if config.query_key_norm else None,
            after_attention_norm=norm(hidden) if config.post_norms else None,
            after_mlp_norm=norm(hidden) if config.post_norms else None,
        )
        for _ in range(config.num_layers)
    )
    final_norm = norm(hidden)
    output = embedding if config.tie_word_embeddings else take(config.vocab_size, hidden)
    return Weights(embedding, layers, final_norm, output)


def _scales_of(layer: LayerWeights) -> list[torch.Tensor]:
    scales = layer.scales
    found = (scales.query_key_value, scales.attention_output, scales.gate_up, scales.down)
    return [each for each in found if each is not None]


_Part = tuple[str, torch.Tensor, torch.Tensor | None]


def _parts(weights: Weights, config: ModelConfig) -> Iterator[_Part]:
    """Where each tensor of `tensor_shapes` goes, and the scales of its rows if it is to be quantized."""
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "model.embed_tokens.weight", weights.embedding, None
    for number, layer in enumerate(weights.layers):
        prefix, scales = f"model.layers.{number}", layer.scales
        attention = f"{prefix}.self_attn"
        yield f"{prefix}.input_layernorm.weight", layer.attention_norm, None
        names, sizes = [f"{attention}.{part}_proj" for part in "qkv"], [query, key, key]
        yield from _stacked(names, layer.query_key_value, scales.query_key_value, sizes)
        if layer.query_key_value_bias is not None:
            for name, bias in zip(names, torch.split(layer.query_key_value_bias, sizes), strict=True):
                yield f"{name}.bias", bias, None
        if layer.query_norm is not None and layer.key_norm is not None:
            yield f"{attention}.q_norm.weight", layer.query_norm, None
            yield f"{attention}.k_norm.weight", layer.key_norm, None
        yield f"{attention}.o_proj.weight", layer.attention_output, scales.attention_output
        if layer.attention_output_bias is not None:
            yield f"{attention}.o_proj.bias", layer.attention_output_bias, None
        if layer.after_attention_norm is not None:
            yield f"{prefix}.post_attention_layernorm.weight", layer.after_attention_norm, None
        yield f"{prefix}.{mlp_norm_name(config)}.weight", layer.mlp_norm, None
        names, sizes = [f"{prefix}.mlp.{part}_proj" for part in ("gate", "up")], [config.intermediate_size] * 2
        yield from _stacked(names, layer.gate_up, scales.gate_up, sizes)
        yield f"{prefix}.mlp.down_proj.weight", layer.down, scales.down
        if layer.after_mlp_norm is not None:
            yield f"{prefix}.post_feedforward_layernorm.weight", layer.after_mlp_norm, None
    yield "model.norm.weight", weights.final_norm, None
    if not config.tie_word_embeddings:
        yield "lm_head.weight", weights.output, None


def _stacked(names: list[str], matrix: torch.Tensor, scales: torch.Tensor | None, sizes: list[int]) -> Iterator[_Part]:
    """The matrices that stand in `matrix` one below the other, of so many rows."""
    start = 0
    for name, size in zip(names, sizes, strict=True):
        end = start + size
        yield f"{name}.weight", matrix[start:end], None if scales is None else scales[start:end]
        start = end


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


def dummy_weights_on(device: torch.device, kept: WeightFormat, config: ModelConfig, seed: int = DUMMY_SEED) -> Weights:
    """A whole model, each tensor as `dummy_tensor_on` makes it."""
    shapes, dtype = tensor_shapes(config), kept.dtype
    return filled_weights(device, kept, config, lambda name: dummy_tensor_on(device, dtype, name, shapes[name], seed))


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
