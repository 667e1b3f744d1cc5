"""What a stack takes of a host's memory beside its arena: an estimate, on the safe side, by the model's shapes."""

import math

from weir.core.device import Arithmetic, Device
from weir.model.architecture import ModelConfig, tensor_shapes

_INT8_BYTES = 36 / 32
"""Of a weight with its share of a group's scale (`weir.ops.cpu.linear_pack`)."""
_BUFFER_ROWS = 128
_PACKING_COPIES = 4
_WORKER_BYTES = 300 << 20
_TORCH_BYTES = 400 << 20
OTHERS_BYTES = 600 << 20
"""Of gateway, scheduler, transfer service, NATS and supervisor."""


def stack_bytes(
    config: ModelConfig, arithmetic: Arithmetic, device: Device, num_workers: int, *, packs_floats: bool = True
) -> int:
    """Weights, buffers and processes of `num_workers` workers and of what every stack has.

    int8 weights are mapped by all workers, and made by one of them, with `packs_floats` matrix by matrix in fp32;
    PyTorch's are each worker's own.
    """
    sizes = [math.prod(shape) for shape in tensor_shapes(config).values()]
    on_gpu = device == "cuda"
    if arithmetic == "int8" and not on_gpu:
        shared = round(_INT8_BYTES * sum(sizes)) + packs_floats * 4 * _PACKING_COPIES * max(sizes)
        return shared + num_workers * (_WORKER_BYTES + _buffer_bytes(config)) + OTHERS_BYTES
    own = 0 if on_gpu else 4 * sum(sizes) + _buffer_bytes(config)
    return num_workers * (_WORKER_BYTES + _TORCH_BYTES + own) + OTHERS_BYTES


def _buffer_bytes(config: ModelConfig) -> int:
    """Of the numbers between layers, and of the logits."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    a_row = 4 * config.hidden_size + 2 * heads + 4 * config.intermediate_size + config.vocab_size
    return 4 * _BUFFER_ROWS * a_row
