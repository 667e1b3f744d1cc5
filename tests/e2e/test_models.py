"""Other models than the built-in one, through a whole stack: by path, and random weights by shape."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import grpc
import pytest

from weir.client import GenerateOptions, WeirClient
from weir.core.grammar import Grammar
from weir.testing.load import StreamRecord, greedy_request, open_stub, stream
from weir.testing.stack import Stack

if TYPE_CHECKING:
    from tests.unit.model.tiny import TinyLlama

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]

SMALL_ARENA = ("--arena-bytes", str(64 << 20))
NUM_TOKENS = 24


def generate(stack: Stack, ids: list[int], num_tokens: int) -> StreamRecord:
    async def run() -> StreamRecord:
        channel, stub = open_stub(stack.grpc_address)
        async with channel:
            return await stream(stub, greedy_request(ids, max_tokens=num_tokens, ignore_eos=True))

    return asyncio.run(run())


def greedy_ids(tiny: "TinyLlama", ids: list[int], num_tokens: int) -> list[int]:
    """By transformers, without a cache."""
    for _ in range(num_tokens):
        ids = [*ids, int(tiny.logits(ids)[-1].argmax())]
    return ids[-num_tokens:]


def test_a_model_named_by_its_path_gives_the_tokens_of_transformers(tmp_path: Path) -> None:
    # PyTorch and transformers take seconds to import, in each worker of pytest
    from tests.unit.model.architectures import VARIANTS, save_variant  # noqa: PLC0415
    from tests.unit.model.gguf_copy import write_gguf  # noqa: PLC0415
    from tests.unit.model.tiny import prompt_ids  # noqa: PLC0415

    variant = next(variant for variant in VARIANTS if variant.name == "qwen3")
    tiny = save_variant(tmp_path / "hf", variant)
    path = tmp_path / "tiny-qwen3.gguf"
    write_gguf(tiny, path, gguf.GGMLQuantizationType.F32)
    ids = prompt_ids(70, seed=2)
    flags = ("--model", str(path), "--precision", "fp32", *SMALL_ARENA)
    with Stack(tmp_path / "run", flags=flags) as stack:
        record = generate(stack, ids, NUM_TOKENS)
        with WeirClient(stack.grpc_address) as client:
            spelled = Grammar("regex", r"( \n){3}")  # of what this model's tokens stand for
            options = GenerateOptions(grammar=spelled, temperature=0, max_tokens=20)
            held = "".join(chunk.text for chunk in client.generate(ids, options))
    assert (record.code, record.details) == (grpc.StatusCode.OK, "")
    assert record.token_ids == greedy_ids(tiny, ids, NUM_TOKENS)
    assert held == " \n" * 3 + chr(2)  # the end token, which this file does not mark as one without text


def test_random_weights_answer_within_the_context_they_are_given(tmp_path: Path) -> None:
    flags = ("--load", "dummy", "--model-shape", "tiny", "--max-context-tokens", "128", *SMALL_ARENA)
    with Stack(tmp_path / "run", flags=flags) as stack:
        record = generate(stack, list(b"user: Hi\nassistant:"), 20)
        cut_short = generate(stack, [1] * 120, 20)
        refused = generate(stack, [1] * 128, 20)
    assert (record.code, len(record.token_ids)) == (grpc.StatusCode.OK, 20)
    assert record.text
    assert (cut_short.code, len(cut_short.token_ids)) == (grpc.StatusCode.OK, 8)
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "128" in refused.details
