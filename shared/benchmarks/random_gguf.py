"""A model of a known shape with random weights as a GGUF file, which other servers read too.

    PYTHONPATH=shared python3 -m benchmarks.random_gguf qwen2.5-0.5b random.gguf

Matrices are Q4_1. The vocabulary is one byte a token, filled up with names; nothing that it writes means anything. What
it is for: `weir bench step --model random.gguf` beside `llama-bench -m random.gguf`.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from tokenizers import pre_tokenizers

from weir.model.architecture import ModelConfig, rotary_frequencies, tensor_shapes
from weir.model.files.dummy import DUMMY_SEED, MODEL_SHAPES, SPREAD, is_norm, shape_named, tensor_seed

_KIND = gguf.GGMLQuantizationType.Q4_1


def write_random_gguf(config: ModelConfig, path: Path, seed: int = DUMMY_SEED) -> None:
    """Of numbers in [-SPREAD, SPREAD]; norms are ones and biases zeros. The same file for the same seed.

    Raises ValueError: see `can_be_written`."""
    if not can_be_written(config):
        raise ValueError(
            "a window, norms behind branches or partly rotated heads: no GGUF file of them is written here"
        )
    architecture = _architecture_of(config)
    names = gguf.get_tensor_name_map(architecture, config.num_layers)
    writer = gguf.GGUFWriter(path, arch=gguf.MODEL_ARCH_NAMES[architecture])
    _add_numbers(writer, config)
    _add_vocabulary(writer, config.vocab_size)
    if config.rotary_scaling is not None:
        writer.add_tensor("rope_freqs.weight", _divisors(config))
    for name, shape in tensor_shapes(config).items():
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if len(shape) == 1:
            vector = (np.ones if is_norm(name) else np.zeros)(shape, np.float32)
            writer.add_tensor(gguf_name, vector)
        else:
            blocks = _random_blocks(shape, tensor_seed(name, seed))
            writer.add_tensor(gguf_name, blocks, raw_dtype=_KIND)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def can_be_written(config: ModelConfig) -> bool:
    """Llama, Qwen2 and Qwen3, whose files say all that there is to say."""
    return config.window is None and config.rotary_dim is None and not config.post_norms


def _architecture_of(config: ModelConfig) -> gguf.MODEL_ARCH:
    if config.query_key_norm:
        return gguf.MODEL_ARCH.QWEN3
    return gguf.MODEL_ARCH.QWEN2 if config.query_key_value_bias else gguf.MODEL_ARCH.LLAMA


def _add_numbers(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_context_tokens)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.head_dim)


def _add_vocabulary(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    # one pair, for readers that want merges at all
    tokens = [*letters, letters[0] + letters[1]]
    tokens += [*(f"<filler {number}>" for number in range(len(tokens), vocab_size - 1)), "<end>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * (vocab_size - 1) + [gguf.TokenType.CONTROL])
    writer.add_token_merges([f"{letters[0]} {letters[1]}"])
    writer.add_eos_token_id(vocab_size - 1)


def _divisors(config: ModelConfig) -> npt.NDArray[np.float32]:
    """By what unscaled rotary frequencies are divided, [head_dim / 2]."""
    unscaled = rotary_frequencies(replace(config, rotary_scaling=None))
    return (unscaled / rotary_frequencies(config)).astype(np.float32)


def _random_blocks(shape: tuple[int, ...], seed: int) -> npt.NDArray[np.uint8]:
    """Q4_1: blocks of 32 with a scale and a minimum, the same for all, and 16 bytes of two numbers each."""
    rows, columns = shape
    blocks = np.random.default_rng(seed).integers(0, 256, (rows, columns // 32, 20), dtype=np.uint8)
    blocks[..., :4] = np.array([2 * SPREAD / 15, -SPREAD], "<f2").view(np.uint8)
    return blocks.reshape(rows, -1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "shape", choices=sorted(name for name, config in MODEL_SHAPES.items() if can_be_written(config))
    )
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    write_random_gguf(shape_named(arguments.shape), arguments.out)
