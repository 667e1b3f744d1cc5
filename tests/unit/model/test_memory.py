"""The estimate of what workers take beside the arena, and what they do take."""

from pathlib import Path

import pytest

from weir.model.architecture import ModelConfig
from weir.model.cpu.packed_weights import DATA_START, write_packed
from weir.model.cpu.packing import pack_arrays, pack_matrices
from weir.model.files.dummy import MODEL_SHAPES, DummyTensors
from weir.model.memory import OTHERS_BYTES, stack_bytes

MIB = 1 << 20


def shared_bytes(config: ModelConfig) -> int:
    """What stays where there is no worker."""
    one, two = (stack_bytes(config, "int8", "cpu", number) for number in (1, 2))
    return 2 * one - two - OTHERS_BYTES


def test_packed_weights_take_no_more_than_is_estimated_for_them(tmp_path: Path) -> None:
    config, path = MODEL_SHAPES["tiny"], tmp_path / "packed"
    tensors = DummyTensors(config)
    write_packed(path, pack_matrices(tensors, config), pack_arrays(tensors, config))
    assert shared_bytes(config) >= path.stat().st_size - DATA_START  # before it is the index, of a fixed size


@pytest.mark.parametrize("shape", ["smollm2-135m", "llama-3.2-1b"])
def test_workers_share_packed_weights_and_have_those_of_pytorch_each(shape: str) -> None:
    config = MODEL_SHAPES[shape]

    def of_one_more(arithmetic: str) -> int:
        return stack_bytes(config, arithmetic, "cpu", 3) - stack_bytes(config, arithmetic, "cpu", 2)  # type: ignore[arg-type]

    num_weights = 134_000_000 if shape == "smollm2-135m" else 1_235_000_000
    assert of_one_more("int8") < 700 * MIB
    assert of_one_more("fp32") > 4 * num_weights


def test_weights_on_a_gpu_take_no_memory_of_the_host() -> None:
    config = MODEL_SHAPES["llama-3.1-8b"]
    assert stack_bytes(config, "bf16", "cuda", 2) < 4 << 30
