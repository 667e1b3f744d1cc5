"""Writes random models as GPTQ, AWQ and compressed-tensors checkpoints: bit by bit, from the formats' own packers.

GPTQ                 `QuantLinear.pack`, AutoGPTQ/AutoGPTQ: auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py; without
                     the `zeros -= 1` in ModelCloud/GPTQModel's gptq_v2
AWQ                  `WQLinear_GEMM.from_linear`, casper-hansen/AutoAWQ: awq/modules/linear/gemm.py
compressed-tensors   `PackedQuantizationCompressor.compress`, `pack_to_int32`, vllm-project/compressed-tensors:
                     compressed_tensors/compressors/pack_quantized; int8 weights as they are in naive_quantized

Words are put together from texts of binary digits, so that nothing here looks like what reads them.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import transformers
from tests.unit.model.architectures import BASE
from tests.unit.model.tiny import TinyLlama

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """`group_size` -1: whole rows."""

    method: str
    bits: int = 4
    group_size: int = 32
    symmetric: bool = False
    scales: torch.dtype = torch.float16
    version: str = "gptq"

    @property
    def name(self) -> str:
        kind = "sym" if self.symmetric else "asym"
        scales = str(self.scales).removeprefix("torch.")
        return f"{self.method}-{self.version}-{self.bits}-bits-{self.group_size}-{kind}-{scales}"


@dataclass(frozen=True)
class Quantized:
    """`integers` [out, in], unsigned; `scales`, `zeros` [out, groups]."""

    checkpoint: Checkpoint
    integers: np.ndarray
    scales: torch.Tensor
    zeros: np.ndarray

    @property
    def values(self) -> torch.Tensor:
        """scale * (integer - zero) in fp32."""
        columns = self.integers.shape[1] // self.zeros.shape[1]
        differences = self.integers.astype(np.int64) - self.zeros.repeat(columns, 1)
        return self.scales.float().repeat_interleave(columns, 1) * torch.from_numpy(differences).float()


def random_quantized(shape: tuple[int, int], checkpoint: Checkpoint, rng: np.random.Generator) -> Quantized:
    """Any integers, and zeros as far from the middle as any tool puts them; values of about 0.2."""
    top, middle = 1 << checkpoint.bits, 1 << (checkpoint.bits - 1)
    groups = 1 if checkpoint.group_size == -1 else shape[1] // checkpoint.group_size
    # 8 bits: no difference to a zero may need 9
    integers = (
        rng.integers(0, top, shape) if checkpoint.bits == 4 else rng.integers(middle // 2, top - middle // 2, shape)
    )
    zeros = np.full((shape[0], groups), middle)
    if not checkpoint.symmetric:
        # AWQ's and version 1's bounds: 0 ... 15 as stored
        first = 1 if checkpoint.version == "gptq" and checkpoint.method == "gptq" else 0
        spread = (first, top + first) if checkpoint.bits == 4 else (middle - 40, middle + 40)
        zeros = rng.integers(*spread, (shape[0], groups))
    scales = torch.from_numpy(rng.uniform(0.2, 1.0, (shape[0], groups)) * 0.4 / middle).to(checkpoint.scales)
    return Quantized(checkpoint, integers, scales, zeros)


def words(integers: np.ndarray, bits: int, order: list[int] | None = None) -> torch.Tensor:
    """int32 [rows, ceil(columns * bits / 32)]; `order`: which of a word's integers comes first, second …"""
    count = 32 // bits
    padded = np.pad(integers, ((0, 0), (0, -integers.shape[1] % count)))
    rows = []
    for row in padded.reshape(len(padded), -1, count):
        texts = [
            "".join(format(int(word[place]), f"0{bits}b") for place in reversed(order or range(count))) for word in row
        ]
        rows.append([int(text, 2) - (1 << 32) * (text[0] == "1") for text in texts])
    return torch.tensor(rows, dtype=torch.int32)


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.T.contiguous()


def gptq_tensors(matrix: Quantized) -> Tensors:
    bits, (_, num_inputs) = matrix.checkpoint.bits, matrix.integers.shape
    less = 1 if matrix.checkpoint.version == "gptq" else 0
    columns = num_inputs // matrix.zeros.shape[1]
    return {
        "qweight": transposed(words(matrix.integers, bits)),
        "qzeros": words(matrix.zeros.T - less, bits),
        "scales": transposed(matrix.scales),
        "g_idx": torch.tensor([number // columns for number in range(num_inputs)], dtype=torch.int32),
    }


def awq_tensors(matrix: Quantized) -> Tensors:
    return {
        "qweight": words(matrix.integers.T, 4, AWQ_ORDER),
        "qzeros": words(matrix.zeros.T, 4, AWQ_ORDER),
        "scales": transposed(matrix.scales),
    }


def packed_tensors(matrix: Quantized) -> Tensors:
    bits = matrix.checkpoint.bits
    zeros = {} if matrix.checkpoint.symmetric else {"weight_zero_point": transposed(words(matrix.zeros.T, bits))}
    return {
        "weight_packed": words(matrix.integers, bits),
        "weight_scale": matrix.scales,
        "weight_shape": torch.tensor(matrix.integers.shape, dtype=torch.int64),
        **zeros,
    }


def integer_tensors(matrix: Quantized) -> Tensors:
    middle = 1 << (matrix.checkpoint.bits - 1)
    zeros = {"weight_zero_point": torch.from_numpy(matrix.zeros - middle).to(torch.int8)}
    return {
        "weight": torch.from_numpy(matrix.integers - middle).to(torch.int8),
        "weight_scale": matrix.scales,
        **({} if matrix.checkpoint.symmetric else zeros),
    }


PACKERS: dict[str, Callable[[Quantized], Tensors]] = {
    "gptq": gptq_tensors,
    "awq": awq_tensors,
    "pack-quantized": packed_tensors,
    "int-quantized": integer_tensors,
}


def quantization_config(checkpoint: Checkpoint) -> dict[str, Any]:
    if checkpoint.method == "gptq":
        return {
            "quant_method": "gptq",
            "bits": checkpoint.bits,
            "group_size": checkpoint.group_size,
            "desc_act": False,
            "sym": checkpoint.symmetric,
            "checkpoint_format": checkpoint.version,
        }
    if checkpoint.method == "awq":
        group_size = checkpoint.group_size
        return {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm", "zero_point": True}
    whole_rows = checkpoint.group_size == -1
    weights = {
        "num_bits": checkpoint.bits,
        "type": "int",
        "symmetric": checkpoint.symmetric,
        "strategy": "channel" if whole_rows else "group",
        "group_size": None if whole_rows else checkpoint.group_size,
        "actorder": None,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": checkpoint.method,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


@dataclass(frozen=True)
class SavedCheckpoint(TinyLlama):
    """`model` has the dequantized weights; `meant` are those of quantized matrices, by the names of their weights."""

    meant: Tensors = field(default_factory=dict)


def save_checkpoint(
    folder: Path,
    checkpoint: Checkpoint,
    config_class: type[Any] = transformers.LlamaConfig,
    seed: int = 1,
    **changes: Any,
) -> SavedCheckpoint:
    """All matrices of the layers are quantized; embedding, norms, biases and head are fp32."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    model = transformers.AutoModelForCausalLM.from_config(config_class(**(BASE | sizes | changes)))
    tensors: Tensors = {}
    meant: Tensors = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("_proj.weight"):
                if name.endswith(("norm.weight", ".bias")):
                    parameter.uniform_(0.5, 1.5)
                tensors[name] = parameter.clone()
                continue
            matrix = random_quantized((parameter.shape[0], parameter.shape[1]), checkpoint, rng)
            meant[name] = matrix.values
            parameter.copy_(matrix.values)
            packed = PACKERS[checkpoint.method](matrix)
            tensors |= {name.removesuffix("weight") + part: tensor for part, tensor in packed.items()}
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    config = model.config.to_dict() | {"quantization_config": quantization_config(checkpoint)}
    (folder / "config.json").write_text(json.dumps(config))
    return SavedCheckpoint(folder, model.eval(), meant)


CHECKPOINTS = [
    *(
        Checkpoint("gptq", bits, group_size, symmetric, version=version)
        for version in ("gptq", "gptq_v2")
        for bits in (4, 8)
        for group_size, symmetric in ((32, False), (64, True), (128, False), (-1, True))
    ),
    *(Checkpoint("awq", group_size=group_size) for group_size in (32, 64, 128, -1)),
    *(
        Checkpoint(method, bits, group_size, symmetric, scales)
        for method in ("pack-quantized", "int-quantized")
        for bits in (4, 8)
        for group_size, symmetric, scales in (
            (32, True, torch.float16),
            (128, False, torch.bfloat16),
            (-1, False, torch.float16),
            (-1, True, torch.float32),
        )
    ),
]
CHECKPOINTS = [
    checkpoint if checkpoint.method == "gptq" else replace(checkpoint, version="-") for checkpoint in CHECKPOINTS
]
