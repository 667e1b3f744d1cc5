"""Precisions of a device through a whole stack: matrices in E4M3 and pages in int8, and exact products."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from weir.client import GenerateOptions, WeirClient
from weir.model.files.config import load_model_config
from weir.model.files.source import resolve_model
from weir.model.torch.weights import WeightFormat, weights_bytes
from weir.testing.stack import Stack

pytestmark = [pytest.mark.stack, pytest.mark.long, pytest.mark.timeout(300)]

NUM_TOKENS = 4
SAME_SUMS = {"OPENBLAS_CORETYPE": "Nehalem", "OPENBLAS_NUM_THREADS": "1"}
"""The interpreter's products are NumPy's, which add otherwise by where numbers lie, but for old processors. Its threads
wait for one another without giving way: beside other stacks that took seven times as long."""
PROMPT = [(11 * i + 3) % 1024 for i in range(21)]
# a process of its own: Triton decides while it is imported whether kernels are interpreted
_ONE_WORKER = """
import json, sys
from weir.core.sampling import SamplingParams
from weir.engine.plan import ChunkPlan, SampleSpec, StepPlan
from weir.kv.geometry import ArenaGeometry, num_pages_for
from weir.kv.memory.device import HostMemory
from weir.model.files.source import resolve_model
from weir.model.precision import page_geometry
from weir.model.triton.load import load_on_device

prompt, num_tokens, precision, is_exact = json.loads(sys.argv[1])
weights = load_on_device(resolve_model("dummy:tiny"), precision, "interpreter", num_threads=1)
page_bytes = page_geometry(weights.config, weights.arithmetic).page_bytes
geometry = ArenaGeometry(page_bytes, 8, num_slots=1, max_context_tokens=128, pages_on_device=True)
memory = HostMemory.create(geometry.page_memory_bytes)
runner = weights.runner_over(memory, geometry, max_rows=64, max_sequences=4, is_exact=is_exact)
tokens, start, found = list(prompt), 0, []
for index in range(num_tokens):
    table = tuple(range(num_pages_for(len(tokens))))
    spec = SampleSpec(SamplingParams(temperature=1.0, seed=77, logprobs=1), index)
    chunk = ChunkPlan(0, start, tuple(tokens[start:]), table, spec)
    start = len(tokens)
    result = runner.run(StepPlan(0, (chunk,)))
    tokens.append(result.token_ids[0])
    found.append((result.token_ids[0], result.logprobs[0].logprob))
print(json.dumps(found))
"""


def scores_of_one_worker(precision: str, *, is_exact: bool) -> list[tuple[int, float]]:
    """Tokens, and their log-probabilities, which tell more of the pages than tokens do."""
    arguments = [sys.executable, "-c", _ONE_WORKER, json.dumps([PROMPT, NUM_TOKENS, precision, is_exact])]
    child = subprocess.run(
        arguments, capture_output=True, text=True, check=False, timeout=100, env=os.environ | SAME_SUMS
    )
    assert child.returncode == 0, child.stderr[-2000:]
    return [(token_id, logprob) for token_id, logprob in json.loads(child.stdout)]


@pytest.mark.parametrize(
    ("precision", "kept", "is_exact"),
    [("fp8-kv8", WeightFormat(torch.float16, True), False), ("fp32", WeightFormat(torch.float32), True)],
    ids=["fp8-kv8", "exact"],
)
def test_two_workers_say_what_one_says(precision: str, kept: WeightFormat, is_exact: bool, tmp_path: Path) -> None:
    expected = scores_of_one_worker(precision, is_exact=is_exact)
    assert len(set(expected)) > 3, "one token fits any model"
    model = ("--load", "dummy", "--model-shape", "tiny", "--max-context-tokens", "128")
    exact = ("--exact",) if is_exact else ()
    flags = ("--device", "interpreter", "--precision", precision, *exact, *model, "--arena-bytes", str(8 << 20))
    options = GenerateOptions(temperature=1.0, seed=77, logprobs=1, max_tokens=NUM_TOKENS, ignore_eos=True)
    config = load_model_config(resolve_model("dummy:tiny"))
    with Stack(tmp_path, flags=flags, environ={"WEIR_SERVES_LOCALLY": "false", **SAME_SUMS}) as stack:
        with WeirClient(stack.grpc_address) as client:
            for _ in ("computed", "from the prefix cache"):
                scores = [score for chunk in client.generate(PROMPT, options) for score in chunk.logprobs]
                assert [score.token_id for score in scores] == [token_id for token_id, _ in expected]
                logprobs = torch.tensor([logprob for _, logprob in expected]).tolist()  # float32, as they are sent
                assert [score.logprob for score in scores] == pytest.approx(
                    logprobs, rel=0, abs=0 if is_exact else 1e-3
                )
        assert stack.metric("transfer", "weights_bytes") == weights_bytes(config, kept)
        assert stack.metric("decode", "taken_over_total") == 2
        assert stack.integrity_errors() == []
