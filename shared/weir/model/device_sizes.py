"""How much of a GPU is for pages, and how many sequences a worker decodes on it, where nobody has said.

    GPU   | kept free | weights, once | of each worker: buffers, what CUDA takes | pages                       |

An estimate by the model's shapes, on the safe side; what is asked for by name
(`arena_bytes`, `max_num_seqs`) is taken as it is.
"""

import math
from dataclasses import dataclass

from weir.core.device import FP8_MATRICES, Arithmetic
from weir.kv.geometry import PAGE_TOKENS
from weir.model.architecture import ModelConfig, tensor_shapes
from weir.model.errors import ModelError
from weir.model.precision import page_geometry

_GIB = 1 << 30
_KEPT_SHARE = 20  # a twentieth: fragments, and what others of this machine show on it
_CUDA_BYTES = 1 << 30
"""Of a process: context, code of the kernels, workspaces of matrix products, captured graphs."""
_SPLIT_TOKENS = 256
"""The least that a part of a decode's keys may be; each part keeps sums of its own."""
_MOST_SPLITS = 64
"""Parts of one row: `weir.ops.gpu.paged_decode`, which cannot be imported here."""
_NUM_BYTES = {"fp32": 4, "bf16": 2, "int8": 2, "fp8": 2, "bf16-kv8": 2, "fp8-kv8": 2}
"""Of what is neither a matrix in E4M3 nor in a page."""
_SCALE_BYTES = 4
"""Of a row of a matrix in E4M3."""
_LAYER = "model.layers."
_SEQUENCES_BY_GIB = ((40, 128), (16, 64), (0, 32))


@dataclass(frozen=True, slots=True)
class StepBounds:
    """Tokens and sequences of one step, for which a worker has buffers."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_context_tokens: int


def max_num_seqs_on_gpu(total_bytes: int) -> int:
    """Sequences in the batch of a decode worker. A step reads the weights once, for however many."""
    return next(count for gib, count in _SEQUENCES_BY_GIB if total_bytes >= gib * _GIB)


def worker_bytes_on_gpu(config: ModelConfig, arithmetic: Arithmetic, bounds: StepBounds) -> int:
    """What a worker takes of a GPU beside the pages and the weights, which all workers of a GPU map."""
    number_bytes = _NUM_BYTES[arithmetic]
    heads_width = (config.num_heads + config.num_kv_heads) * 2 * config.head_dim
    row = number_bytes * (3 * config.hidden_size + heads_width + 3 * config.intermediate_size)
    # as they are computed, and in fp32; the sampler's counts, and a copy of its own
    logits = (number_bytes + 4 + 8) * config.vocab_size
    num_splits = min(_MOST_SPLITS, -(-bounds.max_context_tokens // _SPLIT_TOKENS))
    splits = 4 * config.num_heads * (config.head_dim + 2) * num_splits
    angles = 4 * config.max_context_tokens * config.head_dim
    buffers = bounds.max_num_batched_tokens * row + bounds.max_num_seqs * (logits + splits) + angles
    return buffers + _CUDA_BYTES


def weight_bytes_on_gpu(config: ModelConfig, arithmetic: Arithmetic) -> int:
    shapes, number_bytes = tensor_shapes(config), _NUM_BYTES[arithmetic]
    if arithmetic not in FP8_MATRICES:
        return number_bytes * sum(map(math.prod, shapes.values()))
    matrices = [shape for name, shape in shapes.items() if name.startswith(_LAYER) and len(shape) == 2]
    num_quantized = sum(map(math.prod, matrices))
    num_others = sum(map(math.prod, shapes.values())) - num_quantized
    return num_quantized + _SCALE_BYTES * sum(rows for rows, _ in matrices) + number_bytes * num_others


def arena_bytes_on_gpu(
    config: ModelConfig, arithmetic: Arithmetic, bounds: StepBounds, free_bytes: int, num_workers: int
) -> int:
    """Whole pages in what `num_workers` leave of `free_bytes`, which is free before the first of them starts.

    Raises ModelError where they leave no room for one page.
    """
    worker_bytes, weight_bytes = (
        worker_bytes_on_gpu(config, arithmetic, bounds),
        weight_bytes_on_gpu(config, arithmetic),
    )
    left_bytes = free_bytes - free_bytes // _KEPT_SHARE - weight_bytes - num_workers * worker_bytes
    page_bytes = page_geometry(config, arithmetic).page_bytes
    if left_bytes < page_bytes:
        raise ModelError(
            f"GPU 0 has {free_bytes / _GIB:.1f} GiB; weights take {weight_bytes / _GIB:.1f} of them and each of "
            f"{num_workers} workers {worker_bytes / _GIB:.1f}: no page of {PAGE_TOKENS} tokens fits; start fewer "
            "workers, choose a smaller model, or give --arena-bytes if this estimate is wrong"
        )
    return left_bytes // page_bytes * page_bytes
