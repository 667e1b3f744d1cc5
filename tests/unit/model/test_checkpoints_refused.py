"""Quantized folders that are not read are refused by field, value and what is supported; broken ones by tensor."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.unit.model.checkpoints import Checkpoint, Tensors, quantization_config, save_checkpoint

from weir.core.device import Precision
from weir.model.cpu.core_share import FixedShare
from weir.model.errors import ModelError
from weir.model.files.config import load_model_config
from weir.model.files.digest import model_digest
from weir.model.files.source import resolve_model
from weir.model.files.tensors import open_tensors
from weir.model.hub.servable import find_obstacle
from weir.model.load import load_model

GPTQ = Checkpoint("gptq")
AWQ = Checkpoint("awq", version="-")
PACKED = Checkpoint("pack-quantized", version="-")
INTEGERS = Checkpoint("int-quantized", 8, -1, symmetric=True, version="-")
Q_PROJ = "model.layers.0.self_attn.q_proj."


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Checkpoint, Path]:
    found = {}
    for checkpoint in (GPTQ, AWQ, PACKED, INTEGERS):
        found[checkpoint] = tmp_path_factory.mktemp("checkpoint")
        save_checkpoint(found[checkpoint], checkpoint, num_hidden_layers=1)
    return found


def copy_changed(
    folder: Path,
    target: Path,
    change: Callable[[Tensors], object] = lambda tensors: None,
    change_config: Callable[[dict[str, Any]], object] = lambda fields: None,
) -> Path:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    change(tensors)
    safetensors.torch.save_file(tensors, target / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    change_config(config["quantization_config"])
    (target / "config.json").write_text(json.dumps(config))
    return target


def weights(fields: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = fields["config_groups"]["group_0"]["weights"]
    return found


def group(fields: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = fields["config_groups"]["group_0"]
    return found


ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
REFUSED: list[tuple[Checkpoint, Callable[[dict[str, Any]], object], str]] = [
    (GPTQ, lambda f: f.update(quant_method="bitsandbytes"), r"quant_method 'bitsandbytes' .* only 'gptq', 'awq'"),
    (GPTQ, lambda f: f.pop("quant_method"), r"quant_method None"),
    (GPTQ, lambda f: f.update(bits=3), r"\.bits 3 is not supported, only 4, 8"),
    (GPTQ, lambda f: f.update(bits=True), r"bits True"),
    (GPTQ, lambda f: f.pop("bits"), r"bits None"),
    (GPTQ, lambda f: f.update(group_size=16), r"group_size 16 .* multiples of 32, and -1"),
    (GPTQ, lambda f: f.update(group_size="128"), r"group_size '128'"),
    (GPTQ, lambda f: f.update(checkpoint_format="marlin"), r"checkpoint_format 'marlin' .* only 'gptq', 'gptq_v2'"),
    (GPTQ, lambda f: f.update(checkpoint_format=None, format="bitblas"), r"format 'bitblas'"),
    (GPTQ, lambda f: f.update(is_marlin_format=True), r"is_marlin_format True"),
    (GPTQ, lambda f: f.update(dynamic={"-:.*down.*": {}}), r"dynamic \{"),
    (GPTQ, lambda f: f.update(pack_dtype="int8"), r"pack_dtype 'int8' .* only 'int32'"),
    (AWQ, lambda f: f.update(version="gemv"), r"version 'gemv' .* only 'gemm'"),
    (AWQ, lambda f: f.update(version=4), r"version 4"),
    (AWQ, lambda f: f.update(bits=8), r"bits 8 is not supported, only 4"),
    (AWQ, lambda f: f.update(zero_point=False), r"zero_point False"),
    (PACKED, lambda f: f.update(format="float-quantized"), r"format 'float-quantized' .* 'pack-quantized', 'int-q"),
    (PACKED, lambda f: f.update(format="marlin-24"), r"format 'marlin-24'"),
    (PACKED, lambda f: f.update(kv_cache_scheme={"num_bits": 8}), r"kv_cache_scheme \{'num_bits': 8\}"),
    (PACKED, lambda f: f.update(sparsity_config={"format": "sparse-24-bitmask"}), r"sparsity_config \{.*dense"),
    (PACKED, lambda f: f.update(transform_config={"config_groups": {"u": {}}}), r"transform_config \{"),
    (PACKED, lambda f: f.update(config_groups=None), r"config_groups is None, expected an object"),
    (PACKED, lambda f: f.update(config_groups={}), r"config_groups \{\} is not supported"),
    (PACKED, lambda f: group(f).update(weights=None), r"group_0\.weights is None, expected an object"),
    (PACKED, lambda f: weights(f).update(num_bits=2), r"config_groups\.group_0\.weights\.num_bits 2 .* only 4, 8"),
    (PACKED, lambda f: weights(f).update(type="float"), r"weights\.type 'float' is not supported, only 'int'"),
    (PACKED, lambda f: weights(f).update(strategy="tensor"), r"strategy 'tensor' .* only 'group', 'channel'"),
    (PACKED, lambda f: weights(f).update(actorder="group"), r"weights\.actorder 'group' .* only 'static', 'weight'"),
    (PACKED, lambda f: weights(f).update(group_size=None), r"group_size None"),
    (PACKED, lambda f: weights(f).update(dynamic=True), r"weights\.dynamic True"),
    (
        INTEGERS,
        lambda f: group(f).update(input_activations=ACTIVATIONS | {"dynamic": False}),
        r"input_activations\.dynamic False is not supported, only True",
    ),
    (
        INTEGERS,
        lambda f: group(f).update(input_activations=ACTIVATIONS | {"type": "float"}),
        r"input_activations\.type 'float'",
    ),
    (INTEGERS, lambda f: group(f).update(output_activations=ACTIVATIONS), r"output_activations \{"),
    (
        INTEGERS,
        lambda f: f["config_groups"].update(group_1=group(quantization_config(PACKED))),
        r"config_groups .* one or several with equal weights",
    ),
]


@pytest.mark.parametrize(("checkpoint", "change", "problem"), REFUSED)
def test_what_a_configuration_asks_for_in_vain_is_named(
    checkpoint: Checkpoint,
    change: Callable[[dict[str, Any]], object],
    problem: str,
    folders: dict[Checkpoint, Path],
    tmp_path: Path,
) -> None:
    copy_changed(folders[checkpoint], tmp_path, change_config=change)
    with pytest.raises(ModelError, match=rf"config\.json: quantization_config.*{problem}"):
        load_model_config(resolve_model(str(tmp_path)))


def set_to(part: str, tensor: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({Q_PROJ + part: tensor})


BROKEN: list[tuple[Checkpoint, Callable[[Tensors], object], str]] = [
    (GPTQ, lambda t: t.pop(Q_PROJ + "scales"), r"q_proj\.scales is missing"),
    (GPTQ, lambda t: t.pop(Q_PROJ + "qzeros"), r"q_proj\.qzeros is missing"),
    (GPTQ, lambda t: t.pop(Q_PROJ + "qweight"), r"q_proj\.weight is missing|q_proj\.g_idx is I32"),
    (GPTQ, set_to("scales", torch.ones(3, 128)), r"q_proj\.scales has shape \[3, 128\], expected \[4, 128\]"),
    (GPTQ, set_to("qzeros", torch.ones(4, 16)), r"q_proj\.qzeros is F32, expected I32"),
    (GPTQ, set_to("qweight", torch.ones(12, 128, dtype=torch.int32)), r"q_proj\.(scales|qzeros|g_idx) has shape"),
    (GPTQ, set_to("qweight", torch.ones(16, dtype=torch.int32)), r"q_proj\.qweight: nothing there says the shape"),
    (GPTQ, set_to("qweight", torch.ones(13, 128, dtype=torch.int32)), r"104 inputs, no multiple of group_size 32"),
    (GPTQ, set_to("input_scale", torch.ones(1)), r"q_proj\.input_scale is not part of a matrix of 'gptq'"),
    (GPTQ, set_to("bias", torch.ones(128)), r"q_proj\.bias is not part of a model of its architecture"),
    (
        GPTQ,
        set_to("g_idx", torch.arange(128, dtype=torch.int32) % 4),
        r"quantization_config\.desc_act: .*q_proj\.g_idx .*only groups of 32 inputs in their order",
    ),
    (AWQ, set_to("qweight", torch.ones(128, 15, dtype=torch.int32)), r"q_proj\.(scales|qzeros) has shape"),
    (AWQ, set_to("qweight", torch.ones(0, 16, dtype=torch.int32)), r"q_proj\.qweight: nothing there says the shape"),
    (PACKED, lambda t: t.pop(Q_PROJ + "weight_shape"), r"nothing there says the shape"),
    (PACKED, set_to("weight_shape", torch.tensor([128, -128])), r"nothing there says the shape"),
    (PACKED, set_to("weight_shape", torch.tensor([2**62, 128])), r"weight_packed has shape \[128, 16\], expected"),
    (PACKED, lambda t: t.pop(Q_PROJ + "weight_zero_point"), r"q_proj\.weight_zero_point is missing"),
    (PACKED, set_to("weight_g_idx", torch.arange(128) % 4), r"quantization_config\.actorder: .*weight_g_idx"),
    (INTEGERS, lambda t: t.pop(Q_PROJ + "weight_scale"), r"q_proj\.weight is I8, and nothing beside it says"),
    (INTEGERS, set_to("weight", torch.ones(128, 128)), r"q_proj\.weight is F32, expected I8"),
    (INTEGERS, set_to("weight_scale", torch.ones(1)), r"weight_scale has shape \[1\], expected \[128, 1\]"),
]


@pytest.mark.parametrize(("checkpoint", "change", "problem"), BROKEN)
def test_a_tensor_that_does_not_fit_is_named(
    checkpoint: Checkpoint,
    change: Callable[[Tensors], object],
    problem: str,
    folders: dict[Checkpoint, Path],
    tmp_path: Path,
) -> None:
    copy_changed(folders[checkpoint], tmp_path, change)
    source = resolve_model(str(tmp_path))
    with pytest.raises(ModelError, match=problem):
        open_tensors(source, load_model_config(source))
    assert find_obstacle(source), "and the hub does not fetch it"


def refused_values(folder: Path, precision: Precision, problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        load_model(resolve_model(str(folder)), precision, FixedShare(1), folder)


def test_numbers_that_mean_nothing_are_named(folders: dict[Checkpoint, Path], tmp_path: Path) -> None:
    copy_changed(folders[GPTQ], tmp_path, set_to("scales", torch.full((4, 128), torch.inf)))
    refused_values(tmp_path, "fp32", r"q_proj\.weight has a scale that is infinite or not a number")
    copy_changed(folders[INTEGERS], tmp_path, change_config=lambda f: weights(f).update(num_bits=4))
    refused_values(tmp_path, "fp32", r"q_proj\.weight has integers of more than 4 bits")


def test_eight_bits_far_from_their_zero_are_not_rounded_but_refused_in_int8(tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path, Checkpoint("gptq", 8, version="gptq_v2"), num_hidden_layers=1)
    copy_changed(tmp_path, tmp_path, set_to("qzeros", torch.zeros(4, 32, dtype=torch.int32)))
    refused_values(tmp_path, "int8", r"q_proj.*64 \.\.\. 191 from their zero points, expected .*--precision fp32")
    assert load_model(saved.source, "fp32", FixedShare(1), tmp_path).num_bytes > 0


def test_biases_of_zeros_that_old_tools_wrote_and_activations_in_8_bits_are_no_obstacle(
    folders: dict[Checkpoint, Path], tmp_path: Path
) -> None:
    copy_changed(folders[GPTQ], tmp_path, set_to("bias", torch.zeros(128)))
    assert not find_obstacle(resolve_model(str(tmp_path)))
    copy_changed(folders[INTEGERS], tmp_path, change_config=lambda f: group(f).update(input_activations=ACTIVATIONS))
    assert not find_obstacle(resolve_model(str(tmp_path)))


def test_the_same_bytes_read_otherwise_are_another_model(folders: dict[Checkpoint, Path], tmp_path: Path) -> None:
    first = model_digest(resolve_model(str(folders[GPTQ])), "int8")
    copy_changed(folders[GPTQ], tmp_path)
    assert model_digest(resolve_model(str(tmp_path)), "int8") == first
    copy_changed(folders[GPTQ], tmp_path, change_config=lambda f: f.update(checkpoint_format="gptq_v2"))
    assert model_digest(resolve_model(str(tmp_path)), "int8") != first
