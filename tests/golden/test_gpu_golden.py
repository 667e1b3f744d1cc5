"""On a GPU, through a prefill and two decode workers, the tokens are those of the golden file."""

import asyncio
from pathlib import Path

import pytest
from tests.golden.generation import ALLOWED_DIFFERENCES, load_golden
from tests.golden.test_split_golden import answers, check_tokens

from weir.testing.load import StreamRecord
from weir.testing.stack import Stack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.golden,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no NVIDIA GPU here"),
]


def answers_on_a_gpu(folder: Path, *flags: str) -> tuple[list[StreamRecord], list[StreamRecord]]:
    """To every prompt: 32 at a time, and 3 at a time."""
    environ = {"WEIR_SERVES_LOCALLY": "false"}
    with Stack(folder, num_decode=2, flags=("--device", "cuda", *flags), environ=environ) as stack:
        many = asyncio.run(answers(stack.grpc_address, load_golden(), at_once=32))
        few = asyncio.run(answers(stack.grpc_address, load_golden(), at_once=3))
        assert stack.integrity_errors() == []
    return many, few


def test_every_prompt_in_fp32_equals_transformers(tmp_path: Path) -> None:
    for records in answers_on_a_gpu(tmp_path, "--precision", "fp32"):
        check_tokens(load_golden(), records, ALLOWED_DIFFERENCES)


def test_exact_answers_are_the_same_whatever_else_is_answered(tmp_path: Path) -> None:
    many, few = answers_on_a_gpu(tmp_path, "--precision", "bf16", "--exact")
    assert [record.token_ids for record in many] == [record.token_ids for record in few]
    assert all(record.token_ids for record in many)
