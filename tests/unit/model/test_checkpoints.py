"""GPTQ, AWQ and compressed-tensors folders give exactly the weights that they hold, on every path."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.model.checkpoints import (
    CHECKPOINTS,
    PACKERS,
    Checkpoint,
    random_quantized,
    save_checkpoint,
)
from tests.unit.model.int8 import Int8Probe
from tests.unit.model.tiny import LogitsProbe, chunk, prompt_ids

from weir.model.files.config import load_model_config
from weir.model.files.quant_layouts import QuantMatrix, matrix_shape, read_matrix, wanted_tensors
from weir.model.files.quantization import QuantLayout, QuantScheme
from weir.model.files.tensors import open_tensors
from weir.ops.cpu.linear_pack import BLOCK_OUTPUTS, PackedMatrix, WeightKind, pack_q4_1, pack_q8_0

TABLE = (9, 2, 31, 4)
by_name = pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=lambda checkpoint: checkpoint.name)


def scheme_of(checkpoint: Checkpoint) -> QuantScheme:
    return QuantScheme(
        QuantLayout(checkpoint.method),
        checkpoint.bits,
        None if checkpoint.group_size == -1 else checkpoint.group_size,
        has_zeros=checkpoint.method in ("gptq", "awq") or not checkpoint.symmetric,
        zeros_less_one=checkpoint.version == "gptq",
    )


def read_back(tensors: dict[str, torch.Tensor], checkpoint: Checkpoint) -> QuantMatrix:
    scheme = scheme_of(checkpoint)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    shape = matrix_shape(scheme, shapes, lambda part: tensors[part].numpy())
    assert shape is not None
    wanted = wanted_tensors(scheme, *shape)
    assert {name: found.shape for name, found in wanted.items()} == shapes
    return read_matrix(
        scheme, shape, lambda part: tensors[part].numpy(), lambda part: tensors[part].to(torch.float32).numpy()
    )


def unpacked(matrix: PackedMatrix) -> np.ndarray:
    """fp32 [outputs, inputs], after the drawing in `linear_pack`, one number at a time."""
    groups = matrix.num_inputs // 32
    stride = 64 + 512 * matrix.kind // 8
    data = matrix.data.reshape(-1, groups, stride)
    found = np.empty((matrix.num_outputs, matrix.num_inputs), np.float32)
    for row in range(matrix.num_outputs):
        lane = row % BLOCK_OUTPUTS
        for group in range(groups):
            stored = data[row // BLOCK_OUTPUTS, group]
            for place in range(32):
                quad, byte = place // 4, place % 4
                if matrix.kind is WeightKind.INT8:
                    quant = np.float32(int(stored[64 + 64 * quad + 4 * lane + byte]) - 128)
                    found[row, 32 * group + place] = stored[:64].view(np.float32)[lane] * quant
                else:
                    pair = int(stored[64 + 64 * (quad // 2) + 4 * lane + byte])
                    quant = np.float32(pair >> 4 if quad % 2 else pair & 15)
                    scale, minimum = stored[:64].view(np.float16).astype(np.float32).reshape(2, 16)[:, lane]
                    found[row, 32 * group + place] = scale * quant + minimum
    return found


@by_name
@settings(max_examples=8, deadline=None)
@given(st.integers(1, 3), st.integers(1, 2), st.integers(0, 2**32 - 1))
def test_what_is_packed_for_the_kernels_is_what_the_checkpoint_holds_to_the_bit(
    checkpoint: Checkpoint, num_outputs: int, num_inputs: int, seed: int
) -> None:
    matrix = random_quantized((8 * num_outputs, 128 * num_inputs), checkpoint, np.random.default_rng(seed))
    found = read_back(PACKERS[checkpoint.method](matrix), checkpoint)
    meant = matrix.values.numpy()
    assert np.array_equal(found.values(), meant)
    blocks = found.blocks()
    if blocks.minima is None:
        packed = pack_q8_0(blocks.quants, blocks.scales)
    else:
        packed = pack_q4_1(blocks.quants, blocks.scales, blocks.minima)
    assert np.array_equal(unpacked(packed), meant)
    if checkpoint.bits == 4 and checkpoint.symmetric and checkpoint.scales is not torch.float32:
        assert packed.kind is WeightKind.INT4, "8 times a scale is a number of float16, too"


@by_name
def test_every_position_has_the_logits_of_transformers(checkpoint: Checkpoint, tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path, checkpoint)
    ids = prompt_ids(40, seed=1)
    found = LogitsProbe(saved.source).run_alone(chunk(0, ids, 0, 40, TABLE))
    torch.testing.assert_close(found, saved.logits(ids), atol=1e-4, rtol=0)
    tensors = open_tensors(saved.source, load_model_config(saved.source))
    for name, values in saved.meant.items():
        assert np.array_equal(tensors.read(name), values.numpy()), name


ONE_OF_EACH = [
    Checkpoint("gptq", group_size=128, symmetric=True),
    Checkpoint("awq", group_size=64, version="-"),
    Checkpoint("pack-quantized", group_size=32, scales=torch.bfloat16, version="-"),
    Checkpoint("int-quantized", 8, -1, symmetric=True, version="-"),
]
of_each = pytest.mark.parametrize("checkpoint", ONE_OF_EACH, ids=lambda checkpoint: checkpoint.name)


@of_each
def test_other_architectures_keep_their_biases_and_fused_matrices(checkpoint: Checkpoint, tmp_path: Path) -> None:
    ids = prompt_ids(40, seed=1)
    changes: dict[str, Any] = {"pad_token_id": 0, "sliding_window": None}
    for config_class in (transformers.Qwen2Config, transformers.Qwen3Config, transformers.Phi3Config):
        phi: dict[str, Any] = changes if config_class is transformers.Phi3Config else {}
        saved = save_checkpoint(tmp_path / config_class.__name__, checkpoint, config_class, **phi)
        found = LogitsProbe(saved.source).run_alone(chunk(0, ids, 0, 40, TABLE))
        torch.testing.assert_close(found, saved.logits(ids), atol=1e-4, rtol=0)


@of_each
@pytest.mark.timeout(600)
def test_the_int8_path_computes_with_the_same_weights(checkpoint: Checkpoint, tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path / "hf", checkpoint)
    ids = prompt_ids(40, seed=3)
    plan = chunk(0, ids, 0, 40, TABLE)
    meant = saved.logits(ids)[-1].numpy()
    found = Int8Probe(saved.source, tmp_path).run(plan)[0]
    # activations are rounded to 8 bits: as in test_int8_decoder
    assert float(np.abs(found - meant).max() / np.ptp(meant)) < 0.05
