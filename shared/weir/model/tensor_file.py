"""Opens a model's tensors, from a GGUF file or a Hugging Face folder, and checks that they are those of its config."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from weir.model.config import ModelConfig
from weir.model.errors import ModelError
from weir.model.gguf_weights import GgufTensors
from weir.model.hf_weights import SafetensorsFolder
from weir.model.quant_blocks import QuantBlocks
from weir.model.source import ModelKind, ModelSource


class TensorFile(Protocol):
    """Tensors by the names that `tensor_shapes` uses (those of Hugging Face's Llama)."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor there, without reading any."""
        ...

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """A copy, dequantized where the file has it quantized."""
        ...

    def try_read_blocks(self, name: str) -> QuantBlocks | None:
        """The integers that the file holds for a matrix; None where it holds floating-point numbers."""
        ...


def open_tensors(source: ModelSource, config: ModelConfig) -> TensorFile:
    """Reads headers only.

    Raises:
        ModelError: names every tensor that is missing, unknown or of another shape than `config` asks for.
    """
    is_gguf = source.kind is ModelKind.GGUF
    tensors: TensorFile = GgufTensors(source.path, config) if is_gguf else SafetensorsFolder(source.path)
    _check_shapes(source, tensors.shapes(), tensor_shapes(config), config.tie_word_embeddings)
    return tensors


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of a model of this configuration."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (query, hidden),
            f"{prefix}.self_attn.k_proj.weight": (key, hidden),
            f"{prefix}.self_attn.v_proj.weight": (key, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, query),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        }
    return shapes


def _check_shapes(
    source: ModelSource, found: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]], tied: bool
) -> None:
    # buffers that old checkpoints saved, and the second name of a tied matrix
    found = {
        name: shape
        for name, shape in found.items()
        if not name.endswith(".rotary_emb.inv_freq") and not (tied and name == "lm_head.weight")
    }
    problems = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    problems += [f"{name} is not part of a Llama model" for name in sorted(found.keys() - expected.keys())]
    problems += [
        f"{name} has shape {list(found[name])}, expected {list(expected[name])}"
        for name in sorted(found.keys() & expected.keys())
        if found[name] != expected[name]
    ]
    if problems:
        more = f"; and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise ModelError(f"{source.path}: {'; '.join(problems[:10])}{more}")
