"""After its warm-up an int8 worker neither compiles anything nor has torch in memory."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.model.tiny import TinyLlama

pytestmark = pytest.mark.timeout(600)

PROGRAM = """
import sys
from pathlib import Path
import numpy as np
from numba.core import event
from weir.core.sampling import SamplingParams
from weir.engine.plan import ChunkPlan, SampleSpec, ScoreSpec, StepPlan, TokenHistory
from weir.model.cpu.core_share import FixedShare
from weir.model.load import load_model
from weir.model.files.source import resolve_model

weights = load_model(resolve_model(sys.argv[1]), "auto", FixedShare(2), Path(sys.argv[2]))
runner = weights.runner_over(np.zeros((64, weights.page_geometry.page_bytes), np.uint8))
runner.warm_up()

class Listener(event.Listener):
    compiled = []
    def on_start(self, found):
        self.compiled.append(found.data["dispatcher"].py_func.__qualname__)
    def on_end(self, found):
        pass

event.register("numba:compile", Listener())
history = TokenHistory(np.arange(5, dtype=np.int32), 3)
kinds = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=3),
    SamplingParams(top_k=5, top_p=0.9, min_p=0.05, seed=4, logprobs=3),
    SamplingParams(presence_penalty=0.5, repetition_penalty=1.2, logit_bias=((4, 2.0),), logprobs=0),
]
for num_decodes in (0, 1, 9):
    for num_tokens in (0, 2, 130):
        chunks = [
            ChunkPlan(n, 20 + n, (n,), (2 * n, 2 * n + 1), SampleSpec(kinds[n % 4], 1, (7,), history))
            for n in range(num_decodes)
        ]
        if num_tokens:
            ids = tuple(range(num_tokens))
            score = ScoreSpec(ids[1:], 2)
            chunks.append(ChunkPlan(40, 0, ids, tuple(range(30, 40)), SampleSpec(kinds[0], 0), score))
        runner.run(StepPlan(0, tuple(chunks)))
print(Listener.compiled, "torch" in sys.modules)
"""


def test_serving_compiles_nothing_and_imports_no_torch(tiny: TinyLlama, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tiny.folder), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=590, check=False)
    assert done.stdout == "[] False\n", done.stderr
