"""A model's tensors as the int8 kernels want them, made one after the other.

    embedding                       matrix, only where it is not the head
    layers.N.query_key_value        matrix, stacked along its outputs, like
    layers.N.gate_up                matrix
    layers.N.attention_output       matrix
    layers.N.down                   matrix
    head                            matrix
    norms                           fp32 [2 num_layers + 1, hidden]: before attention, before the MLP, …, the final one
    query_key_value_bias            fp32 [num_layers, outputs], only where the model has one
    attention_output_bias           fp32 [num_layers, hidden], only where the model has one
    query_key_norms                 fp32 [2 num_layers, head_dim]: of queries, of keys, …; only where the model has them
    post_norms                      fp32 [2 num_layers, hidden]: after attention, after the MLP, …; only where there are
    cosines, sines                  fp32 [max_context_tokens, head_dim / 2] of the rotary embedding
    local_cosines, local_sines      the same of layers with a window, only where they have their own

A matrix is one or more packed parts, one below the other: neighbours whose numbers are of the same kind are one part.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt

from weir.model.architecture import (
    Frequencies,
    ModelConfig,
    local_rotary_frequencies,
    mlp_norm_name,
    rotary_frequencies,
    rotary_magnitudes,
)
from weir.model.errors import ModelError
from weir.model.files.quant_blocks import QuantBlocks
from weir.model.files.tensor_file import TensorFile
from weir.ops.cpu.linear_pack import BLOCK_OUTPUTS, PackedMatrix, pack_int8, pack_q4_1, pack_q8_0

Parts = tuple[PackedMatrix, ...]
Floats = npt.NDArray[np.float32]

_EMBEDDING = "model.embed_tokens.weight"


def pack_matrices(tensors: TensorFile, config: ModelConfig) -> Iterator[tuple[str, Parts]]:
    """Every matrix under its name; only the one that is yielded is in memory.

    Four-bit and eight-bit numbers of a file stay what they are; everything else is quantized to 8 bits.

    Raises:
        ModelError: a matrix cannot be packed; names it.
    """
    if not config.tie_word_embeddings:
        yield "embedding", _pack(tensors, [_EMBEDDING])
    for layer in range(config.num_layers):
        for name, members in _LAYER_MATRICES.items():
            yield f"layers.{layer}.{name}", _pack(tensors, [f"model.layers.{layer}.{part}.weight" for part in members])
    yield "head", _pack(tensors, [_EMBEDDING if config.tie_word_embeddings else "lm_head.weight"])


def pack_arrays(tensors: TensorFile, config: ModelConfig) -> Iterator[tuple[str, Floats]]:
    """What stays in fp32: small."""

    def norms(*names: str) -> list[Floats]:
        layers = range(config.num_layers)
        return [tensors.read(f"model.layers.{layer}.{name}.weight") for layer in layers for name in names]

    hidden_norms = norms("input_layernorm", mlp_norm_name(config))
    yield "norms", np.stack([*hidden_norms, tensors.read("model.norm.weight")])
    if config.query_key_norm:
        yield "query_key_norms", np.stack(norms("self_attn.q_norm", "self_attn.k_norm"))

    if config.post_norms:
        yield "post_norms", np.stack(norms("post_attention_layernorm", "post_feedforward_layernorm"))

    def biases(*names: str) -> Floats:
        return np.stack(
            [
                np.concatenate([tensors.read(f"model.layers.{layer}.self_attn.{name}.bias") for name in names])
                for layer in range(config.num_layers)
            ]
        )

    if config.query_key_value_bias:
        yield "query_key_value_bias", biases("q_proj", "k_proj", "v_proj")
    if config.attention_output_bias:
        yield "attention_output_bias", biases("o_proj")
    magnitudes = rotary_magnitudes(config)
    yield from _rotary_tables("", rotary_frequencies(config), magnitudes, config.max_context_tokens)
    local = local_rotary_frequencies(config)
    if local is not None:
        yield from _rotary_tables("local_", local, np.ones_like(local), config.max_context_tokens)


def _rotary_tables(
    prefix: str, frequencies: Frequencies, magnitudes: Frequencies, num_positions: int
) -> Iterator[tuple[str, Floats]]:
    # angles in fp32 as the fp32 path makes them; their cosines in fp64, so that every machine rounds to the same bits
    angles = np.outer(np.arange(num_positions, dtype=np.float32), frequencies)
    yield f"{prefix}cosines", np.cos(angles, dtype=np.float64).astype(np.float32) * magnitudes
    yield f"{prefix}sines", np.sin(angles, dtype=np.float64).astype(np.float32) * magnitudes


_LAYER_MATRICES = {
    "query_key_value": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention_output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


def _pack(tensors: TensorFile, names: Sequence[str]) -> Parts:
    try:
        return tuple(_pack_alike(members) for members in _alike([_read(tensors, name) for name in names]))
    except ValueError as error:
        raise ModelError(
            f"{', '.join(names)} cannot be packed for int8 ({error}); use --precision fp32 for this model"
        ) from error


def _read(tensors: TensorFile, name: str) -> QuantBlocks | Floats:
    blocks = tensors.try_read_blocks(name)
    return tensors.read(name) if blocks is None else blocks


def _alike(matrices: list[QuantBlocks | Floats]) -> Iterator[list[QuantBlocks | Floats]]:
    """Neighbours of one kind together. Packed parts are padded, so only whole blocks of outputs may be joined."""
    if any(_num_rows(matrix) % BLOCK_OUTPUTS for matrix in matrices[:-1]):
        yield from ([matrix] for matrix in matrices)
        return
    for _, members in groupby(matrices, key=_kind):
        yield list(members)


def _kind(matrix: QuantBlocks | Floats) -> str:
    if isinstance(matrix, QuantBlocks):
        return "int8" if matrix.minima is None else "int4"
    return "float"


def _num_rows(matrix: QuantBlocks | Floats) -> int:
    return len(matrix.quants if isinstance(matrix, QuantBlocks) else matrix)


def _pack_alike(members: list[QuantBlocks | Floats]) -> PackedMatrix:
    blocks = [member for member in members if isinstance(member, QuantBlocks)]
    if not blocks:
        return pack_int8(np.concatenate([member for member in members if not isinstance(member, QuantBlocks)]))
    quants = np.concatenate([block.quants for block in blocks])
    scales = np.concatenate([block.scales for block in blocks])
    minima = [block.minima for block in blocks if block.minima is not None]
    return pack_q4_1(quants, scales, np.concatenate(minima)) if minima else pack_q8_0(quants, scales)
