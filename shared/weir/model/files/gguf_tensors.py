"""Tensors of a GGUF file."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import gguf
import numpy as np
import numpy.typing as npt

from weir.model.architecture import ModelConfig
from weir.model.errors import ModelError
from weir.model.files.gguf import GgufFile, GgufTensor, read_gguf
from weir.model.files.quant_blocks import QuantBlocks, try_split_blocks

_SUPPORTED = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_POST_NORM_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""Of models with norms behind attention and the MLP."""
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_PATTERN = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# the configuration has read them
_NO_WEIGHTS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

_ScalarT = TypeVar("_ScalarT", bound=np.generic)


class GgufTensors:
    """Dequantizes on read; the file is mapped, so a tensor's bytes are read once."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        file = read_gguf(path, with_texts=False)
        check_tensor_types(file)
        self._path = path
        self._config = config
        # llama.cpp's converter reorders queries and keys of this architecture and of no other
        self._is_permuted = file.get("general.architecture", str) == "llama"
        names = _LAYER_NAMES | (_POST_NORM_NAMES if config.post_norms else {})
        if "blk.0.ffn_gate.weight" not in file.tensors:
            names |= {"ffn_up": "mlp.gate_up_proj"}
        self._tensors = {
            _canonical_name(name, names): tensor for name, tensor in file.tensors.items() if name not in _NO_WEIGHTS
        }
        self._data = np.memmap(path, dtype=np.uint8, mode="r")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def read(self, name: str) -> npt.NDArray[np.float32]:
        tensor = self._tensors[name]
        kind, raw = self._raw(tensor)
        values = gguf.dequantize(raw, kind).reshape(tensor.shape)
        # a copy also of what was F32 already: the file's mapping is read-only and not aligned for vector loads
        loaded = np.array(values, dtype=np.float32) if kind.name == "F32" else np.ascontiguousarray(values, np.float32)
        return self._in_order(name, loaded)

    def try_view(self, name: str) -> None:
        """None: rows of queries and keys may have another order there, and numbers are quantized."""

    def try_read_blocks(self, name: str) -> QuantBlocks | None:
        kind, raw = self._raw(self._tensors[name])
        blocks = try_split_blocks(kind.name, raw)
        return None if blocks is None else blocks.map_rows(lambda rows: self._in_order(name, rows))

    def _in_order(self, name: str, rows: npt.NDArray[_ScalarT]) -> npt.NDArray[_ScalarT]:
        """The rows of `name` as transformers orders them."""
        if self._is_permuted and ".q_proj." in name:
            return undo_rotary_permutation(rows, self._config.num_heads)
        if self._is_permuted and ".k_proj." in name:
            return undo_rotary_permutation(rows, self._config.num_kv_heads)
        return rows

    def _raw(self, tensor: GgufTensor) -> tuple[gguf.GGMLQuantizationType, npt.NDArray[np.uint8]]:
        """The stored bytes, one row of blocks a row, and their type."""
        kind = _checked_kind(self._path, tensor)
        block_elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        num_bytes = int(np.prod(tensor.shape)) // block_elements * block_bytes
        raw = self._data[tensor.offset : tensor.offset + num_bytes]
        if raw.size != num_bytes:
            raise ModelError(f"{self._path}: cut off inside tensor {tensor.name}")
        return kind, np.asarray(raw).reshape(*tensor.shape[:-1], -1)


def check_tensor_types(file: GgufFile) -> None:
    """Raises ModelError: names a tensor of a type that Weir does not read, and those that it reads."""
    for tensor in file.tensors.values():
        _checked_kind(file.path, tensor)


def _checked_kind(path: Path, tensor: GgufTensor) -> gguf.GGMLQuantizationType:
    try:
        kind = gguf.GGMLQuantizationType(tensor.type_id)
    except ValueError:
        raise _refusal(path, tensor, f"unknown type {tensor.type_id}") from None
    if kind.name not in _SUPPORTED:
        raise _refusal(path, tensor, f"type {kind.name}")
    block_elements, _ = gguf.GGML_QUANT_SIZES[kind]
    if not tensor.shape or tensor.shape[-1] % block_elements:
        elements = tensor.shape[-1] if tensor.shape else 0
        raise _refusal(path, tensor, f"rows of {elements} values in {kind.name} blocks of {block_elements}")
    return kind


def _refusal(path: Path, tensor: GgufTensor, what: str) -> ModelError:
    return ModelError(f"{path}: tensor {tensor.name} has {what}; Weir reads {', '.join(_SUPPORTED)}")


def undo_rotary_permutation(rows: npt.NDArray[_ScalarT], num_heads: int) -> npt.NDArray[_ScalarT]:
    """GGUF Llama files rotate pairs (0, 1), (2, 3) … of a head; here, as in transformers, (0, d/2), (1, d/2 + 1) …

    llama.cpp's converter reorders the rows `[head, half, pair]` to `[head, pair, half]`; this puts them back. A copy.
    """
    pairs = len(rows) // num_heads // 2
    reordered = rows.reshape(num_heads, pairs, 2, *rows.shape[1:]).swapaxes(1, 2)
    return np.ascontiguousarray(reordered).reshape(rows.shape)


def _canonical_name(name: str, names: Mapping[str, str]) -> str:
    """Names that are not in `names` stay as they are and are refused with the rest."""
    match = _LAYER_PATTERN.fullmatch(name)
    if match is not None and match.group(2) in names:
        return f"model.layers.{match.group(1)}.{names[match.group(2)]}.{match.group(3)}"
    return _TOP_NAMES.get(name, name)
